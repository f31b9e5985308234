"""Quotas of a tenant: requests and tokens per minute and per day, concurrent requests.

A bucket has the capacity of one minute's quota and refills steadily; n is granted when level >= min(n, capacity).
A budget has that of a day of UTC and is full again at midnight; n is granted when used + min(n, capacity) <= capacity.
A request reserves its prompt plus min(max_tokens, default output tokens), and settles the difference at its end,
in the budget of the day on which it was granted. A stream that its client resumes reserves its further output alone, and is never
refused.
"""

from dataclasses import dataclass, field
from typing import Literal

from phalanx_frontend.auth.api_keys import Quota
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS

MINUTE_S = 60.0
DAY_S = 86_400.0
DURATION_SMOOTHING = 0.2
QuotaLimit = Literal["requests", "tokens", "concurrent", "requests_per_day", "tokens_per_day"]


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """The request may run and has reserved `tokens`."""

    tokens: int
    day: int = 0  # of the Unix epoch


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """The request exceeds `limit`."""

    limit: QuotaLimit
    why: str
    retry_after_s: float  # of concurrent requests from the tenant's mean request duration

    @property
    def is_of_day(self) -> bool:
        """Whether the tenant waits until midnight, UTC."""
        return self.limit in ("requests_per_day", "tokens_per_day")


@dataclass(slots=True)
class _QuotaBucket:
    level: float
    filled_at: float

    def fill(self, capacity: float, now: float) -> None:
        self.level = min(capacity, self.level + max(0.0, now - self.filled_at) * capacity / MINUTE_S)
        self.filled_at = now


@dataclass(slots=True)
class _DayUsage:
    day: int = 0
    requests: int = 0
    tokens: int = 0

    def turn(self, day: int) -> None:
        """Starts a new day; a clock that is set back does not."""
        if day > self.day:
            self.day, self.requests, self.tokens = day, 0, 0


@dataclass(slots=True)
class _TenantUsage:
    running: int = 0
    mean_duration_s: float = 1.0
    today: _DayUsage = field(default_factory=_DayUsage)
    buckets: dict[QuotaLimit, _QuotaBucket] = field(default_factory=dict)

    def filled(self, limit: QuotaLimit, capacity: float, now: float) -> _QuotaBucket:
        """Returns the bucket of a limit as it is now."""
        bucket = self.buckets.setdefault(limit, _QuotaBucket(capacity, now))
        bucket.fill(capacity, now)
        return bucket


class Quotas:
    """Buckets and running requests of every tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantUsage] = {}

    def take(
        self, name: str, quota: Quota, prompt_tokens: int, max_tokens: int, now: float, *, share: float = 1.0, unix_s: float = 0.0
    ) -> QuotaGrant | QuotaExceeded:
        """Reserves quota for one request, which `end` settles. `share`: of this router; `unix_s`: the time of day."""
        tokens = prompt_tokens + int(min(max_tokens, DEFAULT_OUTPUT_TOKENS))
        exceeded = self.exceeded(name, quota, tokens, now, share=share, unix_s=unix_s)
        if exceeded is not None:
            return exceeded
        return _reserve(self._tenants[name], quota, 1, tokens, now, share=share)

    def resume(
        self, name: str, quota: Quota, max_tokens: int, now: float, *, share: float = 1.0, unix_s: float = 0.0
    ) -> QuotaGrant:
        """Reserves quota for the rest of a stream, whose request and prompt were counted before. Others as in `take`."""
        tenant = self._tenants.setdefault(name, _TenantUsage())
        tenant.today.turn(int(unix_s // DAY_S))
        return _reserve(tenant, quota, 0, int(min(max_tokens, DEFAULT_OUTPUT_TOKENS)), now, share=share)

    def exceeded(
        self, name: str, quota: Quota, tokens: int, now: float, *, share: float = 1.0, unix_s: float = 0.0
    ) -> QuotaExceeded | None:
        """Returns what a request of `tokens` would exceed, if anything; reserves nothing. Others as in `take`."""
        tenant = self._tenants.setdefault(name, _TenantUsage())
        tenant.today.turn(int(unix_s // DAY_S))
        if quota.concurrent is not None:
            max_running = max(1, int(quota.concurrent * share))
            if tenant.running >= max_running:
                return QuotaExceeded(
                    "concurrent", f"all {max_running} concurrent requests are running", tenant.mean_duration_s / max_running
                )
        exceeded = _exceeded_budget(tenant.today, quota, tokens, share, until_midnight_s=DAY_S - unix_s % DAY_S)
        if exceeded is not None:
            return exceeded
        for limit, per_minute, amount in _per_minute(quota, 1, tokens):
            capacity = _capacity(per_minute, share)
            wait_s = (min(amount, capacity) - tenant.filled(limit, capacity, now).level) * MINUTE_S / capacity
            if wait_s > 0:
                return QuotaExceeded(limit, f"{per_minute} {limit} per minute are allowed", wait_s)
        return None

    def end(self, name: str, grant: QuotaGrant, used_tokens: int, duration_s: float) -> None:
        """Settles the reserved tokens."""
        tenant = self._tenants[name]
        tenant.running -= 1
        tenant.mean_duration_s += DURATION_SMOOTHING * (duration_s - tenant.mean_duration_s)
        if "tokens" in tenant.buckets:
            tenant.buckets["tokens"].level += grant.tokens - used_tokens
        if grant.day == tenant.today.day:
            tenant.today.tokens += used_tokens - grant.tokens


def _reserve(tenant: _TenantUsage, quota: Quota, requests: int, tokens: int, now: float, *, share: float) -> QuotaGrant:
    for limit, per_minute, amount in _per_minute(quota, requests, tokens):
        tenant.filled(limit, _capacity(per_minute, share), now).level -= amount
    tenant.running += 1
    tenant.today.requests += requests
    tenant.today.tokens += tokens
    return QuotaGrant(tokens, tenant.today.day)


def _per_minute(quota: Quota, requests: int, tokens: int) -> list[tuple[QuotaLimit, int, int]]:
    """Returns limit, quota and amount of each bucket."""
    limits: list[tuple[QuotaLimit, int | None, int]] = [
        ("requests", quota.requests_per_minute, requests),
        ("tokens", quota.tokens_per_minute, tokens),
    ]
    return [(limit, per_minute, amount) for limit, per_minute, amount in limits if per_minute is not None]


def _capacity(per_minute: int, share: float) -> float:
    return max(1.0, per_minute * share)


def _exceeded_budget(
    today: _DayUsage, quota: Quota, tokens: int, share: float, *, until_midnight_s: float
) -> QuotaExceeded | None:
    budgets: list[tuple[QuotaLimit, str, int | None, int, int]] = [
        ("requests_per_day", "requests", quota.requests_per_day, today.requests, 1),
        ("tokens_per_day", "tokens", quota.tokens_per_day, today.tokens, tokens),
    ]
    for limit, unit, per_day, used, amount in budgets:
        capacity = max(1.0, (per_day or 0) * share)
        if per_day is not None and used + min(amount, capacity) > capacity:
            return QuotaExceeded(limit, f"{per_day} {unit} per day are allowed; the day ends at midnight, UTC", until_midnight_s)
    return None
