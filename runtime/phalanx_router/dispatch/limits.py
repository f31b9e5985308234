"""Limits on requests at the router: tenant quotas, cold-start holds, time limits of waiting."""

import time
from collections.abc import Callable

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.candidates import CandidateGroups
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.quota import QuotaExceeded, Quotas
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.streams.stream import GroupLost


class TenantQuotas:
    """Quota usage of tenants."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float], unix_s: Callable[[], float] = time.time) -> None:
        self.quota_of: Callable[[str], Quota | None] = lambda name: None
        self.num_routers = 1  # that share the quotas
        self._quotas = Quotas()
        self._metrics = metrics
        self._clock = clock
        self._unix_s = unix_s

    def charge(self, session: StreamSession) -> None:
        """Charges a new stream, once. Raises BackendError 429 over quota."""
        journal = session.stream.journal
        session.charge.is_due = False
        quota = self.quota_of(journal.tenant)
        if quota is None or session.charge.is_exempt or session.charge.grant is not None:
            return
        demand, now = journal.demand(), self._clock()
        grant = self._quotas.take(
            journal.tenant,
            quota,
            demand.prompt_tokens,
            demand.output_tokens,
            now,
            share=1 / self.num_routers,
            unix_s=self._unix_s(),
        )
        if isinstance(grant, QuotaExceeded):
            raise self._refusal(journal.tenant, grant)
        session.charge.grant, session.charge.granted_at = grant, now

    def resume(self, session: StreamSession) -> None:
        """Charges the rest of a stream that its client resumes, whatever the quota: its request was granted before."""
        journal, charge = session.stream.journal, session.charge
        quota = self.quota_of(journal.tenant)
        if quota is None:
            return
        now, share = self._clock(), 1 / self.num_routers
        max_tokens = journal.demand().output_tokens
        charge.grant = self._quotas.resume(journal.tenant, quota, max_tokens, now, share=share, unix_s=self._unix_s())
        charge.granted_at, charge.num_before = now, journal.num_tokens

    def check(self, tenant: str, prompt_tokens: int) -> None:
        """Raises BackendError 429 if a request with so long a prompt would be over quota. Charges nothing."""
        quota = self.quota_of(tenant)
        if quota is None:
            return
        share, unix_s = 1 / self.num_routers, self._unix_s()
        exceeded = self._quotas.exceeded(tenant, quota, prompt_tokens, self._clock(), share=share, unix_s=unix_s)
        if exceeded is not None:
            raise self._refusal(tenant, exceeded)

    def _refusal(self, tenant: str, exceeded: QuotaExceeded) -> BackendError:
        self._metrics.shed(f"quota_{exceeded.limit}")
        if exceeded.is_of_day:
            why = f"Budget reached for {tenant}: {exceeded.why}."
            return BackendError(429, "insufficient_quota", why, exceeded.retry_after_s)
        why = f"Rate limit reached for {tenant}: {exceeded.why}."
        return BackendError(429, "rate_limit_exceeded", why, exceeded.retry_after_s)

    def settle(self, session: StreamSession) -> None:
        """Settles the charge of an ended stream."""
        charge, journal = session.charge, session.stream.journal
        if charge.grant is not None:
            duration_s = self._clock() - charge.granted_at
            self._quotas.end(journal.tenant, charge.grant, journal.num_tokens - charge.num_before, duration_s)
            charge.grant = None


class ColdStartHold:
    """Holds requests while no group accepts new ones but one is expected.

    With a known model a request waits in the queue, otherwise before its text is processed. A held request gets 503 after
    `hold_s`; 0 disables holding. Without a hold flag the operator's policy applies.
    """

    def __init__(
        self,
        settings: FleetSettings,
        links: LinkPool,
        metrics: RouterMetrics,
        policy: Callable[[], BalancePolicy],
        clock: Callable[[], float],
    ) -> None:
        self.num_held = 0
        self.changed_at: float | None = None  # last change of the number
        self.held_listeners: list[Callable[[], None]] = []  # after each change of the number
        self._policy = policy
        self._clock = clock
        self._settings = settings
        self._links = links
        self._metrics = metrics

    @property
    def hold_s(self) -> float:
        """Maximum duration of a hold: `--hold-s`, or `autoscaling.scaleToZero.holdTimeoutSeconds` by the operator's policy."""
        policy = self._policy()
        return self._settings.hold_s or (policy.hold_s if policy.max_held else 0.0)

    async def wait_for_model(self) -> None:
        """Waits until a group has reported the model. Raises BackendError 503."""
        if self._links.assets() is not None or not self.hold_s:
            return
        self.hold()
        try:
            until = self._clock() + self.hold_s
            while self._links.assets() is None and await self._links.wait_for_change(max(0.0, until - self._clock())):
                pass
        finally:
            self.release()

    def hold(self) -> None:
        """Adds a held request. Raises BackendError 503 over the limit."""
        if self.num_held >= (self._settings.max_held if self._settings.hold_s else self._policy().max_held):
            why = f"no group is ready, and {self.num_held} requests wait for one already"
            raise BackendError(503, "no_group_ready", why, self._settings.retry_after_s)
        self._count(1)

    def release(self) -> None:
        """Removes a held request."""
        self._count(-1)

    def _count(self, change: int) -> None:
        self.num_held += change
        self.changed_at = self._clock()
        self._metrics.show_held(self.num_held)
        for notify in self.held_listeners:
            notify()


