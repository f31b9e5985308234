"""Every object that is written for another project: by the operator, in the manifests, in the samples."""

from pathlib import Path
from typing import Any

import yaml

from phalanx_operator.render import gangs, monitoring
from phalanx_operator.render import network as exposed
from tests.control.builders import make_service

MANIFESTS = Path(__file__).parents[2] / "manifests"
PLACEMENT = {"queueName": "team", "priorityClassName": "high"}
GATEWAY = {"name": "public", "namespace": "gateways", "sectionName": "https"}
DOORS: dict[str, dict[str, Any]] = {
    "route": {"type": "HTTPRoute", "hosts": ["chat.example.com"], "gateway": GATEWAY, "annotations": {"a": "b"}},
    "ingress": {"type": "Ingress", "hosts": ["chat.example.com"], "className": "nginx", "tlsSecretName": "chat-tls"},
}


def documents(path: str) -> list[dict[str, Any]]:
    """What a file of the manifests holds."""
    return [body for body in yaml.safe_load_all((MANIFESTS / path).read_text()) if body]


def written() -> dict[str, dict[str, Any]]:
    """The objects, by a name for the test. Ingress is of Kubernetes itself, and what its controllers read all the same."""
    service = make_service(parallelism={"tensor": 4, "gpusPerPod": 2}, placement=PLACEMENT)
    (pod_group,) = gangs.of_kind("Volcano").objects(service, "chat-g-xxxxx", "uid-9", 2)
    found = [*monitoring.objects(service), *documents("components/monitoring/monitors.yaml"), pod_group]
    found += [body for body in documents("samples/keda.yaml") if body["kind"] == "ScaledObject"]
    for door in DOORS.values():
        found += [body for body, is_wanted in exposed.objects(make_service(router={"expose": door})) if is_wanted]
    return {f"{body['kind']} {body['metadata']['name']}": body for body in found}
