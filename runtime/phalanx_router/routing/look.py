"""All groups as of now, from what links were told: the newest report of each, what was sent there since, its age and its speed.

When more than half of the groups are stale, reports no longer tell who has room, and a router that waited for them would halt:
stale groups are then seen by the ledger alone, what this router itself has there (`is_blind`).
How long outputs are depends on the requests, not on the group that had them: all groups of a model get the mean of what they
told. With each its own, a group that had long ones would look dear, get no others, and so stay empty for ever.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import MAX_DEPTH
from phalanx_api.summary import Freshness
from phalanx_router.routing.ledger import Ledger
from phalanx_router.routing.view import UNKNOWN, GroupView, freshness, is_stale

# How fast each group is beside those of the same weights and layout, from the step models that they fitted themselves.
#     usual     mean of their coefficients     ratio_i   = t_i(work_i) / usual(work_i)           work_i: its own steps lately,
# where its own fit is sound     model     = usual * median of the ratios           one for the shape     speed_i   = 1 +
# (ratio_i / median - 1) * 2^(-idle_i / HALF_S), 1 when that is within NOISE of 1
# A group that always had as much to do cannot tell what one request more costs there, so its own fit says little of another
# load; those of all groups together say more. What was measured of a group fades while it has nothing to do: were it kept, a
# group that was slow once would get no requests, and so never show that it no longer is. A group that has not measured yet is
# taken for a usual one of its shape; alone of its shape, for `UNKNOWN`.

REFERENCE = StepWork(prefill_tokens=128, decodes=16, context_tokens=16 * 512, prefill_context=128 * 64.0)
"""A step with some of everything: that of a group that has not told of any."""
HALF_S = 10.0
NOISE = 1.15


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a group's steps: its shape, its own fit, what its steps held lately, and since when there are none."""

    shape: Hashable
    model: StepModel | None
    work: StepWork = REFERENCE
    idle_s: float = 0.0


def speeds(groups: Mapping[str, Measured]) -> dict[str, tuple[StepModel, float]]:
    """For each group, by key, the model of its shape and how many times longer its steps take."""
    shapes: dict[Hashable, dict[str, StepModel]] = {}
    for key, one in groups.items():
        if one.model is not None and one.model.predict(one.work) > 0:
            shapes.setdefault(one.shape, {})[key] = one.model
    found: dict[str, tuple[StepModel, float]] = {}
    usual: dict[Hashable, StepModel] = {}
    for shape, own in shapes.items():
        mean = together(list(own.values()))
        ratios = {key: model.predict(groups[key].work) / mean.predict(groups[key].work) for key, model in own.items()}
        middle = median(ratios.values())
        usual[shape] = scaled(mean, middle)
        for key, ratio in ratios.items():
            found[key] = usual[shape], faded(ratio / middle, groups[key].idle_s)
    for key, one in groups.items():
        if key not in found:
            found[key] = usual.get(one.shape, UNKNOWN), 1.0
    return found


def together(models: Sequence[StepModel]) -> StepModel:
    """What these models say together: the mean of their coefficients, with the knee of the one that predicts best."""
    count, best = len(models), min(models, key=lambda model: model.error)
    return StepModel(
        sum(model.fixed_s for model in models) / count,
        sum(model.token_s for model in models) / count,
        best.knee_tokens,
        sum(model.context_s for model in models) / count,
        sum(model.attention_s for model in models) / count,
        best.error,
        sum(model.row_s for model in models) / count,
        sum(model.prompt_s for model in models) / count,
    )


def faded(ratio: float, idle_s: float) -> float:
    """How many times longer steps are thought to take, of a group that was measured at `ratio` so many seconds ago."""
    speed = 1.0 + (ratio - 1.0) * 0.5 ** (idle_s / HALF_S)
    return 1.0 if 1 / NOISE < speed < NOISE else speed


