"""Decides how many groups a service should have now: a step of a state machine (docs/balancing.md, section 3.8). Default:
unchanged.

    out of bounds  to the bound
    no reports     fewer than half of the routers answered recently: hold, or after three evaluations up to `fallback`
    no group       a request arrived: wake, with as many groups as the queue implies
    to zero        no request for `idle_s`
    out            two evaluations, 15 s apart, need more: to the smaller of the two; one evaluation if growth is expected
    panic          the last 6 s alone need 1.5 times as many: at once
    in             fewer groups suffice for the whole stabilisation time: one less, or a tenth

Out is at most doubling, or 4, in 15 s. After a change of the serving groups, pages, queues and steps have not settled: for two
evaluations only arrivals count, and only for scale-out; a group that flaps forever delays the rest by four evaluations at most.
Starting groups count as existing.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx_operator.decide.scaling.demand import DRAIN_S, Demand, GroupCapacity, Targets, demand, why_not_fitted
from phalanx_operator.decide.scaling.load import (
    SHORT_S,
    USUAL_S,
    ArrivalTrend,
    ability_of,
    arrivals_alone,
    burstiness_of,
    followed,
    fresh,
    growth,
    heaviest_load_of,
    load_of,
    panic_load_of,
)
from phalanx_operator.decide.state.fleet import Fleet

TICK_S = 15.0
PANIC_TICK_S = 2.0
SLACK_S = 0.5
"""Evaluations run by timers: one that is this much early still counts."""
PANIC = 1.5
PANIC_LASTS_S = 60.0
EVALUATIONS = 2
FROZEN_S = 2 * TICK_S
LONGEST_FREEZE_S = 4 * TICK_S
OUT_STEP = 4
IN_EVERY_S = 60.0
IN_SHARE = 10
SLOW_IN_S, FAST_IN_S, QUIET_S = 300.0, 60.0, 300.0
LEAST_IDLE_S = 300.0
LOST_S = 3 * TICK_S
"""How long routers must be silent before that counts: a new leader has no reports at first."""
COLD_S = 60.0
"""Assumed start time of a group before one was measured."""
MEAN_AGE_S = USUAL_S / 2
"""Age of a mean over one minute."""

Verdict = Literal["Steady", "Out", "Panic", "In", "Zero", "Wake", "Bounds", "Hold", "Fallback", "Unmeasured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """The policy of the spec, with the current bounds."""

    least: int
    most: int
    targets: Targets
    up_s: float = 0.0
    up_step: int | None = None
    down_s: float | None = None
    down_step: int | None = None
    to_zero: bool = False
    idle_s: float | None = None
    streams_move: bool = True
    """A group can be drained without waiting for its streams."""
    room: int | None = None
    fallback: int | None = None
    """Least groups while routers are silent; None: as many as there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInputs:
    """The current state: wanted groups, serving groups, router reports, and the start time of a group."""

    now_s: float
    groups: int
    serving: frozenset[str]
    fleet: Fleet
    cold_s: float = COLD_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """The wanted number of groups, and why. `needed`: what the load needs, if computed."""

    groups: int
    verdict: Verdict
    why: str
    needed: int | None = None
    panicking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory:
    """State between evaluations. Its loss costs one stabilisation time."""

    ticked_s: float | None = None
    panic_ticked_s: float | None = None
    trend: ArrivalTrend = field(default_factory=ArrivalTrend)
    needs: tuple[int, ...] = ()
    """Results of the evaluations in a row that needed more, the newest last."""
    over_since_s: float = 0.0
    fits_since_s: float | None = None
    """Since when fewer groups suffice."""
    counts: tuple[tuple[float, int], ...] = ()
    """Wanted groups over the last 15 s."""
    out_s: float | None = None
    in_s: float | None = None
    """The last scale-in."""
    serving: frozenset[str] | None = None
    frozen_since_s: float = 0.0
    frozen_until_s: float = 0.0
    panic_until_s: float = 0.0
    lost_since_s: float | None = None
    """Since when routers are silent."""
    ability: GroupCapacity | None = None
    why: str = ""
    needed: int | None = None


