"""Builds the view of each group from its newest load report, the dispatch ledger, the report's age and the group's relative
speed.

When more than half of the groups are stale, waiting for reports would stop the router: stale groups are then viewed by the
dispatch ledger alone (`is_blind`). Mean output lengths depend on the requests, not on the group, so all groups of a model share
their mean; otherwise a group that served long outputs would look expensive, get no requests and keep that mean.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import MAX_DEPTH
from phalanx_api.summary import Freshness
from phalanx_router.routing.ledger import DispatchLedger
from phalanx_router.routing.view import UNKNOWN, GroupView, freshness, is_stale

# Relative speed of groups with the same weights and layout, from the step models that they fit:
#     mean      mean of their coefficients
#     ratio_i   = t_i(work_i) / mean(work_i)            work_i: its own recent steps, where its fit is reliable
#     model     = mean * median of the ratios           shared by the shape
#     speed_i   = 1 + (ratio_i / median - 1) * 2^(-idle_i / HALF_S), or 1 within NOISE of 1
# A group with constant load cannot measure the cost of one more request, so its fit does not extrapolate; the mean of all groups
# does. A measured speed decays while the group is idle: otherwise a group that was slow once would get no requests and never be
# measured again. An unmeasured group gets speed 1 and the model of its shape, or `UNKNOWN` if its shape has no model.

TYPICAL_WORK = StepWork(prefill_tokens=128, decodes=16, context_tokens=16 * 512, prefill_context=128 * 64.0)
"""Work of a typical step, for a group that has not reported any."""
SPEED_HALF_LIFE_S = 10.0
NOISE = 1.15


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Step measurements of one group."""

    shape: Hashable
    # The group's own fit.
    model: StepModel | None
    # Mean work of its recent steps.
    work: StepWork = TYPICAL_WORK
    # Seconds since its last step.
    idle_s: float = 0.0


def relative_speeds(groups: Mapping[str, StepMeasurement]) -> dict[str, tuple[StepModel, float]]:
    """Returns for each group, by key, the model of its shape and its step time relative to that model."""
    shapes: dict[Hashable, dict[str, StepModel]] = {}
    for key, one in groups.items():
        if one.model is not None and one.model.predict(one.work) > 0:
            shapes.setdefault(one.shape, {})[key] = one.model
    found: dict[str, tuple[StepModel, float]] = {}
    usual: dict[Hashable, StepModel] = {}
    for shape, own in shapes.items():
        mean = mean_model(list(own.values()))
        ratios = {key: model.predict(groups[key].work) / mean.predict(groups[key].work) for key, model in own.items()}
        middle = median(ratios.values())
        usual[shape] = scale_model(mean, middle)
        for key, ratio in ratios.items():
            found[key] = usual[shape], decay_speed(ratio / middle, groups[key].idle_s)
    for key, one in groups.items():
        if key not in found:
            found[key] = usual.get(one.shape, UNKNOWN), 1.0
    return found


def mean_model(models: Sequence[StepModel]) -> StepModel:
    """Returns the mean of the coefficients, with the knee of the model that predicts best."""
    count, best = len(models), min(models, key=lambda model: model.error)
    return StepModel(
        fixed_s=sum(model.fixed_s for model in models) / count,
        token_s=sum(model.token_s for model in models) / count,
        knee_tokens=best.knee_tokens,
        context_s=sum(model.context_s for model in models) / count,
        attention_s=sum(model.attention_s for model in models) / count,
        error=best.error,
        row_s=sum(model.row_s for model in models) / count,
        prompt_s=sum(model.prompt_s for model in models) / count,
    )


def decay_speed(ratio: float, idle_s: float) -> float:
    """Returns the relative step time of a group that measured `ratio` and has been idle for `idle_s`."""
    speed = 1.0 + (ratio - 1.0) * 0.5 ** (idle_s / SPEED_HALF_LIFE_S)
    return 1.0 if 1 / NOISE < speed < NOISE else speed


def scale_model(model: StepModel, factor: float) -> StepModel:
    """Returns the model with every step time multiplied by `factor`."""
    return replace(
        model,
        fixed_s=model.fixed_s * factor,
        token_s=model.token_s * factor,
        context_s=model.context_s * factor,
        attention_s=model.attention_s * factor,
        row_s=model.row_s * factor,
        prompt_s=model.prompt_s * factor,
    )


