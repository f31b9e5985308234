"""Manifests that need no tool to be looked at: scalers of the samples, the chart's values and schema, alerts."""

import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from phalanx_api import labels
from phalanx_operator.metrics import Metrics
from phalanx_operator.render.objects import container_security, pod_security
from phalanx_operator.settings import Settings
from phalanx_runtime.commands import FetchSettings
from phalanx_runtime.settings import read_settings

ROOT = pathlib.Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
CHART = MANIFESTS / "chart"


@pytest.mark.parametrize(("name", "field"), [("hpa", "minReplicas"), ("keda", "minReplicaCount")])
def test_sample_scaler_uses_the_operators_metric(name: str, field: str) -> None:
    service, scaler = yaml.safe_load_all((MANIFESTS / "samples" / f"{name}.yaml").read_text())
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": service["apiVersion"], "kind": service["kind"], "name": service["metadata"]["name"]}
    bounds = service["spec"]["autoscaling"]
    assert bounds["mode"] == "External" and bounds["minReplicas"] == scaler["spec"][field]
    assert "phalanx_operator_desired_groups" in json.dumps(scaler)


def test_sample_job_fetches_the_model_of_its_service() -> None:
    job, service = yaml.safe_load_all((MANIFESTS / "samples" / "filled-cache.yaml").read_text())
    pod, model = job["spec"]["template"]["spec"], service["spec"]["model"]
    (container,) = pod["containers"]
    fetched = read_settings(container["args"], {})
    assert isinstance(fetched, FetchSettings) and fetched.model == model["uri"]
    assert str(fetched.download_dir) == container["volumeMounts"][0]["mountPath"] == labels.MODEL_CACHE_DIR
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == model["cache"]["claimName"]
    assert (pod["securityContext"], container["securityContext"]) == (pod_security(), container_security())
    assert container["image"] in (MANIFESTS / "base" / "operator.yaml").read_text()


def test_the_crd_of_the_chart_is_the_crd() -> None:
    assert (CHART / "crds" / "inferenceservices.yaml").resolve() == (ROOT / "crds" / "inferenceservices.yaml").resolve()


@pytest.mark.parametrize("name", ["rbac.yaml", "service.yaml"])
def test_chart_equals_the_base(name: str) -> None:
    """Without Helm, for every commit; tests/cluster compares what both tools make of all of it."""
    base, template = (MANIFESTS / "base" / name).read_text(), (CHART / "templates" / name).read_text()
    assert template == base.replace("phalanx-system", "{{ .Release.Namespace }}")


@pytest.mark.parametrize("name", ["gpu-cluster", "installation"])
def test_fields_that_a_page_names_are_there(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    known = set(re.findall(r"^\| `(spec\.[\w.]+)` ", (ROOT / "docs" / "api.md").read_text(), re.M))
    named = {field for field in re.findall(r"`(spec\.\w+(?:\.\w+)*)", page) if not field.startswith("spec.podTemplate")}
    assert named and sorted(named - known) == []


def test_values_schema_lists_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    assert schema["additionalProperties"] is False


def test_page_lists_every_chart_value() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(re.findall(r"`(\w+)(?:\.\w+)?`", page))
    assert sorted(name for name in values if name not in named) == []


def test_defaults_of_the_chart_are_those_of_the_program() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = Settings(runtime_image="r", router_image="o")
    assert (values["leaseSeconds"], values["workers"]) == (defaults.lease_seconds, defaults.workers)
    template = (CHART / "templates" / "operator.yaml").read_text()
    assert f"(int .Values.leaseSeconds) {defaults.lease_seconds}" in template
    assert f"(int .Values.workers) {defaults.workers}" in template


def test_the_version_is_that_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None and chart["version"] == chart["appVersion"] == version[1]


def test_the_operators_alerts_rest_on_its_own_metrics() -> None:
    known = {family.name for family in Metrics().registry.collect()}
    bodies = yaml.safe_load_all((MANIFESTS / "components" / "monitoring" / "monitors.yaml").read_text())
    rules = next(body for body in bodies if body["kind"] == "PrometheusRule")["spec"]["groups"][0]["rules"]
    named = {name.removesuffix("_total") for rule in rules for name in re.findall(r"phalanx_operator_\w+", rule["expr"])}
    assert named and named <= known
    page = (ROOT / "docs" / "installation.md").read_text()
    told = {name.removesuffix("_total") for name in re.findall(r"phalanx_operator_\w+", page)} - {"phalanx_operator"}
    assert told == {name for name in known if name.startswith("phalanx_operator_")}
    assert [rule["alert"] for rule in rules if f"`{rule['alert']}`" not in page] == []
