"""Who may connect to the pods of a service: network policies for groups and routers.

Between pods of groups every port is open, also from one group to another: they meet at the rendezvous, ranks listen on the ports
after it, and a rank takes the pages of moves, as NCCL its tensors, on a free port that nobody knows before.
"""

from dataclasses import dataclass

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import names, pods, router
from phalanx_operator.render.objects import Object, child

_NAME = "app.kubernetes.io/name"
_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who else may ask a group: the operator in this namespace, and Prometheus in this one (empty: in any)."""

    operator: str = "phalanx-system"
    prometheus: str = ""


def policies(service: InferenceService, neighbours: Neighbours) -> list[Object]:
    """The network policies of groups and routers. They restrict what comes in; what goes out is the administrator's."""
    http = [{"protocol": "TCP", "port": labels.HTTP_PORT}]
    among_groups = {"from": [{"podSelector": _pods(service, pods.COMPONENT)}]}
    from_routers = {"from": [{"podSelector": _pods(service, router.COMPONENT)}], "ports": http}
    from_others = {
        "from": [_peer("phalanx-operator", neighbours.operator), _peer("prometheus", neighbours.prometheus)],
        "ports": http,
    }
    return [
        _policy(service, names.groups_network(service.name), pods.COMPONENT, [among_groups, from_routers, from_others]),
        _policy(service, names.router(service.name), router.COMPONENT, [{"ports": http}]),
    ]


def _pods(service: InferenceService, component: str) -> Object:
    return {"matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: component}}


def _peer(name: str, namespace: str) -> Object:
    there = {"matchLabels": {_NAMESPACE: namespace}} if namespace else {}
    return {"namespaceSelector": there, "podSelector": {"matchLabels": {_NAME: name}}}


def _policy(service: InferenceService, name: str, component: str, ingress: list[Object]) -> Object:
    spec = {"podSelector": _pods(service, component), "policyTypes": ["Ingress"], "ingress": ingress}
    return child(service, "networking.k8s.io/v1", "NetworkPolicy", name, component, spec=spec)