SPEED_EVERY_S = 0.25
"""Interval of speed comparisons."""
FORGET_S = 10.0
"""A group that is not viewed for this long is forgotten."""
RECENT_S = 1.0
"""A preemption counts as recent for this long."""
EMPTY_LOAD = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=0)
NO_PREFIX = wire.HeavyPrefix(b"", 0, 0.0)
MIN_SPEEDUP, MAX_SPEEDUP = 0.5, MAX_DEPTH + 1.0
"""Bounds on a reported speedup: below the lower one the group would not speculate, the upper one is the maximum depth plus
one."""


@dataclass(slots=True, eq=False, kw_only=True)
class GroupReport:
    """Last reports of one group and its dispatch ledger."""

    key: str
    group: str = ""
    revision: str = ""
    served: wire.Served = field(default_factory=wire.Served)
    page_size: int = 16
    draining: bool = False
    load: wire.Load | None = None
    # When `load` was received.
    load_at: float = 0.0
    ledger: DispatchLedger = field(default_factory=DispatchLedger)
    preempted_at: float | None = None
    # Last report with running requests, and when it was received.
    busy: wire.Load | None = None
    busy_at: float = 0.0
    num_reports: int = 0

    def report(self, load: wire.Load, now: float) -> None:
        """Records a load report. A repeated report keeps the age of the first."""
        before = self.load
        if before is None or load.sequence != before.sequence:
            self.load_at = now
            if before is not None and load.preemptions > before.preemptions:
                self.preempted_at = now
        if load.running:
            self.busy, self.busy_at = load, now
        self.load = load
        self.num_reports += 1
        self.ledger.report(load.last_handle)

    def silent_s(self, now: float) -> float:
        """Returns for how long a report is overdue. A step in progress does not count: engines report between steps."""
        load = self.load
        since = self.load_at if load is not None and (load.running or load.waiting) else self.ledger.unseen_since()
        if since is None:
            return 0.0
        step_s = max(load.step_s, load.longest_step_s) if load is not None else 0.0
        return max(0.0, now - max(since, self.load_at) - step_s)

    def measured(self, now: float) -> StepMeasurement:
        """Returns the group's step measurements."""
        shape, model, busy = (self.served.model_hash, self.served.layout), self.model(), self.busy
        if busy is None:
            return StepMeasurement(shape, model)
        work = StepWork(int(busy.prompt_tokens_per_step), busy.running, busy.context_tokens)
        return StepMeasurement(shape, model, work, 0.0 if busy is self.load else now - self.busy_at)

    def model(self) -> StepModel | None:
        """Returns the group's own fit, once reported."""
        return StepModel.told(self.load.step_model) if self.load is not None else None


class GroupViewBuilder:
    """Builds views of groups and caches each until its inputs change.

    Speeds and mean outputs cover all groups viewed within `FORGET_S`.
    """

    def __init__(self) -> None:
        self.is_blind = False
        """Whether more than half of the groups were stale in the last call of `build`."""
        self._known: dict[str, GroupReport] = {}
        self._viewed: set[str] = set()
        """Keys viewed since `_forgot_at`."""
        self._forgot_at: float | None = None
        self._views: dict[str, tuple[tuple[object, ...], GroupView]] = {}
        self._speeds: dict[str, tuple[StepModel, float]] = {}
        self._speeds_at: float | None = None
        self._outputs: dict[str, float] = {}
        """Mean output tokens of recent requests, by model."""

    def build(self, groups: Sequence[GroupReport], now: float) -> list[GroupView]:
        """Returns the views of `groups`, in the same order."""
        for report in groups:
            self._known[report.key] = report
            self._viewed.add(report.key)
        self._forget(now)
        self._compare(groups, now)
        states = [freshness(report.silent_s(now)) for report in groups]
        stale = sum(map(is_stale, states))
        self.is_blind = stale * 2 > len(groups)
        return [self._view(report, state, now) for report, state in zip(groups, states, strict=True)]

    def _forget(self, now: float) -> None:
        """Forgets groups that were not viewed for `FORGET_S`, such as those of closed links."""
        if self._forgot_at is not None and now - self._forgot_at < FORGET_S:
            return
        self._forgot_at = now
        self._known = {key: report for key, report in self._known.items() if key in self._viewed}
        self._views = {key: kept for key, kept in self._views.items() if key in self._viewed}
        self._viewed = set()

    def _compare(self, groups: Sequence[GroupReport], now: float) -> None:
        """Compares speeds every `SPEED_EVERY_S`, and at once for a new group."""
        if self._speeds_at is not None and now - self._speeds_at < SPEED_EVERY_S and all(t.key in self._speeds for t in groups):
            return
        self._speeds_at = now
        known = self._known.values()
        found = relative_speeds({report.key: report.measured(now) for report in known})
        self._outputs = mean_outputs(known)
        before = self._speeds  # an equal entry stays the same object, so that `_view` finds its version unchanged
        self._speeds = {key: before[key] if before.get(key) == entry else entry for key, entry in found.items()}

    def _view(self, report: GroupReport, state: Freshness, now: float) -> GroupView:
        is_blind = self.is_blind and is_stale(state)
        preempted = report.preempted_at is not None and now - report.preempted_at < RECENT_S
        speed = self._speeds[report.key]
        output = self._outputs.get(report.served.model_hash, 0.0)
        version = (
            report.num_reports,
            report.ledger.version,
            speed,
            output,
            report.draining,
            report.served,
            state,
            is_blind,
            preempted,
        )
        kept = self._views.get(report.key)
        if kept is not None and kept[0] == version:
            return kept[1]
        view = make_view(report, state, *speed, mean_output_tokens=output, recently_preempted=preempted, is_blind=is_blind)
        self._views[report.key] = (version, view)
        return view


