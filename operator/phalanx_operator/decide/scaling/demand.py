"""Computes how many groups a load needs from the step-time function (docs/balancing.md, section 3.8).

    busy   = rate * (missed * c + prompt^2 * a / 2) + rate * output * t(p, B, B * context) / B      groups' worth of work
    time   = ceil(busy / 0.75)
    kv     = ceil(tokens in pages and waiting for them / (0.80 * pages of a group))
    ttft   = the smallest N whose predicted P95 is at most 0.8 of the target
    needed = max(time, kv, ttft) + backlog / 10 s

c is the cost of one prompt token in a full step, a the attention coefficient of the step model, B the largest number of streams
with steps within 0.85 of the ITL target whose pages fit. The P95 wait is that of a G/G/N queue (Allen and Cunneen, with
Sakasegawa's exponent for the probability of waiting) whose servers are as busy as the groups and serve one prompt at a time.
"""

import math
import statistics
from dataclasses import dataclass

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import Traffic
from phalanx_operator.decide.state.fleet import GroupLoadView

BUSY = 0.75
ITL_SHARE_OUT, ITL_SHARE_IN = 0.85, 0.80
TTFT_SHARE = 0.8
KV_SHARE = 0.80
KV_IN_OF_OUT = 0.875
"""Scale-in must leave this share of each scale-out threshold: 0.70 for 0.80."""
DRAIN_S = 10.0
"""Time in which a backlog should be computed."""
ROOM = 2048
"""Tokens of a full step if the spec sets no limit."""
MOST_STREAMS = 4096
MOST_BUSY = 10_000.0
P95 = 0.05


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets and the KV limit; None means no target."""

    ttft_s: float | None = None
    itl_s: float | None = None
    kv: float = KV_SHARE


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """What one group can compute."""

    model: StepModel
    speed: float
    """Relative speed; 1 is the step model's."""
    capacity: int
    """Tokens that its pages hold."""
    room: int = ROOM
    """Tokens in one step."""

    def step_s(self, prefill: float, streams: float, context: float) -> float:
        """Returns the seconds of a step with these prompt tokens, streams and total context tokens."""
        return self.speed * self.model.predict(StepWork(math.ceil(prefill), math.ceil(streams), math.ceil(context)))

    @property
    def token_s(self) -> float:
        """Seconds per prompt token in full steps."""
        return self.step_s(self.room, 0, 0) / self.room


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The load of a service."""

    rate: float
    """Requests per second."""
    shape: Traffic
    """Mean lengths."""
    kv_tokens: float
    """Tokens in pages or waiting for them."""
    backlog_s: float
    """Seconds of one group's work in waiting prompts."""

    @property
    def context(self) -> float:
        """Mean tokens of a stream at half of its output."""
        return self.shape.prompt + self.shape.output / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The needed groups and the terms of the formula. `busy`: groups' worth of work."""

    groups: int
    busy: float
    time: int
    kv: int
    ttft: int
    backlog: int
    ttft_is_within_reach: bool = True

    @property
    def why(self) -> str:
        """The deciding term in words."""
        parts = {
            f"{self.busy:.2f} groups' worth of work": self.time,
            "the KV pages in use": self.kv,
            "the time to the first token": self.ttft,
        }
        cause = max(parts, key=lambda part: parts[part])
        return f"{cause} needs {parts[cause]}" + (f", the backlog {self.backlog} more" if self.backlog else "")


def demand(load: OfferedLoad, ability: GroupCapacity, targets: Targets) -> Demand:
    """Returns how many groups the load needs."""
    busy = busy_groups(load, ability, targets)
    time = math.ceil(round(busy / BUSY, 6))
    kv = math.ceil(round(load.kv_tokens / max(targets.kv * ability.capacity, 1.0), 6))
    ttft, within = _groups_for_ttft(load, ability, targets, busy)
    backlog = int(load.backlog_s / DRAIN_S)
    return Demand(
        groups=max(time, kv, ttft) + backlog, busy=busy, time=time, kv=kv, ttft=ttft, backlog=backlog, ttft_is_within_reach=within
    )


def busy_groups(load: OfferedLoad, ability: GroupCapacity, targets: Targets) -> float:
    """Returns the groups' worth of work per second."""
    shape = load.shape
    prefill_s = _prefill_s(shape, ability)
    streams = most_streams(load, ability, targets)
    decode_s = shape.output * ability.step_s(0, streams, streams * load.context) / streams
    return min(load.rate * (prefill_s + decode_s), MOST_BUSY)


def _prefill_s(shape: Traffic, ability: GroupCapacity) -> float:
    """Returns the seconds of work in a request's prompt."""
    return shape.missed * ability.token_s + ability.speed * ability.model.attention_s * shape.prompt_squared / 2


