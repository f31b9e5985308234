"""A Prometheus that scrapes the pods of a namespace, with the labels of our ServiceMonitors."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from bench.frame.prometheus import Prometheus, running_prometheus
from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import monitoring
from tests.cluster.access import Cluster
from tests.cluster.operator import NAMESPACE as OPERATOR_NAMESPACE
from tools.errors import Failed

SCRAPE_S = 2
LISTED_S = 4.0
"""Seconds between two lists of the pods: Debian's Prometheus has no discovery of Kubernetes."""
OPERATOR_PORT = 8080
_MONITORS = Path(__file__).parents[2] / "manifests/components/monitoring/monitors.yaml"
_TARGET_LABELS = (labels.SERVICE, labels.COMPONENT, labels.GROUP, labels.REVISION)


def rules(service: InferenceService) -> dict[str, Any]:
    """Returns the file of rules of a service and of the operator."""
    own = monitoring.objects(service)[1]["spec"]["groups"]
    documents = yaml.safe_load_all(_MONITORS.read_text())
    of_operator = [group for each in documents if each["kind"] == "PrometheusRule" for group in each["spec"]["groups"]]
    return {"groups": [*own, *of_operator]}


def targets(pods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the file of targets for pods as Kubernetes lists them: routers, leaders and operators that have an address."""
    return [found for pod in pods if (found := _target(pod)) is not None]


def _target(pod: Mapping[str, Any]) -> dict[str, Any] | None:
    own: Mapping[str, str] = pod["metadata"].get("labels", {})
    address = pod.get("status", {}).get("podIP")
    if not address or pod["status"].get("phase") != "Running" or own.get(labels.POD_INDEX, "0") != "0":
        return None
    common = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
    if labels.COMPONENT in own:
        found = {label.replace(".", "_").replace("/", "_"): own[label] for label in _TARGET_LABELS if label in own}
        return {"targets": [f"{address}:{labels.HTTP_PORT}"], "labels": common | found}
    if common["namespace"] == OPERATOR_NAMESPACE:
        return {"targets": [f"{address}:{OPERATOR_PORT}"], "labels": common}
    return None


@contextmanager
def scraped_namespace(
    cluster: Cluster, namespace: str, folder: Path, rules: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """Runs a Prometheus until the block ends. Runs in the cluster's network. `rules`: a file of rules."""
    files = {name: folder / f"targets-{name}.json" for name in (namespace, OPERATOR_NAMESPACE)}
    ended = threading.Event()

    def refresh() -> None:
        for name, file in files.items():
            try:
                pods = json.loads(cluster.kubectl("get", "pods", "-n", name, "-o", "json"))["items"]
            except Failed:
                continue  # the API server may be what the caller disturbs; the targets stay
            new = file.with_suffix(".new")
            new.write_text(json.dumps(targets(pods)))
            new.rename(file)

    def keep_fresh() -> None:
        while not ended.wait(LISTED_S):
            refresh()

    refresh()
    jobs = [
        {"job_name": name, "honor_labels": name == OPERATOR_NAMESPACE, "file_sd_configs": [{"files": [str(file)]}]}
        for name, file in files.items()
    ]
    lister = threading.Thread(target=keep_fresh, name="pods")
    with running_prometheus(folder, jobs, rules, SCRAPE_S) as prometheus:
        lister.start()
        try:
            yield prometheus
        finally:
            ended.set()
            lister.join()
