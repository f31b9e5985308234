"""Builds group views from load reports, the dispatch ledger, report ages and relative speeds.

When more than half of the groups are stale, a stale group is viewed by its dispatch ledger alone. All groups of a model share
their mean output length: otherwise a group that served long outputs would look expensive, get no requests and keep that mean.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import MAX_DEPTH
from phalanx_api.summary import Freshness
from phalanx_router.routing.ledger import DispatchLedger, SentRequest, ShortestTime, make_sent_request
from phalanx_router.routing.view import NO_PREFIX, UNKNOWN, GroupCapacity, GroupLoad, GroupView, freshness, is_stale

# Relative speed of groups with equal weights and layout (a shape), from the step models that they fit:
#     mean      mean of the coefficients
#     ratio_i   = t_i(work_i) / mean(work_i)            work_i: own recent steps, where the own fit is reliable
#     usual     lower median of the ratios: of two groups, the faster one is usual
#     model     = mean * usual                          shared by the shape
#     slow_i    = ratio_i / usual; of two groups at most t_i / t_usual at the usual group's work, or 1: fits of different work may
#               disagree, and no third one decides
#     speed_i   = 1 + (slow_i - 1) * 2^(-idle_i / half-life), or 1 within NOISE of 1
# Under constant load a group's own fit does not extrapolate; the mean does. The decay lets a slow group be measured again.

TYPICAL_WORK = StepWork(prefill_tokens=128, decodes=16, context_tokens=16 * 512, prefill_context=128 * 64.0)
"""Before a report."""
SPEED_HALF_LIFE_S = 10.0
NOISE = 1.15


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Step measurements of one group."""

    shape: Hashable
    model: StepModel | None  # the group's own fit
    work: StepWork = TYPICAL_WORK  # mean of its recent steps
    idle_s: float = 0.0  # since its last step


def relative_speeds(groups: Mapping[str, StepMeasurement]) -> dict[str, tuple[StepModel, float]]:
    """Shape model and relative step time, by group key."""
    shapes: dict[Hashable, dict[str, StepModel]] = {}
    for key, measurement in groups.items():
        if measurement.model is not None and measurement.model.predict(measurement.work) > 0:
            shapes.setdefault(measurement.shape, {})[key] = measurement.model
    speeds: dict[str, tuple[StepModel, float]] = {}
    shape_models: dict[Hashable, StepModel] = {}
    for shape, models in shapes.items():
        mean = mean_model(list(models.values()))
        ratios = {key: model.predict(groups[key].work) / mean.predict(groups[key].work) for key, model in models.items()}
        usual = median_low(ratios.values())
        shape_models[shape] = scale_model(mean, usual)
        for key, ratio in ratios.items():
            slow = ratio / usual
            if len(ratios) == 2:
                usual_key = min(ratios, key=lambda key: ratios[key])
                slow = min(slow, _slow_at(groups[usual_key].work, models[key], models[usual_key]))
            speeds[key] = shape_models[shape], decay_speed(slow, groups[key].idle_s)
    for key, measurement in groups.items():
        if key not in speeds:
            speeds[key] = shape_models.get(measurement.shape, UNKNOWN), 1.0
    return speeds


def _slow_at(work: StepWork, model: StepModel, usual: StepModel) -> float:
    """Relative step time of two fits at the same work, at least 1."""
    return max(1.0, model.predict(work) / usual.predict(work))


def mean_model(models: Sequence[StepModel]) -> StepModel:
    """Mean of the coefficients, with the best model's knee."""
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
    """Relative step time after `idle_s` without a measurement."""
    speed = 1.0 + (ratio - 1.0) * 0.5 ** (idle_s / SPEED_HALF_LIFE_S)
    return 1.0 if 1 / NOISE < speed < NOISE else speed


def scale_model(model: StepModel, factor: float) -> StepModel:
    """Multiplies every step time."""
    return replace(
        model,
        fixed_s=model.fixed_s * factor,
        token_s=model.token_s * factor,
        context_s=model.context_s * factor,
        attention_s=model.attention_s * factor,
        row_s=model.row_s * factor,
        prompt_s=model.prompt_s * factor,
    )


COMPARE_INTERVAL_S = 0.25
FORGET_AFTER_S = 10.0
RECENT_PREEMPTION_S = 1.0
EMPTY_LOAD = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=0)
MIN_SPEEDUP, MAX_SPEEDUP = 0.5, MAX_DEPTH + 1.0
"""The maximum accepts every draft token."""


