"""Finds hotspots: compares signals with thresholds and other groups, with hysteresis.

    enter  z >= high  and  z >= median + max(delta, 3 * 1.4826 * MAD)      in 2 of the last 3 ticks
    exit   z < low    or   z < median + delta / 2                          in 4 ticks in a row

With up to three groups the minimum replaces median and spread. `full` enters at once, a straggler after 10 s and 50 steps. The
fleet is saturated if most groups exceed `high` for one load or all miss the TTFT target. A group without a fresh report and an
idle straggler keep their state. See docs/balancing.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx_api.conditions import Cause
from phalanx_router.balancing.records import HotspotAction
from phalanx_router.balancing.targets import copy_s
from phalanx_router.routing.view import GroupView

RESCUE_SLACK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRule:
    """Thresholds of a signal, and what follows while the cause is active."""

    high: float  # enters
    low: float  # leaves below
    delta: float  # minimum distance from the other groups
    action: HotspotAction  # shown in the summary; `reported_action` says which part executes it
    is_load: bool = False  # more groups relieve it
    moves_relieve: bool = False  # running requests move off the hotspot


RULES: Mapping[Cause, CauseRule] = {
    "kv": CauseRule(high=0.85, low=0.75, delta=0.10, action="migrate", is_load=True, moves_relieve=True),
    "prefill": CauseRule(high=0.5, low=0.25, delta=0.2, action="requeue", is_load=True),
    "decode": CauseRule(high=0.90, low=0.75, delta=0.15, action="migrate", is_load=True, moves_relieve=True),
    "prefix": CauseRule(high=0.30, low=0.15, delta=0.15, action="replicate"),
    "straggler": CauseRule(high=1.30, low=1.15, delta=0.15, action="weigh"),  # very slow: see `reported_action`
    "full": CauseRule(high=1.0, low=1.0, delta=0.0, action="rescue", moves_relieve=True),
}
LOAD_CAUSES = tuple(cause for cause, rule in RULES.items() if rule.is_load)
PRECEDENCE: tuple[Cause, ...] = ("straggler", "prefix", "full")
"""The first two explain other causes, the last one is urgent."""


@dataclass(frozen=True, slots=True)
class HotspotTargets:
    """Latency targets."""

    ttft_s: float | None = None
    itl_s: float | None = None


def signals(view: GroupView, targets: HotspotTargets) -> dict[Cause, float]:
    """Signal of each cause; 0 without its latency target."""
    values: dict[Cause, float] = {
        "kv": max(view.pressure, 1.0 if view.has_recent_preemption else 0.0),
        "prefill": view.backlog_s / targets.ttft_s if targets.ttft_s else 0.0,
        "decode": view.itl_s / targets.itl_s if targets.itl_s and view.load.running else 0.0,
        "straggler": view.speed,
        "full": _exhaustion_signal(view),
    }
    is_loaded = any(values[cause] >= RULES[cause].low for cause in LOAD_CAUSES)
    return values | {"prefix": view.load.hot_prefix.token_share if is_loaded else 0.0}


def _exhaustion_signal(view: GroupView) -> float:
    """Time for two copies of a mean request / time until the page pool is exhausted."""
    load = view.load
    if load.steps_to_full is None or not load.running:
        return 0.0
    needed_s = 2 * copy_s(load.context_tokens / load.running, view, view.copy_bytes_per_s) + RESCUE_SLACK_S
    return needed_s / max(load.steps_to_full * view.itl_s, 1e-6)


def select_primary(causes: Mapping[Cause, float]) -> Cause:
    """Main cause. Raises ValueError if `causes` is empty."""
    for cause in PRECEDENCE:
        if cause in causes:
            return cause
    return max(causes, key=lambda cause: (causes[cause] - RULES[cause].high) / (1 - RULES[cause].low))


ENTER_TICKS, ENTER_WINDOW, EXIT_TICKS = 2, 3, 4
SIGMAS = 3 * 1.4826
SMALL_FLEET = 3
STRAGGLER_S, STRAGGLER_STEPS = 10.0, 50
SPEED_RISE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class HotGroup:
    """A hotspot."""

    key: str
    group: str
    cause: Cause
    causes: dict[Cause, float]  # signal of each active cause
    median: float
    since: float
    speed_rises: bool = False  # slower than when it became a straggler


@dataclass(frozen=True, slots=True)
class Transition:
    """A group became a hotspot, changed its cause, or recovered."""

    group: str
    cause: Cause | None
    why: str


@dataclass(frozen=True, slots=True)
class HotspotReport:
    """Result of one tick."""

    hot: dict[str, HotGroup]
    transitions: list[Transition]
    is_saturated: bool


@dataclass(slots=True, kw_only=True)
class _CauseState:
    recent: list[bool] = field(default_factory=list)  # whether high, in the last ticks
    calm_ticks: int = 0
    since: float | None = None  # when the cause became active
    high_since: float | None = None
    first_speed: float = 0.0  # when it became a straggler

    def record(self, is_high: bool, is_calm: bool, now: float, is_urgent: bool = False) -> None:
        """Records one tick."""
        self.recent = [*self.recent[1 - ENTER_WINDOW :], is_high]
        self.calm_ticks = self.calm_ticks + 1 if is_calm else 0
        self.high_since = (self.high_since if self.high_since is not None else now) if is_high else None
        if self.since is None and (sum(self.recent) >= ENTER_TICKS or (is_high and is_urgent)):
            self.since, self.calm_ticks = now, 0
        elif self.since is not None and self.calm_ticks >= EXIT_TICKS:
            self.since, self.recent = None, []


@dataclass(frozen=True, slots=True)
class _SignalSpread:
    centre: float
    outlier: float  # minimum of an outlier
    normal: float  # upper bound of normal values

    @staticmethod
    def of(values: Sequence[float], rule: CauseRule) -> "_SignalSpread":
        centre = median(values)
        if len(values) <= SMALL_FLEET:
            least = min(values)
            return _SignalSpread(centre, least + rule.delta, least + rule.delta / 2)
        deviation = median(abs(value - centre) for value in values)
        return _SignalSpread(centre, centre + max(rule.delta, SIGMAS * deviation), centre + rule.delta / 2)


class HotspotTracker:
    """State of all groups, by key."""

    def __init__(self) -> None:
        self._states: dict[str, dict[Cause, _CauseState]] = {}
        self._hot: dict[str, HotGroup] = {}
        self._saturation = _CauseState()
        self._evaluated: tuple[list[GroupView], HotspotTargets] = ([], HotspotTargets())
        """Inputs of the last tick."""
        self._num_equal = 0
        """Ticks since another one changed them."""

    def tick(self, views: Sequence[GroupView], targets: HotspotTargets, now: float) -> HotspotReport:
        """Evaluates all groups that stay, every 250 ms. Idle groups that stay equal change nothing after a few ticks."""
        if self._is_settled(views, targets):
            return HotspotReport({}, [], False)
        fresh = [view for view in views if view.state == "fresh"]
        values = {view.key: signals(view, targets) for view in fresh}
        spreads = (
            {cause: _SignalSpread.of([z[cause] for z in values.values()], RULES[cause]) for cause in RULES} if values else {}
        )
        self._states = {view.key: self._states.get(view.key) or _new_states() for view in views}
        for view in fresh:
            for cause, state in self._states[view.key].items():
                _record_signal(view, cause, state, values[view.key][cause], spread=spreads[cause], now=now)
        self._record_saturation(fresh, values, targets, now)
        hot = {view.key: group for view in views if (group := self._hot_group(view, values, spreads)) is not None}
        transitions = self._transitions(hot)
        self._hot = hot
        return HotspotReport(hot, transitions, self._saturation.since is not None)

    def _is_settled(self, views: Sequence[GroupView], targets: HotspotTargets) -> bool:
        """Counts ticks with the same idle groups; returns whether all states are those of such a tick, without a hotspot."""
        evaluated, former = self._evaluated
        is_equal = targets == former and len(views) == len(evaluated)
        is_equal = is_equal and all(view is other for view, other in zip(views, evaluated, strict=True))
        if not is_equal:
            self._evaluated, self._num_equal = (list(views), targets), 0
            return False
        self._num_equal += 1
        if self._num_equal <= ENTER_WINDOW or self._hot or self._saturation.since is not None:
            return False
        return not any(view.load.running for view in views)  # of those, only time shows a straggler

    def _record_saturation(
        self, fresh: Sequence[GroupView], values: dict[str, dict[Cause, float]], targets: HotspotTargets, now: float
    ) -> None:
        num_high = max((sum(z[cause] >= RULES[cause].high for z in values.values()) for cause in LOAD_CAUSES), default=0)
        all_late = bool(targets.ttft_s) and all(view.backlog_s > (targets.ttft_s or 0.0) for view in fresh)
        is_saturated = bool(fresh) and (2 * num_high > len(fresh) or all_late)
        self._saturation.record(is_saturated, not is_saturated, now)

    def _hot_group(
        self, view: GroupView, values: dict[str, dict[Cause, float]], spreads: dict[Cause, _SignalSpread]
    ) -> HotGroup | None:
        if view.key not in values:
            return self._hot.get(view.key)
        states = self._states[view.key]
        causes = {cause: values[view.key][cause] for cause, state in states.items() if state.since is not None}
        if not causes:
            return None
        cause = select_primary(causes)
        straggler = states["straggler"]
        return HotGroup(
            key=view.key,
            group=view.group or view.key,
            cause=cause,
            causes=causes,
            median=spreads[cause].centre,
            since=_since(states, cause),
            speed_rises=straggler.since is not None and view.speed >= straggler.first_speed + SPEED_RISE,
        )

    def _transitions(self, hot: dict[str, HotGroup]) -> list[Transition]:
        transitions = []
        for key, group in hot.items():
            before = self._hot.get(key)
            if before is None or before.cause != group.cause:
                signal = group.causes[group.cause]
                transitions.append(Transition(group.group, group.cause, f"{group.cause} {signal:.2f}, median {group.median:.2f}"))
        for key, group in self._hot.items():
            if key not in hot:
                why = "has left the hotspot range" if key in self._states else "was removed or is being evacuated"
                transitions.append(Transition(group.group, None, f"the group {why}"))
        return transitions


def _since(states: Mapping[Cause, _CauseState], cause: Cause) -> float:
    """Time since which the group is a hotspot; of a straggler, since which it is slow: the operator replaces it after a time."""
    shown = [states[cause]] if cause == "straggler" else states.values()
    return min(state.since for state in shown if state.since is not None)


def _new_states() -> dict[Cause, _CauseState]:
    return {cause: _CauseState() for cause in RULES}


def _record_signal(view: GroupView, cause: Cause, state: _CauseState, signal: float, spread: _SignalSpread, now: float) -> None:
    rule = RULES[cause]
    if cause == "full":
        state.record(signal >= rule.high, signal < rule.low, now, is_urgent=True)
        return
    if cause == "straggler" and not view.load.running:
        return
    is_calm = signal < rule.low or signal < spread.normal
    is_high = signal >= rule.high and signal >= spread.outlier
    if cause != "straggler" or state.since is not None:
        state.record(is_high, is_calm, now)
        return
    high_since = state.high_since if state.high_since is not None else now
    is_lasting = now - high_since >= max(STRAGGLER_S, STRAGGLER_STEPS * view.step_s)
    state.record(is_high and is_lasting, is_calm, now)
    state.high_since = high_since if is_high else None
    state.first_speed = view.speed
