"""Enforces tenant quotas in this router; a request over quota gets 429 with the time to wait.

Names and quotas come from API keys; without keys there are no quotas. An adopted stream is not charged a second time.
"""

from collections.abc import Callable

from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.backend import BackendError
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.quota import QuotaExceeded, Quotas
from phalanx_router.session import StreamSession


class TenantQuotas:
    """Quota usage of tenants. `quota_of` returns a tenant's quota; `routers` is the number of routers that share it."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.quota_of: Callable[[str], Quota | None] = lambda name: None
        self.routers = 1
        self._quotas = Quotas()
        self._metrics = metrics
        self._clock = clock

    def begin(self, run: StreamSession) -> None:
        """Charges a new stream to its tenant's quota. Raises BackendError 429 if it exceeds the quota."""
        journal = run.stream.journal
        quota = self.quota_of(journal.tenant)
        if quota is None:
            return
        demand, now = journal.demand(), self._clock()
        found = self._quotas.take(journal.tenant, quota, demand.prompt_tokens, demand.output_tokens, now, share=1 / self.routers)
        if isinstance(found, QuotaExceeded):
            self._metrics.shed(f"quota_{found.limit}")
            why = f"Rate limit reached for {journal.tenant}: {found.why}."
            raise BackendError(429, "rate_limit_exceeded", why, found.retry_after_s)
        run.granted, run.granted_at = found, now

    def end(self, run: StreamSession) -> None:
        """Settles the charge of a stream at its end."""
        if run.granted is not None:
            journal, lasted_s = run.stream.journal, self._clock() - run.granted_at
            self._quotas.end(journal.tenant, run.granted, journal.num_prompt + len(journal.delivered), lasted_s)
            run.granted = None
