"""Finds hotspots: compares signals with thresholds and with the other groups, with hysteresis.

    enter  z >= high  and  z >= median + max(delta, 3 * 1.4826 * MAD)      in 2 of the last 3 ticks
    exit   z < low    or   z < median + delta / 2                          in 4 ticks in a row

With up to three groups the minimum replaces median and spread. `full` enters at once, a straggler after 10 s and 50 steps.
The fleet is saturated if most groups exceed `high` for one load or all miss the TTFT target; moves between groups do not help
then. A group without a fresh report keeps its state. So does an idle straggler, because its speed is not measured. Source:
balancing.md 3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx_api.summary import Cause
from phalanx_router.balancing.targets import copy_s
from phalanx_router.routing.view import GroupView

# Signal of each cause; 0 if its target is not set:
#     kv         page pressure, or 1 after a preemption in the last second
#     prefill    backlog_s / TTFT target
#     decode     itl_s / ITL target
#     prefix     share of the heaviest prefix, if one of the above reaches its `low`
#     straggler  measured slowness
#     full       twice the copy time of a mean request, over the time until the page pool is exhausted
# Source: balancing.md 3.3.

RESCUE_SLACK_S = 0.1


@dataclass(frozen=True, slots=True)
class Threshold:
    """Hysteresis of a signal: enters at `high`, leaves below `low`; `delta` is the minimum distance from the other groups."""

    high: float
    low: float
    delta: float


THRESHOLDS: Mapping[Cause, Threshold] = {
    "kv": Threshold(0.85, 0.75, 0.10),
    "prefill": Threshold(0.5, 0.25, 0.2),
    "decode": Threshold(0.90, 0.75, 0.15),
    "prefix": Threshold(0.30, 0.15, 0.15),
    "straggler": Threshold(1.30, 1.15, 0.15),
    "full": Threshold(1.0, 1.0, 0.0),
}
LOADS: tuple[Cause, ...] = ("kv", "prefill", "decode")
"""Causes that measure load. The fleet is saturated when most groups have one of them."""
PRECEDENCE: tuple[Cause, ...] = ("straggler", "prefix", "full")
"""Causes that take precedence, in this order: the first two explain other causes, the last one is urgent."""


@dataclass(frozen=True, slots=True)
class HotspotTargets:
    """Latency targets; `None` is no target."""

    ttft_s: float | None = None
    itl_s: float | None = None


def signals(view: GroupView, targets: HotspotTargets) -> dict[Cause, float]:
    """Returns the signal of each cause in this group."""
    found: dict[Cause, float] = {
        "kv": max(view.pressure, 1.0 if view.recently_preempted else 0.0),
        "prefill": view.backlog_s / targets.ttft_s if targets.ttft_s else 0.0,
        "decode": view.itl_s / targets.itl_s if targets.itl_s and view.running else 0.0,
        "straggler": view.speed,
        "full": _urgency(view),
    }
    is_loaded = any(found[cause] >= THRESHOLDS[cause].low for cause in LOADS)
    return found | {"prefix": view.prefix_share if is_loaded else 0.0}


def _urgency(view: GroupView) -> float:
    """Returns 1 or more if there is just time left to move a mean request before the page pool is exhausted."""
    if view.steps_to_full is None or not view.running:
        return 0.0
    needed_s = 2 * copy_s(view.context_tokens / view.running, view, view.copy_bytes_per_s) + RESCUE_SLACK_S
    return needed_s / max(view.steps_to_full * view.itl_s, 1e-6)


def select_primary(found: Mapping[Cause, float]) -> Cause:
    """Returns the main cause in `found`. Raises ValueError if it is empty."""
    for cause in PRECEDENCE:
        if cause in found:
            return cause
    return max(found, key=lambda cause: (found[cause] - THRESHOLDS[cause].high) / (1 - THRESHOLDS[cause].low))


ENTER, OF_LAST, EXIT = 2, 3, 4
SIGMAS = 3 * 1.4826
SMALL_FLEET = 3
SLOW_S, SLOW_STEPS = 10.0, 50
RISING = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class HotGroup:
    """A hotspot. `causes`: signal of each active cause. `speed_rises`: slower than when it became a straggler."""

    key: str
    group: str
    cause: Cause
    causes: dict[Cause, float]
    median: float
    since: float
    speed_rises: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """A group became a hotspot, changed its cause, or is no longer a hotspot (`cause=None`)."""

    group: str
    cause: Cause | None
    why: str


@dataclass(frozen=True, slots=True)
class HotspotReport:
    """The result of one tick."""

    hot: dict[str, HotGroup]
    transitions: list[Transition]
    is_saturated: bool


@dataclass(slots=True, kw_only=True)
class _CauseTimer:
    """The state of one cause in one group. `over_since`: start of the current uninterrupted excess of the signal."""

    recent: list[bool] = field(default_factory=list)
    calm: int = 0
    since: float | None = None
    over_since: float | None = None
    first: float = 0.0

    def see(self, is_over: bool, is_calm: bool, now: float, is_urgent: bool = False) -> None:
        """Records one tick."""
        self.recent = [*self.recent[1 - OF_LAST :], is_over]
        self.calm = self.calm + 1 if is_calm else 0
        self.over_since = (self.over_since if self.over_since is not None else now) if is_over else None
        if self.since is None and (sum(self.recent) >= ENTER or (is_over and is_urgent)):
            self.since, self.calm = now, 0
        elif self.since is not None and self.calm >= EXIT:
            self.since, self.recent = None, []


@dataclass(frozen=True, slots=True)
class _SignalSpread:
    """The distribution of one signal over the groups: values from `far` on are outliers, values below `close` are normal."""

    centre: float
    far: float
    close: float

    @staticmethod
    def of(values: Sequence[float], threshold: Threshold) -> "_SignalSpread":
        """Returns the distribution of `values`, which must not be empty."""
        if len(values) <= SMALL_FLEET:
            least = min(values)
            return _SignalSpread(median(values), least + threshold.delta, least + threshold.delta / 2)
        middle = median(values)
        spread = median(abs(value - middle) for value in values)
        return _SignalSpread(middle, middle + max(threshold.delta, SIGMAS * spread), middle + threshold.delta / 2)


class HotspotBook:
    """Tracks all groups, by the keys of their views, from tick to tick."""

    def __init__(self) -> None:
        self._watches: dict[str, dict[Cause, _CauseTimer]] = {}
        self._shown: dict[str, HotGroup] = {}
        self._saturation = _CauseTimer()

    def tick(self, views: Sequence[GroupView], targets: HotspotTargets, now: float) -> HotspotReport:
        """Evaluates all groups, every 250 ms. `views` must not contain groups that are being emptied."""
        fresh = [view for view in views if view.state == "fresh"]
        found = {view.key: signals(view, targets) for view in fresh}
        fields = (
            {cause: _SignalSpread.of([z[cause] for z in found.values()], THRESHOLDS[cause]) for cause in THRESHOLDS}
            if found
            else {}
        )
        self._watches = {view.key: self._watches.get(view.key) or _watches() for view in views}
        for view in fresh:
            for cause, watch in self._watches[view.key].items():
                _see(view, cause, watch, found[view.key][cause], spread=fields[cause], now=now)
        self._see_saturation(fresh, found, targets, now)
        hot = {view.key: group for view in views if (group := self._hot(view, found, fields)) is not None}
        transitions = self._changes(hot)
        self._shown = hot
        return HotspotReport(hot, transitions, self._saturation.since is not None)

    def _see_saturation(
        self, fresh: Sequence[GroupView], found: dict[str, dict[Cause, float]], targets: HotspotTargets, now: float
    ) -> None:
        most = max((sum(z[cause] >= THRESHOLDS[cause].high for z in found.values()) for cause in LOADS), default=0)
        all_late = bool(targets.ttft_s) and all(view.backlog_s > (targets.ttft_s or 0.0) for view in fresh)
        is_over = bool(fresh) and (2 * most > len(fresh) or all_late)
        self._saturation.see(is_over, not is_over, now)

    def _hot(self, view: GroupView, found: dict[str, dict[Cause, float]], fields: dict[Cause, _SignalSpread]) -> HotGroup | None:
        watches = self._watches[view.key]
        before = self._shown.get(view.key)
        if view.key not in found:
            return before
        causes = {cause: found[view.key][cause] for cause, watch in watches.items() if watch.since is not None}
        if not causes:
            return None
        cause = select_primary(causes)
        since = min(watch.since for watch in watches.values() if watch.since is not None)
        slow = watches["straggler"]
        rises = slow.since is not None and view.speed >= slow.first + RISING
        return HotGroup(
            key=view.key,
            group=view.group or view.key,
            cause=cause,
            causes=causes,
            median=fields[cause].centre,
            since=since,
            speed_rises=rises,
        )

    def _changes(self, hot: dict[str, HotGroup]) -> list[Transition]:
        transitions = []
        for key, group in hot.items():
            before = self._shown.get(key)
            if before is None or before.cause != group.cause:
                signal = group.causes[group.cause]
                transitions.append(Transition(group.group, group.cause, f"{group.cause} {signal:.2f}, median {group.median:.2f}"))
        for key, group in self._shown.items():
            if key not in hot:
                left = "has left the hotspot range" if key in self._watches else "was removed or is being emptied"
                transitions.append(Transition(group.group, None, f"the group {left}"))
        return transitions


def _watches() -> dict[Cause, _CauseTimer]:
    return {cause: _CauseTimer() for cause in THRESHOLDS}


def _see(view: GroupView, cause: Cause, watch: _CauseTimer, signal: float, spread: _SignalSpread, now: float) -> None:
    threshold = THRESHOLDS[cause]
    if cause == "full":
        watch.see(signal >= threshold.high, signal < threshold.low, now, is_urgent=True)
        return
    if cause == "straggler" and not view.running:
        return
    is_calm = signal < threshold.low or signal < spread.close
    is_over = signal >= threshold.high and signal >= spread.far
    if cause != "straggler" or watch.since is not None:
        watch.see(is_over, is_calm, now)
        return
    began = watch.over_since if watch.over_since is not None else now
    lasts = now - began >= max(SLOW_S, SLOW_STEPS * view.step_s)
    watch.see(is_over and lasts, is_calm, now)
    watch.over_since = began if is_over else None
    watch.first = view.speed