@dataclass(slots=True, eq=False, kw_only=True)
class GroupReport:
    """Last reports of one group and its dispatch ledger."""

    key: str
    group: str = ""
    revision: str = ""
    served: wire.Served = field(default_factory=wire.Served)
    page_size: int = 16
    is_draining: bool = False
    load: wire.Load | None = None
    load_at: float = 0.0  # when `load` was received
    busy_load: wire.Load | None = None  # last report with running requests
    busy_at: float = 0.0
    preempted_at: float | None = None
    num_reports: int = 0
    last_turn: int = 0  # number of the group's last request, of all that this router has sent; 0: none
    ledger: DispatchLedger = field(default_factory=DispatchLedger)
    delay: ShortestTime = field(default_factory=ShortestTime)  # of the link, in both directions
    behind: ShortestTime = field(default_factory=ShortestTime)  # the leader's Unix clock behind this router's, plus the delay
    _model: StepModel | None = None  # of `_model_load`: an idle group's report stays the same
    _model_load: wire.Load | None = None

    def sent(self, request: wire.Request, hit_tokens: int = 0) -> SentRequest:
        """Load that a request adds to the group, which has `hit_tokens` of its tokens."""
        return make_sent_request(request, self.page_size, hit_tokens, 0 if self.load is None else self.load.max_request_pages)

    def record(self, load: wire.Load, now: float, unix_s: float = 0.0) -> bool:
        """Records a load report. Returns false if an idle group repeats its last one, which keeps its age.

        `unix_s`: Unix time of its arrival; 0: unknown.
        """
        before = self.load
        if before is not None and load.unix_s and unix_s and load.unix_s != before.unix_s:  # neither repeated nor of unknown age
            self.behind.add(unix_s - load.unix_s, now)
        if not (load.running or load.waiting) and (load is before or load == before):
            return False
        if before is None or load.sequence != before.sequence:
            self.load_at = now
            if before is not None and load.preemptions > before.preemptions:
                self.preempted_at = now
        if load.running:
            self.busy_load, self.busy_at = load, now
        self.load = load
        self.num_reports += 1
        self.ledger.report(load.last_handle)
        return True

    def overdue_s(self, now: float) -> float:
        """Seconds by which a report is overdue. Engines report between steps."""
        load = self.load
        since = self.load_at if load is not None and (load.running or load.waiting) else self.ledger.unreported_since()
        if since is None:
            return 0.0
        return max(0.0, now - max(since, self.load_at) - self.longest_step_s)

    @property
    def longest_step_s(self) -> float:
        """Longest recent step of the group; 0 before its first load report."""
        return max(self.load.step_s, self.load.longest_step_s) if self.load is not None else 0.0

    def _read_model(self) -> StepModel | None:
        if self.load is not self._model_load:
            self._model_load = self.load
            self._model = StepModel.from_coefficients(self.load.step_model) if self.load is not None else None
        return self._model

    def measurement(self, now: float) -> StepMeasurement:
        """Step measurements of the group."""
        shape, busy = (self.served.model_hash, self.served.layout), self.busy_load
        model = self._read_model()
        if busy is None:
            return StepMeasurement(shape, model)
        work = StepWork(int(busy.prompt_tokens_per_step), busy.running, busy.context_tokens)
        return StepMeasurement(shape, model, work, 0.0 if busy is self.load else now - self.busy_at)


class GroupViewBuilder:
    """Builds views and caches each until its inputs change."""

    def __init__(self) -> None:
        self.is_blind = False  # more than half of the groups were stale
        self._reports: dict[str, GroupReport] = {}
        self._viewed: set[str] = set()  # since `_forgot_at`
        self._forgot_at: float | None = None
        self._views: dict[str, tuple[tuple[object, ...], GroupView]] = {}
        self._speeds: dict[str, tuple[StepModel, float]] = {}
        self._compared_at: float | None = None
        self._compared: list[tuple[GroupReport, int, wire.Served]] = []
        """Reports of that time, with their numbers."""
        self._mean_outputs: dict[str, float] = {}

    def build(self, groups: Sequence[GroupReport], now: float) -> list[GroupView]:
        """Views of `groups`, in the same order."""
        for report in groups:
            self._reports[report.key] = report
            self._viewed.add(report.key)
        self._forget(now)
        self._compare(groups, now)
        states = [freshness(report.overdue_s(now)) for report in groups]
        stale = sum(map(is_stale, states))
        self.is_blind = stale * 2 > len(groups)
        return [self._view(report, state, now) for report, state in zip(groups, states, strict=True)]

    def _forget(self, now: float) -> None:
        if self._forgot_at is not None and now - self._forgot_at < FORGET_AFTER_S:
            return
        self._forgot_at = now
        self._reports = {key: report for key, report in self._reports.items() if key in self._viewed}
        self._views = {key: entry for key, entry in self._views.items() if key in self._viewed}
        self._viewed = set()

    def _compare(self, groups: Sequence[GroupReport], now: float) -> None:
        is_recent = self._compared_at is not None and now - self._compared_at < COMPARE_INTERVAL_S
        if is_recent and all(report.key in self._speeds for report in groups):
            return
        self._compared_at = now
        reports = self._reports.values()
        compared = [(report, report.num_reports, report.served) for report in reports]
        if compared == self._compared and all(speed == 1.0 for _, speed in self._speeds.values()):
            return  # of idle groups nothing changes, as speeds decay to 1
        self._compared = compared
        speeds = relative_speeds({report.key: report.measurement(now) for report in reports})
        self._mean_outputs = mean_outputs(reports)
        before = self._speeds  # an equal entry stays the same object, so `_view` compares it by identity
        self._speeds = {key: before[key] if before.get(key) == entry else entry for key, entry in speeds.items()}

    def _view(self, report: GroupReport, state: Freshness, now: float) -> GroupView:
        is_blind = self.is_blind and is_stale(state)
        has_preempted = report.preempted_at is not None and now - report.preempted_at < RECENT_PREEMPTION_S
        speed = self._speeds[report.key]
        output_tokens = self._mean_outputs.get(report.served.model_hash, 0.0)
        version = (
            report.num_reports,
            report.ledger.version,
            speed,
            output_tokens,
            report.is_draining,
            report.served,
            state,
            is_blind,
            has_preempted,
        )
        cached = self._views.get(report.key)
        if cached is not None and cached[0] == version:
            return cached[1]
        view = make_view(
            report, state, *speed, mean_output_tokens=output_tokens, has_recent_preemption=has_preempted, is_blind=is_blind
        )
        self._views[report.key] = (version, view)
        return view


