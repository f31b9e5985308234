"""Which groups are hotspots: signals against thresholds and against the other groups, with hysteresis.

    enter  z >= high  and  z >= median + max(delta, 3 * 1.4826 * MAD)      in 2 of the last 3 ticks
    exit   z < low    or   z < median + delta / 2                          in 4 ticks in a row

With three groups or fewer the distance is that from the least one. `full` enters at once, a straggler after 10 s and 50 steps.
Most groups above `high` for one load, or none that keeps its target: the fleet is saturated, and moves help nobody.
Groups without a fresh report keep the state they had; so does a straggler that has nothing to do, for it shows no speed.
Source: balancing.md 3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx_api.summary import Cause
from phalanx_router.balancing.targets import copy_s
from phalanx_router.routing.view import GroupView

# The six causes of a hotspot: the signal of each, and from where on it counts.
#     kv         pressure, or a preemption in the last second     prefill    backlog_s / target of the time to the first token
# decode     itl_s / target of the time between tokens     prefix     share of the heaviest prefix, when the group also has
# much of one of the above     straggler  measured speed     full       time that a copy needs, twice, over time until no page
# is free
# A cause whose target nobody set has signal 0. Source: balancing.md 3.3.

RESCUE_SLACK_S = 0.1


@dataclass(frozen=True, slots=True)
class Threshold:
    """A signal from `high` on is trouble, below `low` it is over; `delta` is the least distance from the other groups."""

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
"""Causes that say how much a group has to do. When most groups have one, the fleet is saturated."""
EXPLAIN: tuple[Cause, ...] = ("straggler", "prefix", "full")
"""Causes that come before all others, in this order: the first two are the reason for the others, the last one is urgent."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients are promised; None is nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None


def signals(view: GroupView, targets: Targets) -> dict[Cause, float]:
    """The signal of each cause in this group."""
    found: dict[Cause, float] = {
        "kv": max(view.pressure, 1.0 if view.preempted_lately else 0.0),
        "prefill": view.backlog_s / targets.ttft_s if targets.ttft_s else 0.0,
        "decode": view.itl_s / targets.itl_s if targets.itl_s and view.running else 0.0,
        "straggler": view.speed,
        "full": _urgency(view),
    }
    is_loaded = any(found[cause] >= THRESHOLDS[cause].low for cause in LOADS)
    return found | {"prefix": view.prefix_share if is_loaded else 0.0}


def _urgency(view: GroupView) -> float:
    """From 1 on there is just time left to copy a request of mean length elsewhere before the pages run out."""
    if view.steps_to_full is None or not view.running:
        return 0.0
    needed_s = 2 * copy_s(view.context_tokens / view.running, view, view.copy_bytes_per_s) + RESCUE_SLACK_S
    return needed_s / max(view.steps_to_full * view.itl_s, 1e-6)


def primary(found: Mapping[Cause, float]) -> Cause:
    """The main one of these causes. Raises ValueError without any."""
    for cause in EXPLAIN:
        if cause in found:
            return cause
    return max(found, key=lambda cause: (found[cause] - THRESHOLDS[cause].high) / (1 - THRESHOLDS[cause].low))


ENTER, OF_LAST, EXIT = 2, 3, 4
SIGMAS = 3 * 1.4826
FEW = 3
SLOW_S, SLOW_STEPS = 10.0, 50
RISING = 0.15


