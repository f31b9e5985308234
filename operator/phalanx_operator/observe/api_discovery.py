"""Discovers which scheduler APIs the cluster serves, and in which namespaces the operator has its role."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from phalanx_operator.kube.client import INFERENCE_SERVICES, Denied, Gone, KubeClient, KubeError, Resource, Retry, Unauthenticated
from phalanx_operator.render.gangs import NATIVE_API, VOLCANO_API

log = logging.getLogger(__name__)
REDISCOVER_S, RETRY_S = 600.0, 15.0
NO_OBJECT = "phalanx.dev/service=none"
"""Label selector without a match: the call only shows whether it is allowed."""
POD_GROUPS = {api: Resource(api, "podgroups") for api in (NATIVE_API, VOLCANO_API)}


class SchedulerDiscovery:
    """Caches the answer for `REDISCOVER_S`."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._served: frozenset[str] | None = None
        self._next_s = -math.inf

    async def served(self, namespace: str) -> frozenset[str] | None:
        """Returns the served API versions, if known."""
        if self._clock() < self._next_s:
            return self._served
        try:
            served = frozenset([api for api, resource in POD_GROUPS.items() if await self._is_served(resource, namespace)])
        except KubeError as error:
            log.warning("scheduler discovery failed", extra={"why": str(error)})
            self._next_s = self._clock() + RETRY_S
            return self._served
        if served != self._served:
            log.info("scheduler APIs", extra={"apis": ", ".join(sorted(served))})
        self._served, self._next_s = served, self._clock() + REDISCOVER_S
        return served

    async def _is_served(self, resource: Resource, namespace: str) -> bool:
        try:
            await self._client.list_page(resource, namespace, NO_OBJECT, "")
        except (Gone, Denied):
            return False
        return True


async def is_allowed(client: KubeClient, namespace: str) -> bool | None:
    """Returns whether the operator has its role in a namespace; null if the API server does not answer.

    Raises Gone without the CRD.
    """
    try:
        await client.list_page(INFERENCE_SERVICES, namespace, NO_OBJECT, "")
    except (Retry, Unauthenticated):
        return None
    except Denied:
        return False
    return True


async def denied_namespaces(client: KubeClient, namespaces: Sequence[str]) -> frozenset[str]:
    """Returns the namespaces that the operator may not watch: deleted ones, and those without its RoleBinding.

    None if it may watch none, since its installation is incomplete then.
    """
    denied = frozenset([namespace for namespace in namespaces if await is_allowed(client, namespace) is False])
    for namespace in sorted(denied):
        log.error("namespace not watched", extra={"namespace": namespace, "why": "the operator has no role in it"})
    return denied if len(denied) < len(set(namespaces)) else frozenset()


async def returned_namespace(client: KubeClient, denied: Iterable[str]) -> str:
    """Returns the first of these namespaces that the operator may watch; empty if there is none."""
    for namespace in sorted(denied):
        if await is_allowed(client, namespace):
            return namespace
    return ""