def mean_outputs(groups: Iterable[GroupReport]) -> dict[str, float]:
    """Returns the mean output tokens of recent requests, by model, over the groups that reported a mean."""
    found: dict[str, list[float]] = {}
    for group in groups:
        if group.load is not None and group.load.mean_output_tokens:
            found.setdefault(group.served.model_hash, []).append(group.load.mean_output_tokens)
    return {model: sum(values) / len(values) for model, values in found.items()}


def make_view(
    report: GroupReport,
    state: Freshness = "fresh",
    model: StepModel = UNKNOWN,
    speed: float = 1.0,
    *,
    mean_output_tokens: float = 0.0,
    recently_preempted: bool = False,
    is_blind: bool = False,
) -> GroupView:
    """Builds the view of a group. With `is_blind` its load comes from the dispatch ledger, only its capacity from the report."""
    load, unseen, live = report.load or EMPTY_LOAD, report.ledger.unseen, report.ledger.live
    seen, added = (EMPTY_LOAD, live) if is_blind else (load, unseen)
    used, needed = _page_counts(load, report.ledger, is_blind)
    heaviest = max(seen.prefixes, key=lambda prefix: prefix.token_share, default=NO_PREFIX)
    return GroupView(
        key=report.key,
        group=report.group,
        revision=report.revision,
        model_hash=report.served.model_hash,
        layout=report.served.layout,
        state=state,
        draining=report.draining,
        model=model,
        speed=speed,
        room=load.max_num_batched_tokens or 2048,
        waiting=seen.waiting,
        running=seen.running + added.requests,
        queued_prompt_tokens=seen.waiting_prompt_tokens + seen.running_prompt_tokens + unseen.prompt_tokens,
        queued_attended=max(0.0, seen.prompt_attended + unseen.attended),
        context_tokens=seen.context_tokens + added.context_tokens,
        prompt_tokens_per_step=seen.prompt_tokens_per_step,
        mean_output_tokens=mean_output_tokens,
        total_pages=max(1, load.total_pages),
        page_size=report.page_size,
        used_pages=used,
        reserved_pages=seen.reserved_pages,
        demand_pages=needed,
        recently_preempted=recently_preempted and not is_blind,
        steps_to_full=seen.steps_to_full,
        outstanding_tokens=seen.outstanding_tokens + added.prompt_tokens + added.output_tokens,
        page_bytes=report.served.page_bytes,
        prefix_share=heaviest.token_share,
        prefix=heaviest.key,
        prefix_tokens=heaviest.pages * report.page_size,
        unseen=unseen.requests,
        max_num_seqs=load.max_num_seqs,
        is_known=report.load is not None,
        speedup=min(max(seen.speedup, MIN_SPEEDUP), MAX_SPEEDUP),
    )


def _page_counts(load: wire.Load, ledger: DispatchLedger, is_blind: bool) -> tuple[int, int]:
    """Returns the pages that running requests hold and those that waiting requests need; 0 while the pool size is unknown."""
    if not load.total_pages:
        return 0, 0
    if is_blind:
        return ledger.live.pages, 0
    return load.total_pages - load.free_pages - load.reserved_pages, load.waiting_pages + ledger.unseen.pages