@dataclass(frozen=True, slots=True)
class HotGroup:
    """A hotspot. `causes`: the signal of each cause that holds. `speed_rises`: it is slower than when it became a straggler."""

    key: str
    group: str
    cause: Cause
    causes: dict[Cause, float]
    median: float
    since: float
    speed_rises: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """A group became a hotspot, is one for another cause, or no longer (None)."""

    group: str
    cause: Cause | None
    why: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What one tick found."""

    hot: dict[str, HotGroup]
    transitions: list[Transition]
    is_saturated: bool


@dataclass(slots=True)
class _Watch:
    """One cause in one group. `over_since`: since when the signal has been high without a pause."""

    recent: list[bool] = field(default_factory=list)
    calm: int = 0
    since: float | None = None
    over_since: float | None = None
    first: float = 0.0

    def see(self, is_over: bool, is_calm: bool, now: float, is_urgent: bool = False) -> None:
        """Takes one tick in."""
        self.recent = [*self.recent[1 - OF_LAST :], is_over]
        self.calm = self.calm + 1 if is_calm else 0
        self.over_since = (self.over_since if self.over_since is not None else now) if is_over else None
        if self.since is None and (sum(self.recent) >= ENTER or (is_over and is_urgent)):
            self.since, self.calm = now, 0
        elif self.since is not None and self.calm >= EXIT:
            self.since, self.recent = None, []


@dataclass(frozen=True, slots=True)
class _Field:
    """How one signal is spread over the groups that are judged: what is far from the others, and what is close."""

    centre: float
    far: float
    close: float

    @staticmethod
    def of(values: Sequence[float], threshold: Threshold) -> "_Field":
        """Of these values."""
        if len(values) <= FEW:
            least = min(values)
            return _Field(median(values), least + threshold.delta, least + threshold.delta / 2)
        middle = median(values)
        spread = median(abs(value - middle) for value in values)
        return _Field(middle, middle + max(threshold.delta, SIGMAS * spread), middle + threshold.delta / 2)


class HotspotBook:
    """Follows all groups from tick to tick. Groups are known by the keys of their views."""

    def __init__(self) -> None:
        self._watches: dict[str, dict[Cause, _Watch]] = {}
        self._shown: dict[str, HotGroup] = {}
        self._saturation = _Watch()

    def tick(self, views: Sequence[GroupView], targets: Targets, now: float) -> Seen:
        """One look, every 250 ms. Leave groups out that are being emptied: they are no hotspots."""
        fresh = [view for view in views if view.state == "fresh"]
        found = {view.key: signals(view, targets) for view in fresh}
        fields = (
            {cause: _Field.of([z[cause] for z in found.values()], THRESHOLDS[cause]) for cause in THRESHOLDS} if found else {}
        )
        self._watches = {view.key: self._watches.get(view.key) or _watches() for view in views}
        for view in fresh:
            for cause, watch in self._watches[view.key].items():
                _see(view, cause, watch, found[view.key][cause], fields[cause], now)
        self._see_saturation(fresh, found, targets, now)
        hot = {view.key: group for view in views if (group := self._hot(view, found, fields)) is not None}
        transitions = self._changes(hot)
        self._shown = hot
        return Seen(hot, transitions, self._saturation.since is not None)

    def _see_saturation(
        self, fresh: Sequence[GroupView], found: dict[str, dict[Cause, float]], targets: Targets, now: float
    ) -> None:
        most = max((sum(z[cause] >= THRESHOLDS[cause].high for z in found.values()) for cause in LOADS), default=0)
        all_late = bool(targets.ttft_s) and all(view.backlog_s > (targets.ttft_s or 0.0) for view in fresh)
        is_over = bool(fresh) and (2 * most > len(fresh) or all_late)
        self._saturation.see(is_over, not is_over, now)

    def _hot(self, view: GroupView, found: dict[str, dict[Cause, float]], fields: dict[Cause, _Field]) -> HotGroup | None:
        watches = self._watches[view.key]
        before = self._shown.get(view.key)
        if view.key not in found:
            return before
        causes = {cause: found[view.key][cause] for cause, watch in watches.items() if watch.since is not None}
        if not causes:
            return None
        cause = primary(causes)
        since = min(watch.since for watch in watches.values() if watch.since is not None)
        slow = watches["straggler"]
        rises = slow.since is not None and view.speed >= slow.first + RISING
        return HotGroup(view.key, view.group or view.key, cause, causes, fields[cause].centre, since, rises)

    def _changes(self, hot: dict[str, HotGroup]) -> list[Transition]:
        told = []
        for key, group in hot.items():
            before = self._shown.get(key)
            if before is None or before.cause != group.cause:
                signal = group.causes[group.cause]
                told.append(Transition(group.group, group.cause, f"{group.cause} {signal:.2f}, median {group.median:.2f}"))
        for key, group in self._shown.items():
            if key not in hot:
                left = "is back with the others" if key in self._watches else "is no longer there, or is being emptied"
                told.append(Transition(group.group, None, f"the group {left}"))
        return told


def _watches() -> dict[Cause, _Watch]:
    return {cause: _Watch() for cause in THRESHOLDS}


def _see(view: GroupView, cause: Cause, watch: _Watch, signal: float, spread: _Field, now: float) -> None:
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
