"""Enforces the quotas of a tenant: requests per minute, tokens per minute, and concurrent requests.

    A bucket holds one minute's quota and refills steadily; n is granted when level >= min(n, capacity).
    A request reserves its prompt plus min(max_tokens, usual output), and settles the difference at its end.

A rejection carries the time until the bucket holds enough; for concurrent requests it is estimated from the tenant's mean
request duration. Each router grants 1 / (number of routers) of every quota.
"""

from dataclasses import dataclass, field
from typing import Literal

from phalanx_frontend.auth.api_keys import Quota
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS

MINUTE_S = 60.0
FOLLOW = 0.2
Limit = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """The request may run and has reserved `tokens`."""

    tokens: int


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """The request exceeds `limit` and may be retried after `retry_after_s`."""

    limit: Limit
    why: str
    retry_after_s: float


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, capacity: float, now: float) -> None:
        self.level = min(capacity, self.level + max(0.0, now - self.at) * capacity / MINUTE_S)
        self.at = now


@dataclass(slots=True)
class _Tenant:
    running: int = 0
    usual_s: float = 1.0
    buckets: dict[Limit, _Bucket] = field(default_factory=dict)


class Quotas:
    """Buckets and running requests of every tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def take(
        self, name: str, quota: Quota, prompt_tokens: int, max_tokens: int, now: float, share: float = 1.0
    ) -> QuotaGrant | QuotaExceeded:
        """Reserves quota for one request. Each `QuotaGrant` must be passed to `end`."""
        tenant = self._tenants.setdefault(name, _Tenant())
        tokens = prompt_tokens + int(min(max_tokens, DEFAULT_OUTPUT_TOKENS))
        if quota.concurrent is not None:
            most = max(1, int(quota.concurrent * share))
            if tenant.running >= most:
                return QuotaExceeded("concurrent", f"all {most} concurrent requests are running", tenant.usual_s / most)
        wanted: list[tuple[Limit, int | None, int]] = [
            ("requests", quota.requests_per_minute, 1),
            ("tokens", quota.tokens_per_minute, tokens),
        ]
        for limit, per_minute, amount in wanted:
            wait_s = self._wait_s(tenant, limit, per_minute, share, amount=amount, now=now)
            if wait_s > 0:
                return QuotaExceeded(limit, f"{per_minute} {limit} per minute are allowed", wait_s)
        for limit, per_minute, amount in wanted:
            if per_minute is not None:
                tenant.buckets[limit].level -= amount
        tenant.running += 1
        return QuotaGrant(tokens)

    def end(self, name: str, granted: QuotaGrant, used_tokens: int, lasted_s: float) -> None:
        """Settles a finished request: returns the reserved tokens that it did not use, or takes those used beyond."""
        tenant = self._tenants[name]
        tenant.running -= 1
        tenant.usual_s += FOLLOW * (lasted_s - tenant.usual_s)
        if "tokens" in tenant.buckets:
            tenant.buckets["tokens"].level += granted.tokens - used_tokens

    def _wait_s(self, tenant: _Tenant, limit: Limit, per_minute: int | None, share: float, amount: int, now: float) -> float:
        """Returns the seconds until the bucket holds enough."""
        if per_minute is None:
            return 0.0
        capacity = max(1.0, per_minute * share)
        bucket = tenant.buckets.setdefault(limit, _Bucket(capacity, now))
        bucket.fill(capacity, now)
        return (min(amount, capacity) - bucket.level) * MINUTE_S / capacity