def scaled(model: StepModel, factor: float) -> StepModel:
    """The model of a machine whose every step takes so many times longer."""
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
"""How often speeds are compared."""
FORGET_S = 10.0
"""How long a group is remembered that nobody looks at."""
LATELY_S = 1.0
"""How long a preemption is news."""
NOTHING = wire.Load(0, 0, 0, 0, 0)
NO_PREFIX = wire.HeavyPrefix(b"", 0, 0.0)
LEAST_SPEEDUP, MOST_SPEEDUP = 0.5, MAX_DEPTH + 1.0
"""A group that tells less or more is not believed: it would propose no more, or gains more than it may propose."""


@dataclass(slots=True, eq=False)
class Told:
    """What one group told, and what was sent there.

    load_at: when its newest report came. busy, busy_at: the newest one of a group at work, and when it came.
    """

    key: str
    group: str = ""
    revision: str = ""
    served: wire.Served = field(default_factory=wire.Served)
    page_size: int = 16
    draining: bool = False
    load: wire.Load | None = None
    load_at: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    preempted_at: float | None = None
    busy: wire.Load | None = None
    busy_at: float = 0.0
    num_reports: int = 0

    def report(self, load: wire.Load, now: float) -> None:
        """Notes a report. One that came again is as old as it was."""
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
        """For how long it had something to tell and told nothing. A step is no silence: engines tell between steps."""
        load = self.load
        since = self.load_at if load is not None and (load.running or load.waiting) else self.ledger.unseen_since()
        if since is None:
            return 0.0
        step_s = max(load.step_s, load.longest_step_s) if load is not None else 0.0
        return max(0.0, now - max(since, self.load_at) - step_s)

    def measured(self, now: float) -> Measured:
        """What is known of its steps."""
        shape, model, busy = (self.served.model_hash, self.served.layout), self.model(), self.busy
        if busy is None:
            return Measured(shape, model)
        work = StepWork(int(busy.prompt_tokens_per_step), busy.running, busy.context_tokens)
        return Measured(shape, model, work, 0.0 if busy is self.load else now - self.busy_at)

    def model(self) -> StepModel | None:
        """Its own fit, None before it has one."""
        return StepModel.told(self.load.step_model) if self.load is not None else None


class Lookout:
    """Looks at groups, at all of them or at some; keeps a view as long as nothing of it changes. Speeds are compared, and outputs
    averaged, over all that were looked at lately."""

    def __init__(self) -> None:
        self.is_blind = False
        """Whether more than half of the groups were stale at the last look."""
        self._known: dict[str, Told] = {}
        self._looked: set[str] = set()
        """Keys looked at since the last time that some were forgotten."""
        self._forgot_at: float | None = None
        self._views: dict[str, tuple[tuple[object, ...], GroupView]] = {}
        self._speeds: dict[str, tuple[StepModel, float]] = {}
        self._speeds_at: float | None = None
        self._outputs: dict[str, float] = {}
        """Output tokens of a request lately, by model."""

    def look(self, groups: Sequence[Told], now: float) -> list[GroupView]:
        """The view of each group, in this order."""
        for told in groups:
            self._known[told.key] = told
            self._looked.add(told.key)
        self._forget(now)
        self._compare(groups, now)
        states = [freshness(told.silent_s(now)) for told in groups]
        stale = sum(map(is_stale, states))
        self.is_blind = stale * 2 > len(groups)
        return [self._view(told, state, now) for told, state in zip(groups, states, strict=True)]

    def _forget(self, now: float) -> None:
        """Forgets groups that were not looked at for a while: links that are gone."""
        if self._forgot_at is not None and now - self._forgot_at < FORGET_S:
            return
        self._forgot_at = now
        self._known = {key: told for key, told in self._known.items() if key in self._looked}
        self._views = {key: kept for key, kept in self._views.items() if key in self._looked}
        self._looked = set()

    def _compare(self, groups: Sequence[Told], now: float) -> None:
        """Speeds change slowly; a new group is looked at once."""
        if self._speeds_at is not None and now - self._speeds_at < SPEED_EVERY_S and all(t.key in self._speeds for t in groups):
            return
        self._speeds_at = now
        known = self._known.values()
        found = speeds({told.key: told.measured(now) for told in known})
        self._outputs = usual_outputs(known)
        before = self._speeds  # equal ones stay the same object, by which `_view` sees that nothing changed
        self._speeds = {key: before[key] if before.get(key) == entry else entry for key, entry in found.items()}

    def _view(self, told: Told, state: Freshness, now: float) -> GroupView:
        is_blind = self.is_blind and is_stale(state)
        preempted = told.preempted_at is not None and now - told.preempted_at < LATELY_S
        speed = self._speeds[told.key]
        output = self._outputs.get(told.served.model_hash, 0.0)
        version = (told.num_reports, told.ledger.version, speed, output, told.draining, told.served, state, is_blind, preempted)
        kept = self._views.get(told.key)
        if kept is not None and kept[0] == version:
            return kept[1]
        view = make_view(told, state, *speed, mean_output_tokens=output, preempted_lately=preempted, is_blind=is_blind)
        self._views[told.key] = (version, view)
        return view


