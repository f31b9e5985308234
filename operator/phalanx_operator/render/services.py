"""Token, headless Service and disruption budgets."""

import base64
import binascii
from collections.abc import Mapping

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.wire.holders import holder_token
from phalanx_operator.render import objects as names
from phalanx_operator.render import pods
from phalanx_operator.render.objects import Object, child

TOKEN_KEY = "token"
"""Key of the Secret, and name of the mounted file."""


def token_secret(service: InferenceService, token: str, annotations: Mapping[str, str]) -> Object:
    """Returns the Secret with the first token."""
    data = {TOKEN_KEY: token}
    secret = child(service, "v1", "Secret", names.token_secret(service.name), pods.COMPONENT, type="Opaque", stringData=data)
    if annotations:
        secret["metadata"]["annotations"] = dict(annotations)
    return secret


def read_tokens(secret: Object) -> tuple[str, ...]:
    """Returns the tokens in a Secret, the one to send first; none if it is not readable."""
    try:
        text = base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY, ""), validate=True).decode("ascii", errors="replace")
    except (ValueError, binascii.Error):
        return ()
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def shared_pages(service: InferenceService, token: str) -> Object:
    """Returns the service's part of the namespace's Secret: its token for cached pages, or nothing if `token` is empty.

    Each service applies its part by a field manager of its own.
    """
    metadata: Object = {"name": names.SHARED_PAGES, "namespace": service.namespace, "labels": {labels.MANAGED_BY: labels.MANAGER}}
    data = {service.name: base64.b64encode(holder_token(token).encode()).decode()} if token else {}
    if token:
        metadata["ownerReferences"] = [names.co_owner(service)]
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def groups_service(service: InferenceService, *, is_internal: bool = False) -> Object:
    """Returns the headless Service. It publishes unready pods, because ranks have to meet.

    is_internal: some pods have certificates. A port's name then selects the pods that serve it.
    """
    http: Object = {"name": "http", "port": labels.HTTP_PORT, "targetPort": labels.HTTP_PORT, "protocol": "TCP"}
    internal = http | {"name": pods.INTERNAL, "port": labels.INTERNAL_PORT, "targetPort": pods.INTERNAL}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {labels.SERVICE: service.name, labels.COMPONENT: pods.COMPONENT},
        "ports": [http | {"targetPort": "http"}, internal] if is_internal else [http],
    }
    return child(service, "v1", "Service", names.groups_service(service.name), pods.COMPONENT, spec=spec)


def group_budget(service: InferenceService) -> Object:
    """Returns a budget of one pod. A single group has no budget, which would block every eviction.

    The first eviction makes its group unready and so blocks the others; unready pods may always be evicted.
    """
    return _budget(service, names.groups_budget(service.name), pods.COMPONENT)


def router_budget(service: InferenceService) -> Object:
    """Returns the disruption budget of the routers."""
    return _budget(service, names.router(service.name), "router")


def _budget(service: InferenceService, name: str, component: str) -> Object:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: component}},
    }
    return child(service, "policy/v1", "PodDisruptionBudget", name, component, spec=spec)
