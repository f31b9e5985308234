"""How clients outside of the cluster reach a service: an Ingress or an HTTPRoute beside its Service, where the spec asks for one.

Whoever runs the controller of either decides what becomes of it. Streams last as long as they last: a route says that no time
is set for a request, an Ingress can only say it by the annotations of its controller.
"""

from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.router import Expose, Gateway
from phalanx_operator.render import names
from phalanx_operator.render.objects import Object, child

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
