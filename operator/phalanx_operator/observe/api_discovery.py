"""Discovers which scheduler APIs the cluster serves."""

import logging
import math
import time
from collections.abc import Callable

from phalanx_operator.kube.client import Denied, Gone, KubeClient, KubeError, Resource
from phalanx_operator.render.gangs import NATIVE_API, VOLCANO_API

log = logging.getLogger(__name__)
REDISCOVER_S, RETRY_S = 600.0, 15.0
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
            await self._client.list_page(resource, namespace, "phalanx.dev/service=none", "")
        except (Gone, Denied):
            return False
        return True
