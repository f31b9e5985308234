"""Decides how many groups a service should have (docs/scaling.md).

    Bounds      outside of the bounds: to the nearest
    Hold        fewer than half of the routers answered; after three evaluations `Fallback`: at least `fallback`
    Wake        no group, and requests: as many as the queue implies
    Zero        no request and no scale-out for `idle_s`
    Out         two evaluations need more: the smaller number; one evaluation if growth is expected
    Panic       the last 6 s alone need 1.5 times as many: at once
    In          fewer suffice for the whole stabilisation time: one less, or a tenth; all routers answered, and report
                the load of at least two thirds of the serving groups

Scale-out at most doubles the groups, or adds 4, in 15 s. After the serving groups change, pages, queues and steps have to settle:
for two evaluations, four if groups flap, only arrivals count, and only for scale-out.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx_operator.decide.scaling.demand import DRAIN_S, Demand, GroupCapacity, Targets, demand, scale_in_obstacle
from phalanx_operator.decide.scaling.load import (
    MEDIUM_S,
    SHORT_S,
    ArrivalTrend,
    add_minute,
    arrivals_only,
    burstiness,
    current_load,
    expected_growth,
    fresh_loads,
    group_capacity,
    heaviest_load,
    panic_load,
)
from phalanx_operator.decide.state.fleet import Fleet

TICK_S = 15.0
PANIC_TICK_S = 2.0
SLACK_S = 0.5
"""Tolerance of timers."""
PANIC = 1.5
PANIC_DURATION_S = 60.0
EVALUATIONS = 2
FREEZE_S = 2 * TICK_S
MAX_FREEZE_S = 4 * TICK_S
OUT_STEP = 4
IN_INTERVAL_S = 60.0
IN_SHARE = 10
SLOW_IN_S, FAST_IN_S, QUIET_S = 300.0, 60.0, 300.0
MIN_IDLE_S = 300.0
SILENT_S = 3 * TICK_S
"""Until silent routers count: a new leader has no reports."""
COLD_START_S = 60.0
"""Before a start is measured."""
MEAN_AGE_S = MEDIUM_S / 2
"""Age of a mean over one minute."""

Verdict = Literal["Steady", "Out", "Panic", "In", "Zero", "Wake", "Bounds", "Hold", "Fallback", "Unmeasured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """The policy of the spec, with current bounds."""

    min_groups: int
    max_groups: int
    targets: Targets
    up_stabilization_s: float = 0.0
    up_max_step: int | None = None
    down_stabilization_s: float | None = None
    down_max_step: int | None = None
    scales_to_zero: bool = False
    idle_s: float | None = None
    can_move_streams: bool = True
    """A drain does not wait for streams."""
    step_tokens: int | None = None
    fallback: int | None = None
    """Least groups while routers are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInputs:
    """The current state."""

    now_s: float
    groups: int
    """Number of wanted groups."""
    serving: frozenset[str]
    fleet: Fleet
    cold_start_s: float = COLD_START_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """The wanted number of groups, and why."""

    groups: int
    verdict: Verdict
    why: str
    needed: int | None = None
    """Groups that the load needs."""
    is_panicking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Time after a change of the serving groups."""

    serving: frozenset[str] | None = None
    since_s: float = 0.0
    until_s: float = 0.0

    def observe(self, serving: frozenset[str], now_s: float) -> "Freeze":
        """Starts or prolongs the freeze if the serving groups changed."""
        if self.serving is None or self.serving == serving:
            return replace(self, serving=serving)
        since_s = self.since_s if now_s < self.until_s else now_s
        return Freeze(serving=serving, since_s=since_s, until_s=now_s + FREEZE_S)

    def is_active(self, now_s: float) -> bool:
        """Returns whether only arrivals count, for at most `MAX_FREEZE_S`."""
        return now_s < self.until_s and now_s - self.since_s < MAX_FREEZE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Consecutive evaluations that agree."""

    needs: tuple[int, ...] = ()
    """Of evaluations that need more."""
    over_since_s: float = 0.0
    """Start time of `needs`."""
    fits_since_s: float | None = None
    """Since when fewer groups suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory:
    """State between evaluations. Its loss costs a stabilisation time."""

    evaluated_s: float | None = None
    panic_evaluated_s: float | None = None
    trend: ArrivalTrend = field(default_factory=ArrivalTrend)
    evidence: Evidence = Evidence()
    counts: tuple[tuple[float, int], ...] = ()
    """Times and wanted groups of 15 s."""
    scaled_out_s: float | None = None
    scaled_in_s: float | None = None
    freeze: Freeze = Freeze()
    panic_until_s: float = 0.0
    silent_since_s: float | None = None
    """Since when too few routers answer."""
    capacity: GroupCapacity | None = None
    why: str = ""
    """Of the last decision, like `needed`."""
    needed: int | None = None


def evaluate(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> tuple[ScaleHistory, ScaleDecision]:
    """Returns the new history and the decision. Between evaluations the number stays."""
    history, decision = _decide(_observe(history, inputs, rules), inputs, rules)
    now_s = inputs.now_s
    if decision.groups > inputs.groups:
        history = replace(history, scaled_out_s=now_s, evidence=Evidence())
    elif decision.groups < inputs.groups:
        history = replace(history, scaled_in_s=now_s, evidence=replace(history.evidence, needs=()))
    decision = replace(decision, is_panicking=now_s < history.panic_until_s)
    return replace(history, why=decision.why, needed=decision.needed), decision


def _observe(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> ScaleHistory:
    """Records groups, capacity and silence."""
    now_s = inputs.now_s
    recent = tuple((at_s, count) for at_s, count in history.counts if now_s - at_s < TICK_S)
    silent_s = None if inputs.fleet.has_quorum else now_s if history.silent_since_s is None else history.silent_since_s
    return replace(
        history,
        counts=(*recent, (now_s, inputs.groups)),
        freeze=history.freeze.observe(inputs.serving, now_s),
        capacity=group_capacity(inputs.fleet, rules.step_tokens) or history.capacity,
        silent_since_s=silent_s,
    )


def _decide(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> tuple[ScaleHistory, ScaleDecision]:
    n, minimum, maximum = inputs.groups, rules.min_groups, rules.max_groups
    if not minimum <= n <= maximum and not (n == 0 and rules.scales_to_zero and minimum == 0):
        why = f"{n} groups, between {minimum} and {maximum} are allowed"
        return history, ScaleDecision(groups=min(max(n, minimum), maximum), verdict="Bounds", why=why)
    if not inputs.fleet.has_quorum:
        return replace(history, evidence=Evidence()), _decide_silent(history, inputs, rules)
    if n == 0:
        return history, _wake(history, inputs, rules)
    if _is_idle(history, inputs, rules):
        return history, ScaleDecision(groups=0, verdict="Zero", why=f"no request for {inputs.fleet.requests.idle_s:.0f} s")
    if history.capacity is None:
        return history, ScaleDecision(groups=n, verdict="Unmeasured", why="no group has measured its steps yet")
    if _is_due(history.evaluated_s, inputs.now_s, TICK_S):
        return _evaluate_load(history, history.capacity, inputs, rules)
    steady = ScaleDecision(groups=n, verdict="Steady", why=history.why, needed=history.needed)
    if _is_due(history.panic_evaluated_s, inputs.now_s, PANIC_TICK_S):
        return _check_panic(history, history.capacity, inputs, rules, steady)
    return history, steady


def _decide_silent(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> ScaleDecision:
    n, why = inputs.groups, f"{inputs.fleet.answered} of {inputs.fleet.polled} routers answered recently"
    is_silent = history.silent_since_s is not None and inputs.now_s - history.silent_since_s >= SILENT_S
    fallback = min(rules.fallback, rules.max_groups) if rules.fallback is not None and is_silent else 0
    return (
        ScaleDecision(groups=fallback, verdict="Fallback", why=f"{why}: at least {fallback} groups")
        if fallback > n
        else ScaleDecision(groups=n, verdict="Hold", why=why)
    )


def _is_due(last_s: float | None, now_s: float, interval_s: float) -> bool:
    return last_s is None or now_s - last_s >= interval_s - min(SLACK_S, interval_s / 4)


def _wake(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> ScaleDecision:
    fleet, requests = inputs.fleet, inputs.fleet.requests
    short = requests.windows.get(SHORT_S)
    served = sum(load.streams for load in fleet.loads) + (short.arrivals if short else 0)  # a draining group may serve some
    waiting = requests.held + requests.queued + served
    if not waiting:
        return ScaleDecision(groups=0, verdict="Steady", why="no requests")
    implied = requests.queued_tokens * history.capacity.token_s / DRAIN_S if history.capacity else 0.0
    groups = min(max(1, math.ceil(implied)), OUT_STEP, rules.max_groups)
    return ScaleDecision(groups=groups, verdict="Wake", why=f"{waiting} requests wait for a group")


def _is_idle(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> bool:
    """A router that has ended, or was replaced, does not report the request that woke the service."""
    fleet, requests = inputs.fleet, inputs.fleet.requests
    idle_s = rules.idle_s if rules.idle_s is not None else max(MIN_IDLE_S, 3 * inputs.cold_start_s)
    if history.scaled_out_s is not None and inputs.now_s - history.scaled_out_s < idle_s:
        return False
    busy = requests.held + requests.queued + sum(load.streams + load.running + load.waiting for load in fleet.loads)
    return rules.scales_to_zero and rules.min_groups == 0 and fleet.is_complete and not busy and requests.idle_s >= idle_s


def _evaluate_load(
    history: ScaleHistory, capacity: GroupCapacity, inputs: ScaleInputs, rules: ScalingRules
) -> tuple[ScaleHistory, ScaleDecision]:
    fleet, now_s = inputs.fleet, inputs.now_s
    medium = fleet.requests.windows.get(MEDIUM_S)
    trend = add_minute(history.trend, now_s, medium.arrivals if medium else 0)
    history = replace(history, trend=trend, evaluated_s=now_s)
    growth = expected_growth(trend, inputs.cold_start_s + TICK_S + MEAN_AGE_S, burstiness(fleet))
    load, is_frozen = current_load(fleet, capacity, growth), history.freeze.is_active(now_s)
    need = demand(arrivals_only(load) if is_frozen else load, capacity, rules.targets)
    steady = ScaleDecision(groups=inputs.groups, verdict="Steady", why=need.why, needed=need.groups)
    history, decision = _check_panic(history, capacity, inputs, rules, steady)
    if decision.groups > inputs.groups:
        return history, decision
    if need.groups > inputs.groups:
        return _scale_out(history, inputs, rules, need, growth)
    if is_frozen:
        return history, replace(steady, why="the serving groups have just changed", needed=history.needed)
    history = replace(history, evidence=replace(history.evidence, needs=()))
    if now_s < history.freeze.until_s:
        return history, decision
    return _scale_in(history, capacity, inputs, rules, need)


def _scale_out(
    history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules, need: Demand, growth: float
) -> tuple[ScaleHistory, ScaleDecision]:
    since_s = history.evidence.over_since_s if history.evidence.needs else inputs.now_s
    evaluations = EVALUATIONS if growth == 1 else 1
    needs = (*history.evidence.needs, need.groups)[-evaluations:]
    history = replace(history, evidence=Evidence(needs=needs, over_since_s=since_s))
    why = need.why + (f", growing to {growth:.0%}" if growth > 1 else "")
    is_stable = len(needs) == evaluations and inputs.now_s - since_s >= rules.up_stabilization_s - SLACK_S
    groups = _capped(min(needs), history, inputs, rules) if is_stable else inputs.groups
    if groups > inputs.groups:
        return history, ScaleDecision(groups=groups, verdict="Out", why=why, needed=need.groups)
    why = f"{why}: not yet, or no more are allowed"
    return history, ScaleDecision(groups=inputs.groups, verdict="Steady", why=why, needed=need.groups)


def _check_panic(
    history: ScaleHistory, capacity: GroupCapacity, inputs: ScaleInputs, rules: ScalingRules, calm: ScaleDecision
) -> tuple[ScaleHistory, ScaleDecision]:
    """Returns `calm` unless the last seconds alone need far more. Their need also blocks scale-in."""
    history = replace(history, panic_evaluated_s=inputs.now_s)
    load = panic_load(inputs.fleet, capacity)
    if load is None:
        return history, calm
    need = demand(arrivals_only(load) if history.freeze.is_active(inputs.now_s) else load, capacity, rules.targets)
    if need.groups >= inputs.groups:
        history = replace(history, evidence=replace(history.evidence, fits_since_s=None))
    if need.groups < PANIC * inputs.groups:
        return history, calm
    history = replace(history, panic_until_s=inputs.now_s + PANIC_DURATION_S)
    groups = _capped(need.groups, history, inputs, rules)
    if groups <= inputs.groups:
        return history, calm
    return history, ScaleDecision(groups=groups, verdict="Panic", why=f"in the last 6 s {need.why}", needed=need.groups)


def _capped(groups: int, history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> int:
    """Returns `groups` within the limits of scale-out."""
    base = min((count for _, count in history.counts), default=inputs.groups)
    limit = max(2 * base, base + OUT_STEP)
    if rules.up_max_step is not None:
        limit = min(limit, base + rules.up_max_step)
    return max(inputs.groups, min(groups, limit, rules.max_groups))


def _scale_in(
    history: ScaleHistory, capacity: GroupCapacity, inputs: ScaleInputs, rules: ScalingRules, need: Demand
) -> tuple[ScaleHistory, ScaleDecision]:
    n, now_s = inputs.groups, inputs.now_s
    steady = ScaleDecision(groups=n, verdict="Steady", why="", needed=need.groups)
    if why := _missing_reports(inputs):
        history = replace(history, evidence=replace(history.evidence, fits_since_s=None))
        return history, replace(steady, why=why)
    step = rules.down_max_step or max(1, n // IN_SHARE)
    floor = max(rules.min_groups, need.groups, 1)
    load, groups = heaviest_load(inputs.fleet, capacity), fresh_loads(inputs.fleet)
    obstacle: str | None = f"{floor} are needed"
    fitting = n
    for count in range(n - 1, max(n - step, floor) - 1, -1):
        obstacle = scale_in_obstacle(count, load, groups, capacity, rules.targets)
        if obstacle is not None:
            break
        fitting = count
    if fitting == n:
        history = replace(history, evidence=replace(history.evidence, fits_since_s=None))
        return history, replace(steady, why=obstacle or need.why)
    since_s = now_s if history.evidence.fits_since_s is None else history.evidence.fits_since_s
    history = replace(history, evidence=replace(history.evidence, fits_since_s=since_s))
    is_paced = history.scaled_in_s is None or now_s - history.scaled_in_s >= IN_INTERVAL_S - SLACK_S
    if now_s - since_s < _in_stabilization_s(history, inputs, rules) - SLACK_S or not is_paced:
        return history, replace(steady, why=f"{fitting} would do, but not for long enough yet")
    why = f"{fitting} have done for {now_s - since_s:.0f} s"
    return history, ScaleDecision(groups=fitting, verdict="In", why=why, needed=need.groups)


def _missing_reports(inputs: ScaleInputs) -> str:
    """Returns which reports are missing for a scale-in: load that vanishes with its reports is no reason."""
    fleet, serving = inputs.fleet, inputs.serving
    if not fleet.is_complete:
        return f"{fleet.answered} of {fleet.polled} routers answered recently"
    reported = sum(name in fleet.groups and fleet.groups[name].load.is_fresh for name in serving)
    return f"the load of {reported} of {len(serving)} groups is reported" if 3 * (len(serving) - reported) > len(serving) else ""


def _in_stabilization_s(history: ScaleHistory, inputs: ScaleInputs, rules: ScalingRules) -> float:
    if rules.down_stabilization_s is not None:
        return rules.down_stabilization_s
    is_quiet = history.scaled_out_s is None or inputs.now_s - history.scaled_out_s > QUIET_S
    return FAST_IN_S if rules.can_move_streams and is_quiet and inputs.groups > 1 else SLOW_IN_S
