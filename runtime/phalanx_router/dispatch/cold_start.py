"""Holds requests while no group accepts new ones but one is expected.

This happens while a service scales up from zero, and while its only group is emptied and a replacement starts.

If the model is known, a request is held in the queue; if this router has had no group yet, before its text is processed.
Streaming clients receive SSE comments meanwhile. A held request gets 503 after `hold_s`. Without a hold flag the operator's
policy applies, because the operator decides whether a group will start.
"""

from collections.abc import Callable

from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.session import FleetSettings


class ColdStartHold:
    """Counts the held requests. `hold_s` 0 disables holding."""

    def __init__(self, settings: FleetSettings, links: LinkPool, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.num_held = 0
        self.policy: Callable[[], BalancePolicy] = BalancePolicy
        """Returns the current policy from the operator."""
        self._clock = clock
        self._settings = settings
        self._links = links
        self._metrics = metrics

    @property
    def hold_s(self) -> float:
        """Seconds that a request is held."""
        policy = self.policy()
        return self._settings.hold_s or (policy.hold_s if policy.max_held else 0.0)

    async def model_known(self) -> None:
        """Waits until a group has reported the model, at most `hold_s`. Raises BackendError 503 if too many requests are held."""
        if self._links.assets() is not None or not self.hold_s:
            return
        self.hold()
        try:
            until = self._clock() + self.hold_s
            while self._links.assets() is None and await self._links.changed(max(0.0, until - self._clock())):
                pass
        finally:
            self.release()

    def hold(self) -> None:
        """Adds a held request. Raises BackendError 503 if too many are held."""
        if self.num_held >= (self._settings.max_held if self._settings.hold_s else self.policy().max_held):
            why = f"no group is ready, and {self.num_held} requests wait for one already"
            raise BackendError(503, "no_group_ready", why, self._settings.retry_after_s)
        self._count(1)

    def release(self) -> None:
        """Removes a held request."""
        self._count(-1)

    def _count(self, more: int) -> None:
        self.num_held += more
        self._metrics.show_held(self.num_held)
