"""Computes how many groups a load needs from the step-time function (docs/scaling.md).

    busy   = rate * (missed * c + prompt^2 * a / 2) + rate * output * t(p, B, B * context) / B      groups' worth of work
    time   = ceil(busy / 0.75)
    kv     = ceil(tokens in pages and waiting for them / (0.80 * pages of a group))
    ttft   = the smallest N with a predicted P95 of at most 0.8 of the target
    needed = max(time, kv, ttft) + backlog / 10 s

c: cost of one prompt token in a full step; a: attention coefficient of the step model; B: largest number of streams that fit into
the pages with steps within 0.85 of the ITL target. The P95 wait is that of a G/G/N queue (Allen and Cunneen, with Sakasegawa's
exponent for the probability of waiting) of N servers, as busy as the groups, that serve one prompt at a time.
"""

import math
import statistics
from dataclasses import dataclass

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import Traffic
from phalanx_operator.decide.state.fleet import GroupLoadView

BUSY = 0.75
BUSY_IN_SHARE = 0.9
"""For scale-in, as the other `IN` shares: a steady load must not alternate."""
ITL_SHARE_OUT, ITL_SHARE_IN = 0.85, 0.80
TTFT_SHARE = 0.8
KV_SHARE = 0.80
KV_IN_SHARE = 0.875
"""Of the KV threshold."""
DRAIN_S = 10.0
"""Time to compute a backlog."""
STEP_TOKENS = 2048
"""Default of a full step."""
MAX_STREAMS = 4096
MAX_BUSY = 10_000.0
P95 = 0.05


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets, and the usable share of pages."""

    ttft_s: float | None = None
    itl_s: float | None = None
    kv_share: float = KV_SHARE


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """Capacity of one group."""

    step_model: StepModel
    speed: float
    """Factor on `step_model`."""
    kv_tokens: int
    """Tokens that fit into its pages."""
    step_tokens: int = STEP_TOKENS
    request_tokens: int = 0
    """Most tokens whose pages a request holds; 0: all."""

    def kept_tokens(self, context: float) -> float:
        """Returns the tokens, of `context` of a stream, whose pages it holds at once."""
        return min(context, self.request_tokens) if self.request_tokens else context

    def step_s(self, prefill: float, streams: float, context: float) -> float:
        """Returns the time of a step. `context`: total context tokens."""
        return self.speed * self.step_model.predict(StepWork(math.ceil(prefill), math.ceil(streams), math.ceil(context)))

    @property
    def token_s(self) -> float:
        """Time per prompt token in full steps."""
        return self.step_s(self.step_tokens, 0, 0) / self.step_tokens


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Load of a service."""

    rate: float
    """Arrival rate, requests per second."""
    shape: Traffic
    """Mean prompt and output lengths."""
    kv_tokens: float
    """Tokens in pages or waiting for them."""
    backlog_s: float
    """Waiting prompt work, in seconds of one group."""

    @property
    def context(self) -> float:
        """Mean tokens of a stream at half of its output."""
        return self.shape.prompt + self.shape.output / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The terms of the formula."""

    groups: int
    busy: float
    time: int
    kv: int
    ttft: int
    backlog: int
    is_ttft_reachable: bool = True

    @property
    def why(self) -> str:
        """The largest term, as text."""
        terms = {
            f"{self.busy:.2f} groups' worth of work": self.time,
            "the KV pages in use": self.kv,
            "the time to the first token": self.ttft,
        }
        cause = max(terms, key=lambda term: terms[term])
        return f"{cause} needs {terms[cause]}" + (f", the backlog {self.backlog} more" if self.backlog else "")


def demand(load: OfferedLoad, capacity: GroupCapacity, targets: Targets) -> Demand:
    """Returns how many groups the load needs."""
    busy = busy_groups(load, capacity, targets)
    time = math.ceil(round(busy / BUSY, 6))
    kv = math.ceil(round(load.kv_tokens / max(targets.kv_share * capacity.kv_tokens, 1.0), 6))
    ttft, is_reachable = _groups_for_ttft(load, capacity, targets, busy)
    backlog = int(load.backlog_s / DRAIN_S)
    groups = max(time, kv, ttft) + backlog
    return Demand(groups=groups, busy=busy, time=time, kv=kv, ttft=ttft, backlog=backlog, is_ttft_reachable=is_reachable)


def busy_groups(load: OfferedLoad, capacity: GroupCapacity, targets: Targets) -> float:
    """Returns the groups' worth of work."""
    shape = load.shape
    prefill_s = _prefill_s(shape, capacity)
    streams = max_streams(load, capacity, targets)
    decode_s = shape.output * capacity.step_s(0, streams, streams * load.context) / streams
    return min(load.rate * (prefill_s + decode_s), MAX_BUSY)


def _prefill_s(shape: Traffic, capacity: GroupCapacity) -> float:
    return shape.missed * capacity.token_s + capacity.speed * capacity.step_model.attention_s * shape.prompt_squared / 2


