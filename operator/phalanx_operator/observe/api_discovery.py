"""Discovers the scheduler APIs that the cluster serves, at most every ten minutes: schedulers can be installed at any time."""

import logging
import math
import time
from collections.abc import Callable

from phalanx_operator.kube.client import Denied, Gone, KubeClient, KubeError, Resource
from phalanx_operator.render.gangs import NATIVE_API, VOLCANO_API

log = logging.getLogger(__name__)
ASK_AGAIN_S, RETRY_S = 600.0, 15.0
POD_GROUPS = {api: Resource(api, "podgroups") for api in (NATIVE_API, VOLCANO_API)}


class SchedulerDiscovery:
    """The last answer of the cluster. Used by one event loop."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._served: frozenset[str] | None = None
        self._next_s = -math.inf

    async def served(self, namespace: str) -> frozenset[str] | None:
        """Returns the API versions that the cluster serves; None before the first answer."""
        if self._clock() < self._next_s:
            return self._served
        try:
            found = frozenset([api for api, resource in POD_GROUPS.items() if await self._has(resource, namespace)])
        except KubeError as error:
            log.warning("scheduler discovery failed", extra={"why": str(error)})
            self._next_s = self._clock() + RETRY_S
            return self._served
        if found != self._served:
            log.info("scheduler APIs", extra={"apis": ", ".join(sorted(found))})
        self._served, self._next_s = found, self._clock() + ASK_AGAIN_S
        return found

    async def _has(self, resource: Resource, namespace: str) -> bool:
        """Returns whether the operator can create such objects. Raises KubeError when the API server gives no answer."""
        try:
            await self._client.list_page(resource, namespace, "phalanx.dev/service=none", "")
        except (Gone, Denied):
            return False
        return True