def evaluate(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> tuple[ScaleHistory, ScaleDecision]:
    """Returns the new history and the decision. May be called at any time; between evaluations it decides nothing."""
    memory, decision = _decided(_noted(memory, scene, rules), scene, rules)
    now_s = scene.now_s
    if decision.groups > scene.groups:
        memory = replace(memory, out_s=now_s, needs=(), fits_since_s=None)
    elif decision.groups < scene.groups:
        memory = replace(memory, in_s=now_s, needs=())
    decision = replace(decision, panicking=now_s < memory.panic_until_s)
    return replace(memory, why=decision.why, needed=decision.needed), decision


def _noted(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> ScaleHistory:
    """Returns the history with what every call records: the count, changes of the serving groups, and silence."""
    now_s = scene.now_s
    recent = tuple((at, n) for at, n in memory.counts if now_s - at < TICK_S)
    if memory.serving is not None and memory.serving != scene.serving:
        since = memory.frozen_since_s if now_s < memory.frozen_until_s else now_s
        memory = replace(memory, frozen_since_s=since, frozen_until_s=now_s + FROZEN_S)
    ability = ability_of(scene.fleet, rules.room) or memory.ability
    lost_s = None if scene.fleet.is_heard else now_s if memory.lost_since_s is None else memory.lost_since_s
    counts = (*recent, (now_s, scene.groups))
    return replace(memory, counts=counts, serving=scene.serving, ability=ability, lost_since_s=lost_s)


def _decided(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> tuple[ScaleHistory, ScaleDecision]:
    n = scene.groups
    if not rules.least <= n <= rules.most and not (n == 0 and rules.to_zero and rules.least == 0):
        bound = min(max(n, rules.least), rules.most)
        return memory, ScaleDecision(
            groups=bound, verdict="Bounds", why=f"{n} groups, between {rules.least} and {rules.most} are allowed"
        )
    if not scene.fleet.is_heard:
        return replace(memory, needs=(), fits_since_s=None), _unheard(memory, scene, rules)
    if n == 0:
        return memory, _woken(memory, scene, rules)
    if _is_idle(scene, rules):
        return memory, ScaleDecision(groups=0, verdict="Zero", why=f"no request for {scene.fleet.idle_s:.0f} s")
    if memory.ability is None:
        return memory, ScaleDecision(groups=n, verdict="Unmeasured", why="no group has measured its steps yet")
    if _is_due(memory.ticked_s, scene.now_s, TICK_S):
        return _evaluated(memory, memory.ability, scene, rules)
    if _is_due(memory.panic_ticked_s, scene.now_s, PANIC_TICK_S):
        return _panicked(
            memory, memory.ability, scene, rules, ScaleDecision(groups=n, verdict="Steady", why=memory.why, needed=memory.needed)
        )
    return memory, ScaleDecision(groups=n, verdict="Steady", why=memory.why, needed=memory.needed)


def _unheard(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> ScaleDecision:
    """Returns the decision while too few routers answer: unchanged, and after a while at least the fallback."""
    n, why = scene.groups, f"{scene.fleet.answered} of {scene.fleet.asked} routers answered recently"
    is_lost = memory.lost_since_s is not None and scene.now_s - memory.lost_since_s >= LOST_S
    fallback = min(rules.fallback, rules.most) if rules.fallback is not None and is_lost else 0
    return (
        ScaleDecision(groups=fallback, verdict="Fallback", why=f"{why}: at least {fallback} groups")
        if fallback > n
        else ScaleDecision(groups=n, verdict="Hold", why=why)
    )


def _is_due(former_s: float | None, now_s: float, every_s: float) -> bool:
    return former_s is None or now_s - former_s >= every_s - min(SLACK_S, every_s / 4)


def _is_frozen(memory: ScaleHistory, now_s: float) -> bool:
    """Returns whether the serving groups have just changed, up to a limit."""
    return now_s < memory.frozen_until_s and now_s - memory.frozen_since_s < LONGEST_FREEZE_S


def _woken(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> ScaleDecision:
    fleet = scene.fleet
    short = fleet.traffic.get(SHORT_S)
    served = sum(group.streams for group in fleet.groups.values()) + (short.arrivals if short else 0)
    waiting = fleet.held + fleet.queued + served  # a draining group may still serve some
    if not waiting:
        return ScaleDecision(groups=0, verdict="Steady", why="no requests")
    implied = fleet.queued_tokens * memory.ability.token_s / DRAIN_S if memory.ability else 0.0
    return ScaleDecision(
        groups=min(max(1, math.ceil(implied)), OUT_STEP, rules.most), verdict="Wake", why=f"{waiting} requests wait for a group"
    )


def _is_idle(scene: ScaleInputs, rules: ScalingRules) -> bool:
    """Returns whether every router reports no request for `idle_s`."""
    fleet = scene.fleet
    idle_s = rules.idle_s if rules.idle_s is not None else max(LEAST_IDLE_S, 3 * scene.cold_s)
    busy = fleet.held + fleet.queued + sum(group.streams + group.running + group.waiting for group in fleet.groups.values())
    return rules.to_zero and rules.least == 0 and fleet.all_heard and not busy and fleet.idle_s >= idle_s


def _evaluated(
    memory: ScaleHistory, ability: GroupCapacity, scene: ScaleInputs, rules: ScalingRules
) -> tuple[ScaleHistory, ScaleDecision]:
    """Evaluates; called every 15 s."""
    fleet, now_s = scene.fleet, scene.now_s
    usual = fleet.traffic.get(USUAL_S)
    trend = followed(memory.trend, now_s, usual.arrivals if usual else 0)
    memory = replace(memory, trend=trend, ticked_s=now_s)
    grows = growth(trend, scene.cold_s + TICK_S + MEAN_AGE_S, burstiness_of(fleet))
    load, frozen = load_of(fleet, ability, grows), _is_frozen(memory, now_s)
    need = demand(arrivals_alone(load) if frozen else load, ability, rules.targets)
    memory, decision = _panicked(
        memory, ability, scene, rules, ScaleDecision(groups=scene.groups, verdict="Steady", why=need.why, needed=need.groups)
    )
    if decision.groups > scene.groups:
        return memory, decision
    if need.groups > scene.groups:
        return _more(memory, scene, rules, need, grows)
    if frozen:
        return memory, ScaleDecision(
            groups=scene.groups, verdict="Steady", why="the serving groups have just changed", needed=memory.needed
        )
    memory = replace(memory, needs=())
    if now_s < memory.frozen_until_s:
        return memory, decision
    return _fewer(memory, ability, scene, rules, need)


def _more(
    memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules, need: Demand, grows: float
) -> tuple[ScaleHistory, ScaleDecision]:
    """Scales out once two evaluations in a row agree for long enough; expected growth was observed for longer already."""
    since_s = memory.over_since_s if memory.needs else scene.now_s
    looks = EVALUATIONS if grows == 1 else 1
    needs = (*memory.needs, need.groups)[-looks:]
    memory = replace(memory, needs=needs, over_since_s=since_s, fits_since_s=None)
    why = need.why + (f", growing to {grows:.0%}" if grows > 1 else "")
    enough = len(needs) == looks and scene.now_s - since_s >= rules.up_s - SLACK_S
    count = _capped(min(needs), memory, scene, rules) if enough else scene.groups
    if count > scene.groups:
        return memory, ScaleDecision(groups=count, verdict="Out", why=why, needed=need.groups)
    return memory, ScaleDecision(
        groups=scene.groups, verdict="Steady", why=f"{why}: not yet, or no more are allowed", needed=need.groups
    )


def _panicked(
    memory: ScaleHistory, ability: GroupCapacity, scene: ScaleInputs, rules: ScalingRules, calm: ScaleDecision
) -> tuple[ScaleHistory, ScaleDecision]:
    """Scales out at once when the last seconds alone need far more, else returns `calm`. Their need also blocks scale-in."""
    memory = replace(memory, panic_ticked_s=scene.now_s)
    load = panic_load_of(scene.fleet, ability)
    if load is None:
        return memory, calm
    need = demand(arrivals_alone(load) if _is_frozen(memory, scene.now_s) else load, ability, rules.targets)
    if need.groups >= scene.groups:
        memory = replace(memory, fits_since_s=None)
    if need.groups < PANIC * scene.groups:
        return memory, calm
    memory = replace(memory, panic_until_s=scene.now_s + PANIC_LASTS_S)
    count = _capped(need.groups, memory, scene, rules)
    if count <= scene.groups:
        return memory, calm
    return memory, ScaleDecision(groups=count, verdict="Panic", why=f"in the last 6 s {need.why}", needed=need.groups)


def _capped(wanted: int, memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> int:
    """Returns `wanted` within the bounds and the limit of growth in 15 s."""
    base = min((n for _, n in memory.counts), default=scene.groups)
    limit = max(2 * base, base + OUT_STEP)
    if rules.up_step is not None:
        limit = min(limit, base + rules.up_step)
    return max(scene.groups, min(wanted, limit, rules.most))


def _fewer(
    memory: ScaleHistory, ability: GroupCapacity, scene: ScaleInputs, rules: ScalingRules, need: Demand
) -> tuple[ScaleHistory, ScaleDecision]:
    """Scales in once fewer groups suffice for the whole stabilisation time."""
    n, now_s = scene.groups, scene.now_s
    step = rules.down_step or max(1, n // IN_SHARE)
    floor = max(rules.least, need.groups, 1)
    load, groups = heaviest_load_of(scene.fleet, ability), fresh(scene.fleet)
    reason: str | None = f"{floor} are needed"
    fitting = n
    for count in range(n - 1, max(n - step, floor) - 1, -1):
        reason = why_not_fitted(count, load, groups, ability, rules.targets)
        if reason is not None:
            break
        fitting = count
    if fitting == n:
        return replace(memory, fits_since_s=None), ScaleDecision(
            groups=n, verdict="Steady", why=reason or need.why, needed=need.groups
        )
    since_s = now_s if memory.fits_since_s is None else memory.fits_since_s
    memory = replace(memory, fits_since_s=since_s)
    paced = memory.in_s is None or now_s - memory.in_s >= IN_EVERY_S - SLACK_S
    if now_s - since_s < _stable_s(memory, scene, rules) - SLACK_S or not paced:
        return memory, ScaleDecision(
            groups=n, verdict="Steady", why=f"{fitting} would do, but not for long enough yet", needed=need.groups
        )
    return memory, ScaleDecision(
        groups=fitting, verdict="In", why=f"{fitting} have done for {now_s - since_s:.0f} s", needed=need.groups
    )


def _stable_s(memory: ScaleHistory, scene: ScaleInputs, rules: ScalingRules) -> float:
    """Returns for how long fewer groups must suffice."""
    if rules.down_s is not None:
        return rules.down_s
    quiet = memory.out_s is None or scene.now_s - memory.out_s > QUIET_S
    return FAST_IN_S if rules.streams_move and quiet and scene.groups > 1 else SLOW_IN_S
