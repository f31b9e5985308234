"""Requests that are held while no group takes newcomers and one is to come: how many, and for how long.

That is so while a service wakes from zero, and while its only group is emptied and another starts in its place.

A request is held in the queue when the model is known, and before its text is read when nothing told the model yet (this router
started while there was no group). Streamed ones hear comments meanwhile; all get 503 after `hold_s`. What the operator's policy
says holds where no flag does: it knows whether a group will come.
"""

from collections.abc import Callable

from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import RouterMetrics
from phalanx_router.session import FleetSettings


class Waking:
    """Counts what is held. With `hold_s` 0 nothing is."""

    def __init__(self, settings: FleetSettings, links: Links, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.num_held = 0
        self.policy: Callable[[], BalancePolicy] = BalancePolicy
        """What the operator grants now."""
        self._clock = clock
        self._settings = settings
        self._links = links
        self._metrics = metrics

    @property
    def hold_s(self) -> float:
        """How long a request is held."""
        policy = self.policy()
        return self._settings.hold_s or (policy.hold_s if policy.max_held else 0.0)

    async def model_known(self) -> None:
        """Returns once a group has told the model, or when it was waited for long enough. Raises BackendError 503 when full."""
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
        """Counts one more. Raises BackendError 503 when too many are held already."""
        if self.num_held >= (self._settings.max_held if self._settings.hold_s else self.policy().max_held):
            why = f"no group is ready, and {self.num_held} requests wait for one already"
            raise BackendError(503, "no_group_ready", why, self._settings.retry_after_s)
        self._count(1)

    def release(self) -> None:
        """Counts one less."""
        self._count(-1)

    def _count(self, more: int) -> None:
        self.num_held += more
        self._metrics.show_held(self.num_held)
