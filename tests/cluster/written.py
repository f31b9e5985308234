"""Objects of other projects' kinds, rendered or in the manifests."""

from pathlib import Path
from typing import Any

import yaml

from phalanx_operator.render import gangs, monitoring, network
from tests.control.builders import make_service

MANIFESTS = Path(__file__).parents[2] / "manifests"
PLACEMENT = {"queueName": "team", "priorityClassName": "high"}
GATEWAY = {"name": "public", "namespace": "gateways", "sectionName": "https"}
EXPOSURES: dict[str, dict[str, Any]] = {
    "route": {"type": "HTTPRoute", "hosts": ["chat.example.com"], "gateway": GATEWAY, "annotations": {"a": "b"}},
    "ingress": {"type": "Ingress", "hosts": ["chat.example.com"], "className": "nginx", "tlsSecretName": "chat-tls"},
}


def documents(path: str) -> list[dict[str, Any]]:
    """Returns the objects of a file of the manifests."""
    return [body for body in yaml.safe_load_all((MANIFESTS / path).read_text()) if body]


def written() -> dict[str, dict[str, Any]]:
    """Returns the objects by kind and name. Ingress is included: other controllers read its fields."""
    service = make_service(parallelism={"tensor": 4, "gpusPerPod": 2}, placement=PLACEMENT)
    (pod_group,) = gangs.gang_of_kind("Volcano").objects(service, "chat-g-xxxxx", "uid-9", 2)
    objects = [*monitoring.objects(service), *documents("components/monitoring/monitors.yaml"), pod_group]
    objects += [body for body in documents("samples/keda.yaml") if body["kind"] == "ScaledObject"]
    for expose in EXPOSURES.values():
        exposures = network.exposures(make_service(router={"expose": expose}))
        objects += [body for body, is_specified in exposures if is_specified]
    return {f"{body['kind']} {body['metadata']['name']}": body for body in objects}