def mean_outputs(groups: Iterable[GroupReport]) -> dict[str, float]:
    """Mean output tokens of recent requests, by model hash."""
    means: dict[str, list[float]] = {}
    for group in groups:
        if group.load is not None and group.load.mean_output_tokens:
            means.setdefault(group.served.model_hash, []).append(group.load.mean_output_tokens)
    return {model: sum(values) / len(values) for model, values in means.items()}


def make_view(
    report: GroupReport,
    state: Freshness = "fresh",
    step_model: StepModel = UNKNOWN,
    speed: float = 1.0,
    *,
    mean_output_tokens: float = 0.0,
    has_recent_preemption: bool = False,
    is_blind: bool = False,
) -> GroupView:
    """Builds a view. With `is_blind` its load comes from the dispatch ledger."""
    load = report.load or EMPTY_LOAD
    return GroupView(
        key=report.key,
        group=report.group,
        revision=report.revision,
        model_hash=report.served.model_hash,
        page_model=report.served.page_model,
        layout=report.served.layout,
        state=state,
        is_draining=report.is_draining,
        has_report=report.load is not None,
        has_recent_preemption=has_recent_preemption and not is_blind,
        step_model=step_model,
        speed=speed,
        mean_output_tokens=mean_output_tokens,
        capacity=GroupCapacity(
            total_pages=max(1, load.total_pages),
            page_size=report.page_size,
            page_bytes=report.served.page_bytes,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens or 2048,
            max_request_pages=load.max_request_pages,
            disk_page_s=load.disk_read_page_s,
        ),
        load=_group_load(load, report.ledger, is_blind),
    )


def _group_load(load: wire.Load, ledger: DispatchLedger, is_blind: bool) -> GroupLoad:
    unreported = ledger.unreported
    reported, added = (EMPTY_LOAD, ledger.live) if is_blind else (load, unreported)
    used, demand = _page_counts(load, ledger, is_blind)
    return GroupLoad(
        waiting=reported.waiting,
        running=reported.running + added.requests,
        unreported=unreported.requests,
        queued_prompt_tokens=reported.waiting_prompt_tokens + reported.running_prompt_tokens + unreported.prompt_tokens,
        queued_attention=max(0.0, reported.prompt_attention + unreported.attention),
        context_tokens=reported.context_tokens + added.context_tokens,
        prompt_tokens_per_step=reported.prompt_tokens_per_step,
        speedup=min(max(reported.speedup, MIN_SPEEDUP), MAX_SPEEDUP),
        used_pages=used,
        reserved_pages=reported.reserved_pages,
        demand_pages=demand,
        steps_to_full=reported.steps_to_full,
        hot_prefix=max(reported.prefixes, key=lambda prefix: prefix.token_share, default=NO_PREFIX),
    )


def _page_counts(load: wire.Load, ledger: DispatchLedger, is_blind: bool) -> tuple[int, int]:
    if not load.total_pages:
        return 0, 0
    if is_blind:
        return ledger.live.pages, 0
    return load.total_pages - load.free_pages - load.reserved_pages, load.waiting_pages + ledger.unreported.pages
