"""What one tenant may have: requests and tokens per minute, and requests at once.

    a bucket holds a minute's worth, fills steadily, and is empty of what was taken     take n when level >= min(n, capacity)
    tokens of a request = its prompt + its output; the output is reserved as min(max_tokens, usual), and settled at the end

Whoever is refused hears when the bucket will hold enough; for requests at once that is guessed from how long its requests last.
Each router grants its share of every quota, one over the number of routers.
"""

from dataclasses import dataclass, field
from typing import Literal

from phalanx_frontend.auth.api_keys import Quota
from phalanx_router.routing.cost import UNKNOWN_OUTPUT

MINUTE_S = 60.0
FOLLOW = 0.2
Limit = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class Granted:
    """The request may run; `tokens` were taken for it."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Exceeded:
    """The request may not run now."""

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
    """What each tenant has taken."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def take(
        self, name: str, quota: Quota, prompt_tokens: int, max_tokens: int, now: float, share: float = 1.0
    ) -> Granted | Exceeded:
        """Whether one more request of this tenant may run. A granted one must be given back to `end`."""
        tenant = self._tenants.setdefault(name, _Tenant())
        tokens = prompt_tokens + int(min(max_tokens, UNKNOWN_OUTPUT))
        if quota.concurrent is not None:
            most = max(1, int(quota.concurrent * share))
            if tenant.running >= most:
                return Exceeded("concurrent", f"{most} requests at once are allowed, and run", tenant.usual_s / most)
        wanted: list[tuple[Limit, int | None, int]] = [
            ("requests", quota.requests_per_minute, 1),
            ("tokens", quota.tokens_per_minute, tokens),
        ]
        for limit, per_minute, amount in wanted:
            wait_s = self._wait_s(tenant, limit, per_minute, share, amount, now)
            if wait_s > 0:
                return Exceeded(limit, f"{per_minute} {limit} per minute are allowed", wait_s)
        for limit, per_minute, amount in wanted:
            if per_minute is not None:
                tenant.buckets[limit].level -= amount
        tenant.running += 1
        return Granted(tokens)

    def end(self, name: str, granted: Granted, used_tokens: int, lasted_s: float) -> None:
        """Settles a request that ended: what it did not use is free again, what it used beyond is taken."""
        tenant = self._tenants[name]
        tenant.running -= 1
        tenant.usual_s += FOLLOW * (lasted_s - tenant.usual_s)
        if "tokens" in tenant.buckets:
            tenant.buckets["tokens"].level += granted.tokens - used_tokens

    def _wait_s(self, tenant: _Tenant, limit: Limit, per_minute: int | None, share: float, amount: int, now: float) -> float:
        """How long until the bucket holds enough."""
        if per_minute is None:
            return 0.0
        capacity = max(1.0, per_minute * share)
        bucket = tenant.buckets.setdefault(limit, _Bucket(capacity, now))
        bucket.fill(capacity, now)
        return (min(amount, capacity) - bucket.level) * MINUTE_S / capacity
