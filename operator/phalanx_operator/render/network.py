"""Who may connect to the pods of a service: network policies for groups and routers.

Between pods of groups every port is open, also from one group to another: they meet at the rendezvous, ranks listen on the ports
after it, and a rank takes the pages of moves, as NCCL its tensors, on a free port that nobody knows before.
"""

from dataclasses import dataclass

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.router import Expose, Gateway
from phalanx_operator.render import objects as names
from phalanx_operator.render import pods, router
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


# How clients outside of the cluster reach a service: an Ingress or an HTTPRoute beside its Service, where the spec asks for
# one.
# Whoever runs the controller of either decides what becomes of it. Streams last as long as they last: a route says that no
# time is set for a request, an Ingress can only say it by the annotations of its controller.

COMPONENT = "router"
INGRESS, ROUTE = ("networking.k8s.io/v1", "Ingress"), ("gateway.networking.k8s.io/v1", "HTTPRoute")
_PORT = 80


def objects(service: InferenceService) -> list[tuple[Object, bool]]:
    """Each kind that may be asked for, and whether it is."""
    wanted = service.spec.router.expose
    route = _route(service, wanted, wanted.gateway) if wanted.gateway else child(service, *ROUTE, service.name, COMPONENT)
    return [(_ingress(service, wanted), wanted.type == "Ingress"), (route, wanted.type == "HTTPRoute")]


def _ingress(service: InferenceService, wanted: Expose) -> Object:
    backend = {"service": {"name": names.front_door(service.name), "port": {"number": _PORT}}}
    paths = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}
    rules: list[Object] = [{"host": host, "http": paths} for host in wanted.hosts] or [{"http": paths}]
    spec: Object = {"rules": rules}
    if wanted.class_name:
        spec["ingressClassName"] = wanted.class_name
    if wanted.tls_secret_name:
        spec["tls"] = [{"hosts": list(wanted.hosts), "secretName": wanted.tls_secret_name}]
    return _noted(child(service, *INGRESS, service.name, COMPONENT, spec=spec), wanted)


def _route(service: InferenceService, wanted: Expose, gateway: Gateway) -> Object:
    parent = {"name": gateway.name}
    parent |= {"namespace": gateway.namespace} if gateway.namespace else {}
    parent |= {"sectionName": gateway.section_name} if gateway.section_name else {}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": names.front_door(service.name), "port": _PORT}],
        "timeouts": {"request": "0s"},
    }
    spec = {"parentRefs": [parent], "rules": [rule]} | ({"hostnames": list(wanted.hosts)} if wanted.hosts else {})
    return _noted(child(service, *ROUTE, service.name, COMPONENT, spec=spec), wanted)


def _noted(body: Object, wanted: Expose) -> Object:
    """The object with the annotations that its controller reads."""
    if wanted.annotations:
        body["metadata"]["annotations"] = dict(wanted.annotations)
    return body