def usual_outputs(groups: Iterable[Told]) -> dict[str, float]:
    """Output tokens of a request lately, by model: the mean over the groups that have told any."""
    told: dict[str, list[float]] = {}
    for group in groups:
        if group.load is not None and group.load.mean_output_tokens:
            told.setdefault(group.served.model_hash, []).append(group.load.mean_output_tokens)
    return {model: sum(values) / len(values) for model, values in told.items()}


def make_view(
    told: Told,
    state: Freshness = "fresh",
    model: StepModel = UNKNOWN,
    speed: float = 1.0,
    *,
    mean_output_tokens: float = 0.0,
    preempted_lately: bool = False,
    is_blind: bool = False,
) -> GroupView:
    """The group as of now. With `is_blind` by the ledger alone: its report only says how large the group is."""
    load, unseen, live = told.load or NOTHING, told.ledger.unseen, told.ledger.live
    seen, added = (NOTHING, live) if is_blind else (load, unseen)
    held = live.pages if is_blind else load.total_pages - load.free_pages - load.reserved_pages
    heaviest = max(seen.prefixes, key=lambda prefix: prefix.token_share, default=NO_PREFIX)
    demand = 0 if is_blind else load.waiting_pages + unseen.pages
    return GroupView(
        told.key,
        told.group,
        told.revision,
        told.served.model_hash,
        told.served.layout,
        state,
        told.draining,
        model,
        speed,
        room=load.max_num_batched_tokens or 2048,
        waiting=seen.waiting,
        running=seen.running + added.requests,
        queued_prompt_tokens=seen.waiting_prompt_tokens + seen.running_prompt_tokens + unseen.prompt_tokens,
        queued_attended=max(0.0, seen.prompt_attended + unseen.attended),
        context_tokens=seen.context_tokens + added.context_tokens,
        prompt_tokens_per_step=seen.prompt_tokens_per_step,
        mean_output_tokens=mean_output_tokens,
        total_pages=max(1, load.total_pages),
        page_size=told.page_size,
        used_pages=held if load.total_pages else 0,
        reserved_pages=seen.reserved_pages,
        demand_pages=demand if load.total_pages else 0,
        preempted_lately=preempted_lately and not is_blind,
        steps_to_full=seen.steps_to_full,
        outstanding_tokens=seen.outstanding_tokens + added.prompt_tokens + added.output_tokens,
        page_bytes=told.served.page_bytes,
        prefix_share=heaviest.token_share,
        prefix=heaviest.key,
        prefix_tokens=heaviest.pages * told.page_size,
        unseen=unseen.requests,
        max_num_seqs=load.max_num_seqs,
        is_known=told.load is not None,
        speedup=min(max(seen.speedup, LEAST_SPEEDUP), MOST_SPEEDUP),
    )
