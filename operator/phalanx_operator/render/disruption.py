"""What voluntary evictions may take at once: one pod of all groups, one router.

A group serves with all of its pods or not at all, and all of them are not ready when one is missing. So the first eviction blocks
every other group and, for pods that are not ready may always be evicted, frees the rest of its own.
"""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import names, pods
from phalanx_operator.render.objects import Object, child


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
