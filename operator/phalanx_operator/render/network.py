"""Network policies, and the Ingress or HTTPRoute for clients.

Between groups every port is open: ranks, KV transfer and NCCL use free ports. A service that shares pages accepts the groups and
routers of all services of the namespace.
"""

from dataclasses import dataclass

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.router import Expose, Gateway
from phalanx_operator.decide.state.snapshot import RouterSchemes
from phalanx_operator.render import objects as names
from phalanx_operator.render import pods, router
from phalanx_operator.render.objects import Object, child

_NAME = "app.kubernetes.io/name"
_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class PeerNamespaces:
    """Namespaces of other pods that may connect to groups."""

    operator: str = "phalanx-system"
    prometheus: str = ""
    """Empty: any namespace."""


DEFAULT_PEERS = PeerNamespaces()


def policies(service: InferenceService, peers: PeerNamespaces) -> list[Object]:
    """Returns the network policies of groups and routers, for ingress only."""
    http = [{"protocol": "TCP", "port": labels.HTTP_PORT}]
    among_groups = {"from": [{"podSelector": _sharing_pods(service, pods.COMPONENT)}]}
    from_routers = {"from": [{"podSelector": _sharing_pods(service, router.COMPONENT)}], "ports": http}
    from_others = {
        "from": [_peer("phalanx-operator", peers.operator), _peer("prometheus", peers.prometheus)],
        "ports": http,
    }
    certified = [{"podSelector": _pods(service, router.COMPONENT)}, _peer("phalanx-operator", peers.operator)]
    from_certified = {"from": certified, "ports": [{"protocol": "TCP", "port": labels.INTERNAL_PORT}]}
    return [
        _policy(service, names.groups_network(service.name), pods.COMPONENT, [among_groups, from_routers, from_others]),
        _policy(service, names.router(service.name), router.COMPONENT, [{"ports": http}, from_certified]),
    ]


def _pods(service: InferenceService, component: str) -> Object:
    return {"matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: component}}


def _sharing_pods(service: InferenceService, component: str) -> Object:
    """Returns the pods of the service; those of all services if it shares pages, since any of them may send and pull some."""
    if not service.spec.rebalancing.share_pages:
        return _pods(service, component)
    return {"matchLabels": {labels.MANAGED_BY: labels.MANAGER, labels.COMPONENT: component}}


def _peer(name: str, namespace: str) -> Object:
    selector = {"matchLabels": {_NAMESPACE: namespace}} if namespace else {}
    return {"namespaceSelector": selector, "podSelector": {"matchLabels": {_NAME: name}}}


def _policy(service: InferenceService, name: str, component: str, ingress: list[Object]) -> Object:
    spec = {"podSelector": _pods(service, component), "policyTypes": ["Ingress"], "ingress": ingress}
    return child(service, "networking.k8s.io/v1", "NetworkPolicy", name, component, spec=spec)


COMPONENT = "router"
INGRESS, ROUTE = ("networking.k8s.io/v1", "Ingress"), ("gateway.networking.k8s.io/v1", "HTTPRoute")
_HTTPS_BACKEND = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
"""Annotation of ingress-nginx. Others read the name or `appProtocol` of the Service's port."""


def exposures(service: InferenceService, schemes: RouterSchemes | None = None) -> list[tuple[Object, bool]]:
    """Returns the Ingress and the HTTPRoute, each with whether it is specified. schemes: default: that of the spec.

    Streams may be long: the route sets no timeout, the Ingress needs annotations.
    """
    expose, is_https = service.spec.router.expose, (schemes or router.specified_schemes(service)).is_https
    route = child(service, *ROUTE, service.name, COMPONENT)
    if expose.gateway:
        route = _route(service, expose, expose.gateway, is_https=is_https)
    return [(_ingress(service, expose, is_https=is_https), expose.type == "Ingress"), (route, expose.type == "HTTPRoute")]


def _backend_port(is_https: bool) -> int:
    return router.HTTPS_PORT if is_https else router.HTTP_PORT


def _ingress(service: InferenceService, expose: Expose, *, is_https: bool) -> Object:
    backend = {"service": {"name": names.client_service(service.name), "port": {"number": _backend_port(is_https)}}}
    paths = {"paths": [{"path": expose.path, "pathType": "Prefix", "backend": backend}]}
    rules: list[Object] = [{"host": host, "http": paths} for host in expose.hosts] or [{"http": paths}]
    spec: Object = {"rules": rules}
    if expose.class_name:
        spec["ingressClassName"] = expose.class_name
    if expose.tls_secret_name:
        spec["tls"] = [{"hosts": list(expose.hosts), "secretName": expose.tls_secret_name}]
    annotations = (_HTTPS_BACKEND if is_https else {}) | dict(expose.annotations)
    return _with_annotations(child(service, *INGRESS, service.name, COMPONENT, spec=spec), annotations)


def _route(service: InferenceService, expose: Expose, gateway: Gateway, *, is_https: bool) -> Object:
    parent = {"name": gateway.name}
    parent |= {"namespace": gateway.namespace} if gateway.namespace else {}
    parent |= {"sectionName": gateway.section_name} if gateway.section_name else {}
    rewritten = {"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": expose.path}}],
        **({"filters": [rewritten]} if expose.path != "/" else {}),
        "backendRefs": [{"name": names.client_service(service.name), "port": _backend_port(is_https)}],
        "timeouts": {"request": "0s"},
    }
    spec = {"parentRefs": [parent], "rules": [rule]} | ({"hostnames": list(expose.hosts)} if expose.hosts else {})
    return _with_annotations(child(service, *ROUTE, service.name, COMPONENT, spec=spec), dict(expose.annotations))


def _with_annotations(body: Object, annotations: dict[str, str]) -> Object:
    if annotations:
        body["metadata"]["annotations"] = annotations
    return body