def max_streams(load: OfferedLoad, capacity: GroupCapacity, targets: Targets) -> int:
    """Returns the largest number of streams, at least 1, within a group's pages and the ITL target.

    In a steady state each step of B streams also computes B * missed / output prompt tokens.
    """
    fitting = int(targets.kv_share * capacity.kv_tokens / max(capacity.kept_tokens(load.context), 1.0))
    high = max(1, min(fitting, MAX_STREAMS))
    if targets.itl_s is None:
        return high
    limit_s, low = ITL_SHARE_OUT * targets.itl_s, 1
    prefill = load.shape.missed / max(load.shape.output, 1.0)
    while low < high:
        middle = (low + high + 1) // 2
        step_s = capacity.step_s(min(capacity.step_tokens, middle * prefill), middle, middle * load.context)
        low, high = (middle, high) if step_s <= limit_s else (low, middle - 1)
    return low


def wait_p95_s(groups: int, busy: float, load: OfferedLoad, capacity: GroupCapacity) -> float:
    """Returns the predicted P95 wait of a prompt; infinite under overload."""
    use = busy / groups if groups else math.inf
    if use >= 1:
        return math.inf
    shape = load.shape
    chance = use ** (math.sqrt(2 * (groups + 1)) - 1) if use > 0 else 0.0
    if chance <= P95:
        return 0.0
    mean_of_waiting_s = (shape.scv + _spread(shape)) / 2 * _prefill_s(shape, capacity) / (groups * (1 - use))
    return mean_of_waiting_s * math.log(chance / P95)


def _spread(shape: Traffic) -> float:
    """Returns the squared coefficient of variation of prompt lengths."""
    return max(shape.prompt_squared / shape.prompt**2 - 1, 0.0) if shape.prompt >= 1 else 0.0


def own_ttft_s(load: OfferedLoad, capacity: GroupCapacity) -> float:
    """Returns the TTFT of a long prompt on an idle group."""
    shape = load.shape
    return _prefill_s(shape, capacity) * (1 + 1.65 * math.sqrt(_spread(shape))) + capacity.step_s(0, 1, 0)


def _groups_for_ttft(load: OfferedLoad, capacity: GroupCapacity, targets: Targets, busy: float) -> tuple[int, bool]:
    """Returns the fewest groups for the TTFT target, and whether any number meets it."""
    if targets.ttft_s is None or busy <= 0:
        return 0, True
    own_s = own_ttft_s(load, capacity)
    allowed_s = TTFT_SHARE * targets.ttft_s - own_s
    is_reachable = allowed_s > 0
    if not is_reachable:
        allowed_s = own_s / 4
    low = int(busy) + 1
    high = low
    while wait_p95_s(high, busy, load, capacity) > allowed_s:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait_p95_s(middle, busy, load, capacity) <= allowed_s else (middle + 1, high)
    return low, is_reachable


def scale_in_obstacle(
    n: int, load: OfferedLoad, groups: list[GroupLoadView], capacity: GroupCapacity, targets: Targets
) -> str | None:
    """Returns why n >= 1 groups would not suffice for `load` and the streams of `groups`.

    work    busy <= 0.9 * 0.75 * n          pages   in use <= 0.875 of the KV threshold
    steps   <= 0.8 of the ITL target        wait    <= 0.8 of (TTFT target - own prompt)
    """
    busy = busy_groups(load, capacity, targets)
    if busy > BUSY_IN_SHARE * BUSY * n:
        return f"{busy:.2f} groups' worth of work is too much for {n}"
    pages = load.kv_tokens / max(n * capacity.kv_tokens, 1)
    if pages > KV_IN_SHARE * targets.kv_share:
        return f"{n} would have {pages:.0%} of their pages in use"
    if targets.itl_s is not None and groups:
        step_s = _step_s(n, groups, capacity, load)
        if step_s > ITL_SHARE_IN * targets.itl_s:
            return f"steps of {n} would take {step_s * 1000:.0f} ms"
    if targets.ttft_s is not None:
        own_s = own_ttft_s(load, capacity)
        allowed_s = TTFT_SHARE * (targets.ttft_s - own_s) if targets.ttft_s > own_s else own_s / 4
        wait_s = max(wait_p95_s(n, busy, load, capacity), load.backlog_s / n)
        if wait_s > allowed_s:
            return f"requests would wait {wait_s:.1f} s at {n}"
    return None


def _step_s(n: int, groups: list[GroupLoadView], capacity: GroupCapacity, load: OfferedLoad) -> float:
    """Returns the step time of n groups with the streams of `groups`."""
    share = len(groups) / n
    streams = statistics.fmean(group.running for group in groups)
    decode_s = capacity.step_s(0, streams, streams * load.context)
    prefill_s = max(statistics.median(group.itl_s for group in groups) - decode_s, 0.0)
    return capacity.step_s(0, streams * share, streams * share * load.context) + prefill_s * share
