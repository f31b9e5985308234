"""What all groups of a service share: the token, and the headless Service that gives their pods names."""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import objects as names
from phalanx_operator.render import pods
from phalanx_operator.render.objects import Object, child


def token_secret(service: InferenceService, token: str) -> Object:
    """The Secret with the token of the service. It is made once, and never written again."""
    return child(
        service, "v1", "Secret", names.token_secret(service.name), pods.COMPONENT, type="Opaque", stringData={"token": token}
    )


def groups_service(service: InferenceService) -> Object:
    """The headless Service of all groups. Names are there before the pods are ready: that is when ranks meet."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {labels.SERVICE: service.name, labels.COMPONENT: pods.COMPONENT},
        "ports": [{"name": "http", "port": labels.HTTP_PORT, "targetPort": labels.HTTP_PORT, "protocol": "TCP"}],
    }
    return child(service, "v1", "Service", names.groups_service(service.name), pods.COMPONENT, spec=spec)


# What voluntary evictions may take at once: one pod of all groups, one router.
# A group serves with all of its pods or not at all, and all of them are not ready when one is missing. So the first eviction
# blocks every other group and, for pods that are not ready may always be evicted, frees the rest of its own.


def group_budget(service: InferenceService) -> Object:
    """The disruption budget of all groups. With a single group there is none, for it would never let the group go."""
    return _budget(service, names.groups_budget(service.name), pods.COMPONENT)


def router_budget(service: InferenceService) -> Object:
    """The disruption budget of the routers."""
    return _budget(service, names.router(service.name), "router")


def _budget(service: InferenceService, name: str, component: str) -> Object:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: component}},
    }
    return child(service, "policy/v1", "PodDisruptionBudget", name, component, spec=spec)
