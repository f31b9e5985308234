"""The quotas of tenants, kept by this router: whoever exceeds one gets 429 with the time to wait.

Names and quotas come with API keys; without keys nobody has a quota. A stream that began elsewhere is not counted again.
"""

from collections.abc import Callable

from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.backend import BackendError
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.quota import Exceeded, Quotas
from phalanx_router.session import Run


class Tenants:
    """What tenants have taken. `quota_of` knows their quotas; `routers` is how many share each."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.quota_of: Callable[[str], Quota | None] = lambda name: None
        self.routers = 1
        self._quotas = Quotas()
        self._metrics = metrics
        self._clock = clock

    def begin(self, run: Run) -> None:
        """Takes what a new stream needs of its tenant's quota. Raises BackendError 429."""
        journal = run.stream.journal
        quota = self.quota_of(journal.tenant)
        if quota is None:
            return
        newcomer, now = journal.newcomer(), self._clock()
        found = self._quotas.take(
            journal.tenant, quota, newcomer.prompt_tokens, newcomer.output_tokens, now, share=1 / self.routers
        )
        if isinstance(found, Exceeded):
            self._metrics.shed(f"quota_{found.limit}")
            why = f"Rate limit reached for {journal.tenant}: {found.why}."
            raise BackendError(429, "rate_limit_exceeded", why, found.retry_after_s)
        run.granted, run.granted_at = found, now

    def end(self, run: Run) -> None:
        """Settles what a stream took, when it ends."""
        if run.granted is not None:
            journal, lasted_s = run.stream.journal, self._clock() - run.granted_at
            self._quotas.end(journal.tenant, run.granted, journal.num_prompt + len(journal.delivered), lasted_s)
            run.granted = None
