"""Groups whose drain the console has requested: the operator reads them from the summary and drains the groups."""

import logging
from collections.abc import Callable, Mapping

from phalanx_api.summary import DrainRequest

log = logging.getLogger(__name__)

MAX_REQUESTS = 16
LIFETIME_S = 60.0
"""Age at which a request is dropped: without an operator nothing drains."""


class DrainRequests:
    """Bounded, each until its group drains, disappears, or `LIFETIME_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requested_at: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._requested_at)

    def add(self, group: str) -> bool:
        """Adds a group; returns False if too many are requested."""
        if group not in self._requested_at and len(self._requested_at) >= MAX_REQUESTS:
            return False
        self._requested_at[group] = self._clock()
        return True

    def open(self, draining: Mapping[str, bool]) -> list[DrainRequest]:
        """Returns the groups to drain. `draining`: whether it drains, by known group."""
        now = self._clock()
        for group in [group for group, at in self._requested_at.items() if now - at >= LIFETIME_S]:
            log.warning("the operator did not start a drain that the console requested", extra={"group": group})
            del self._requested_at[group]
        self._requested_at = {group: at for group, at in self._requested_at.items() if draining.get(group) is False}
        return [DrainRequest(group, now - at) for group, at in sorted(self._requested_at.items())]