class WaitLimit:
    """How long a stream waits for a group: a started one up to `patience_s`, a new one if a group is expected."""

    def __init__(
        self,
        settings: FleetSettings,
        candidates: CandidateGroups,
        cold_start: ColdStartHold,
        order_adapter: Callable[[wire.Adapter], bool],
        clock: Callable[[], float],
    ) -> None:
        """`order_adapter`: see `FleetAdapters.order`."""
        self._order_adapter = order_adapter
        self._settings = settings
        self._candidates = candidates
        self._cold_start = cold_start
        self._clock = clock

    def next_check_s(self, session: StreamSession) -> float:
        """Seconds until the next check. Raises BackendError if no group will take the stream."""
        wait, failures = session.wait, session.failures
        keys = self._candidates.eligible(session).keys()
        if keys - failures.excluded:
            wait.unassigned_since = None
            return self._settings.keep_alive_s
        if not keys and self._candidates.lacks_embeddings(session):
            why = "the ready groups compute no embeddings: their version is older or their model has none"
            raise BackendError(503, "embeddings_unavailable", why, self._settings.retry_after_s)
        lacks_adapter = not keys and self._candidates.lacks_adapter(session)
        is_loading = lacks_adapter and self._orders_adapter(session)
        if lacks_adapter and not is_loading and not session.has_started:
            raise self._missing_adapter(session)
        may_lack_weights = not keys and failures.lost_group and session.stream.journal.delivered
        if may_lack_weights and not self._candidates.can_weights_return(session.model_hash):
            raise _missing_weights(failures.lost_group)
        is_silent = not keys and self._candidates.is_silent(session)
        is_leaving = not keys and not is_silent and self._candidates.has_compatible(session)
        now = self._clock()
        if wait.unassigned_since is None:
            wait.unassigned_since = now
        patience_s = self._patience_s(session, bool(keys) or is_silent, is_leaving)
        patience_s = max(patience_s, self._settings.adapter_wait_s) if is_loading else patience_s
        left_s = wait.unassigned_since + patience_s - now
        if left_s <= 0 and lacks_adapter:
            raise self._missing_adapter(session)
        if left_s <= 0:
            raise self._no_group(session, _reason(len(keys), is_silent, is_leaving), patience_s)
        if not session.has_started and not wait.is_held and self._cold_start.hold_s:
            self._cold_start.hold()
            wait.is_held = True
            session.stream.trace.held()
        return min(self._settings.refusal_pause_s if keys or is_loading else self._settings.keep_alive_s, left_s)

    def _orders_adapter(self, session: StreamSession) -> bool:
        """Whether a group loads the adapter, maybe one that has refused the stream without it."""
        adapter = session.stream.journal.adapter
        is_ordered = adapter is not None and self._order_adapter(adapter)
        if is_ordered:
            session.failures.excluded.clear()
        return is_ordered

    def _patience_s(self, session: StreamSession, has_group: bool, is_leaving: bool) -> float:
        if session.has_started:
            patience_s = self._settings.patience_s
        else:
            patience_s = 0.0 if has_group else self._cold_start.hold_s
        if is_leaving:  # the operator decides within this time whether another group starts
            patience_s = max(patience_s, self._settings.retry_after_s)
        return patience_s

    def release_hold(self, session: StreamSession) -> None:
        """Ends the cold-start hold of a stream."""
        if session.wait.is_held:
            session.wait.is_held = False
            self._cold_start.release()
            session.stream.trace.released()

    def _missing_adapter(self, session: StreamSession) -> BackendError:
        adapter = session.stream.journal.adapter
        name = "" if adapter is None else adapter.name
        why = f"no ready group has the adapter {name}, or has it with the same content: load it in a group, or retry"
        return BackendError(503, "adapter_unavailable", why, self._settings.retry_after_s)

    def _no_group(self, session: StreamSession, why: str, waited_s: float) -> BackendError:
        """Error when no group takes the request, with the last refusal."""
        why = f"{why} after {waited_s:g} s" if waited_s else why
        match session.failures.last_setback:
            case wire.Refused(handle=_, epoch=_, status=status, code=code, message=message, retry_after_s=retry_after_s):
                return BackendError(status, code, message, retry_after_s or self._settings.retry_after_s)
            case GroupLost(lost_why):
                why = f"{why}; earlier: {lost_why}"
        return BackendError(503, "no_group_ready", why, self._settings.retry_after_s)


def _reason(num_groups: int, is_silent: bool, is_leaving: bool) -> str:
    if num_groups:
        return f"each of {num_groups} ready groups failed or refused this request"
    if is_silent:
        return "no group reports its load, and spec.router.failureMode is FailClosed"
    return "every group is being evacuated" if is_leaving else "no group is ready"


def _missing_weights(group: str) -> BackendError:
    why = f"{group}, the last group with the weights that started this stream, does not exist any more"
    return BackendError(
        503, "weights_gone", f"{why}: the stream had spec.drain.timeoutSeconds to finish there; send the request again"
    )