def most_streams(load: OfferedLoad, ability: GroupCapacity, targets: Targets) -> int:
    """Returns how many streams a group can have at once within its pages and the ITL target; at least 1.

    In a steady state each step of B streams also computes B * missed / output prompt tokens.
    """
    fitting = int(targets.kv * ability.capacity / max(load.context, 1.0))
    high = max(1, min(fitting, MOST_STREAMS))
    if targets.itl_s is None:
        return high
    limit_s, low = ITL_SHARE_OUT * targets.itl_s, 1
    prefill = load.shape.missed / max(load.shape.output, 1.0)
    while low < high:
        middle = (low + high + 1) // 2
        within = ability.step_s(min(ability.room, middle * prefill), middle, middle * load.context) <= limit_s
        low, high = (middle, high) if within else (low, middle - 1)
    return low


def wait_p95_s(groups: int, busy: float, load: OfferedLoad, ability: GroupCapacity) -> float:
    """Returns the predicted P95 wait of a prompt with this number of groups; infinite when they cannot keep up."""
    use = busy / groups if groups else math.inf
    if use >= 1:
        return math.inf
    shape = load.shape
    chance = use ** (math.sqrt(2 * (groups + 1)) - 1) if use > 0 else 0.0
    if chance <= P95:
        return 0.0
    mean_of_those_who_wait_s = (shape.scv + _spread(shape)) / 2 * _prefill_s(shape, ability) / (groups * (1 - use))
    return mean_of_those_who_wait_s * math.log(chance / P95)


def _spread(shape: Traffic) -> float:
    """Returns the squared coefficient of variation of prompt lengths."""
    return max(shape.prompt_squared / shape.prompt**2 - 1, 0.0) if shape.prompt >= 1 else 0.0


def own_ttft_s(load: OfferedLoad, ability: GroupCapacity) -> float:
    """Returns the time to first token of a long prompt on an idle group."""
    shape = load.shape
    return _prefill_s(shape, ability) * (1 + 1.65 * math.sqrt(_spread(shape))) + ability.step_s(0, 1, 0)


def _groups_for_ttft(load: OfferedLoad, ability: GroupCapacity, targets: Targets, busy: float) -> tuple[int, bool]:
    """Returns the fewest groups that keep the TTFT target and True; if no number does, those that keep the wait small and
    False."""
    if targets.ttft_s is None or busy <= 0:
        return 0, True
    own_s = own_ttft_s(load, ability)
    allowed_s = TTFT_SHARE * targets.ttft_s - own_s
    within = allowed_s > 0
    if not within:
        allowed_s = own_s / 4
    low = int(busy) + 1
    high = low
    while wait_p95_s(high, busy, load, ability) > allowed_s:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait_p95_s(middle, busy, load, ability) <= allowed_s else (middle + 1, high)
    return low, within


# Whether fewer groups suffice for the current streams and for the heaviest minute of such a load. The limits are below those that
# add
# a group, so a steady load does not alternate.
#     work    busy <= 0.9 * 0.75 * n     pages   KV in use and wanted <= 0.70 of theirs (more than 0.80 adds a group)
#     steps   step time of their streams <= 0.8 of the ITL target
#     wait    predicted and current wait <= 0.8 of what the TTFT target leaves besides a request's own prompt

BUSY_IN_OF_OUT = 0.9


def why_not_fitted(
    n: int, load: OfferedLoad, groups: list[GroupLoadView], ability: GroupCapacity, targets: Targets
) -> str | None:
    """Returns why n groups (at least 1) would not suffice for the load of `groups`; None if they would."""
    busy = busy_groups(load, ability, targets)
    if busy > BUSY_IN_OF_OUT * BUSY * n:
        return f"{busy:.2f} groups' worth of work is too much for {n}"
    pages = load.kv_tokens / max(n * ability.capacity, 1)
    if pages > KV_IN_OF_OUT * targets.kv:
        return f"{n} would have {pages:.0%} of their pages in use"
    if targets.itl_s is not None and groups:
        step_s = _step_s(n, groups, ability, load)
        if step_s > ITL_SHARE_IN * targets.itl_s:
            return f"steps of {n} would take {step_s * 1000:.0f} ms"
    if targets.ttft_s is not None:
        own_s = own_ttft_s(load, ability)
        allowed_s = TTFT_SHARE * (targets.ttft_s - own_s) if targets.ttft_s > own_s else own_s / 4
        wait_s = max(wait_p95_s(n, busy, load, ability), load.backlog_s / n)
        if wait_s > allowed_s:
            return f"requests would wait {wait_s:.1f} s at {n}"
    return None


def _step_s(n: int, groups: list[GroupLoadView], ability: GroupCapacity, load: OfferedLoad) -> float:
    """Returns the step time of n groups that share these groups' streams; prompt work per step grows in proportion."""
    share = len(groups) / n
    streams = statistics.fmean(group.running for group in groups)
    decodes_now_s = ability.step_s(0, streams, streams * load.context)
    prompts_now_s = max(statistics.median(group.itl_s for group in groups) - decodes_now_s, 0.0)
    return ability.step_s(0, streams * share, streams * share * load.context) + prompts_now_s * share
