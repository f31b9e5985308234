"""The scheduler: requests come in, plans go out, results come back. Only rank 0 has one; the ranks obey the plans.

    submit:   refused, or into the queue              schedule: a plan of requests that are in no other plan in flight
    release:  one that was submitted before it could be served may be served now
    abort:    gone, pages after its plan's commit     commit:   computed += counts, drawn tokens are appended, the ended leave
    freeze:   no step until thaw, pages and row stay  reservations: rows and pages of requests that will come by a move

The same calls with the same arguments in the same order give the same plans: the time and the measured step times are arguments.
Plans are committed in the order in which they were made, up to `Limits.plans_in_flight` of them at once.
When pages run out the last request of the order is preempted by recompute: it loses pages and row, keeps its tokens, and waits.
What a step holds is decided in `compose`, how pages are shared in `sharing`, the order in `policy`, the end in `request`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cost import StepFit
from phalanx_runtime.core.acceptance import draft_grades
from phalanx_runtime.core.admission import Limits, Refuse, fits_ever, may_wait
from phalanx_runtime.core.draft_tree import chain
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.migration.rescue import Pressure
from phalanx_runtime.core.request import Request, make_request
from phalanx_runtime.core.scheduling.compose import Composer
from phalanx_runtime.core.scheduling.policies import Fcfs, Policy
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.report import LoadReporter
from phalanx_runtime.core.scheduling.reservations import Reservations
from phalanx_runtime.core.scheduling.running import RunningSet
from phalanx_runtime.core.speculation.config import Fitting, SpeculationConfig, begin
from phalanx_runtime.core.speculation.draft_backfill import num_drafted
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A running request: its tokens, those of its output and those in its pages. `is_settled`: it is frozen, and in no plan.

    `num_losses` counts preemptions: while it is the same, the pages are the same ones, and full ones hold the same.
    `num_drafted`: of so many of the first tokens they hold what a draft model computed, once the plans so far are.
    """

    num_tokens: int
    num_output: int
    computed: int
    pages: Sequence[int]
    is_settled: bool
    num_losses: int
    num_drafted: int = 0


def orphaned_pages(first: int, accepted: Sequence[int]) -> list[int]:
    """The slots of accepted proposals, from the first on that lies elsewhere than it belongs. Proposal 0 lies in `first`."""
    same = next((at for at, node in enumerate(accepted) if node != at), len(accepted))
    return [first + node for node in accepted[same:]]


class Scheduler:
    """Requests in the engine, their rows and their pages."""

    def __init__(
        self,
        limits: Limits,
        pool: PoolShape,
        policy: Policy | None = None,
        sharing: PrefixSharing | None = None,
        speculating: SpeculationConfig | None = None,
        fitting: Fitting | None = None,
    ) -> None:
        self.limits = limits.within(pool)
        self.sharing = sharing or PrefixSharing(PagePool(pool.num_pages, pool.page_size), model="")
        self.pool = self.sharing.pool
        self.fit = StepFit()
        self.refused: list[wire.Refused] = []
        """Requests that the last `commit` ended because nothing could be drawn for them."""
        self._policy = policy or Fcfs()
        self._requests: dict[int, Request] = {}
        self._queue = Queue(self._policy, self.pool.page_size)
        self._seats = RunningSet(limits.max_num_seqs, self.sharing)
        self.reservations = Reservations(self.limits, self._seats, self.sharing)
        self._reporter = LoadReporter(self.limits, self._queue, self._seats, self.sharing)
        self.speculator = Speculator(self.limits, self.pool, speculating or SpeculationConfig(), fitting)
        self._composer = Composer(
            self.limits, self._policy, queue=self._queue, seats=self._seats, sharing=self.sharing, speculator=self.speculator
        )
        self._flights: deque[StepBuilder] = deque()
        self._step = 0
        self._order = 0
        self._is_unsorted = False

    @property
    def planned_step(self) -> int:
        """The number of the latest plan. Pages may be found by key from when their writer is planned: who reads the pages of a
        request outside of plans waits until this one is computed."""
        return self._step

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its pages, since the start."""
        return self._composer.num_preemptions

    @property
    def backlog_tokens(self) -> int:
        """Tokens of the requests in the queue, all to be computed before a newcomer's: what they have, and for each as many
        output tokens as requests had lately."""
        return self._queue.waiting.tokens + int(len(self._queue) * self._reporter.output.mean)

    def submit(
        self, handle: int, asked: wire.Request, now: float = 0.0, is_held: bool = False, move: str = ""
    ) -> Refuse | wire.Finished | None:
        """None when the request is taken; its end when the tokens already delivered end it; or why it does not run here.

        One that is held is in no step before `release`, but keeps its place. With `move` it runs at once on the pages that
        arrived for it; if they did not, it waits like any other, and computes what it has.
        """
        self._reporter.last_handle = max(self._reporter.last_handle, handle)
        fits = fits_ever(len(asked.prompt), self.limits)
        if isinstance(fits, Refuse):
            return fits
        if handle in self._requests:
            return Refuse(400, "handle_in_use", f"handle {handle} names a request that still runs")
        proposing = begin(self.speculator.setting, asked)
        if isinstance(proposing, Refuse):
            return proposing
        request = make_request(handle, self._order, asked, self.limits.max_model_len, now)
        request.proposing = proposing
        reason = request.finish()
        if reason is not None:
            return wire.Finished(handle, asked.epoch, reason)
        place = may_wait(len(self._queue), self.backlog_tokens, self.limits)
        has_begun = asked.epoch > 0 or asked.delivered  # a router raises the epoch when a group that had it is lost
        if isinstance(place, Refuse) and not has_begun:
            self._reporter.refusals += 1
            return place
        self._order += 1
        self._requests[handle] = request
        self.sharing.begin(request, asked)
        if move and self.reservations.take(move, request):
            self._policy.arrive(request, self._queue.lanes())
            request.is_frozen = request.is_held = is_held
        elif is_held:
            self._queue.hold(request)
        else:
            self._enter(request, now)
        return None

    def release(self, handle: int, now: float = 0.0) -> None:
        """Lets a request be served that was held. One that is not, because it was aborted, is no error."""
        request = self._queue.release(handle)
        if request is not None:
            self._enter(request, now)
        elif handle in self._requests:
            self._requests[handle].is_held = False
            self.thaw(handle)

    def freeze(self, handle: int) -> bool:
        """Whether a running request computes no further step, after those it is in, until `thaw`. A waiting one has no pages."""
        request = self._requests.get(handle)
        if request is None or request.row is None or request.is_frozen:
            return False
        request.is_frozen = True
        return True

    def thaw(self, handle: int) -> None:
        """Lets a frozen request go on, unless it is held too. One that is gone is no error."""
        request = self._requests.get(handle)
        if request is not None:
            request.is_frozen = request.is_held

    def held_by(self, handle: int) -> RunningRequest | None:
        """What a running request has in its pages; None when it waits or is gone."""
        request = self._requests.get(handle)
        if request is None or request.row is None:
            return None
        settled = request.is_frozen and not request.in_flight
        drafted = num_drafted(self.pool, request)
        return RunningRequest(
            num_tokens=len(request.tokens),
            num_output=request.num_output,
            computed=request.placed,
            pages=request.pages,
            is_settled=settled,
            num_losses=request.num_losses,
            num_drafted=drafted,
        )

    def pressure(self, pages_per_s: float) -> Pressure | None:
        """How near the pool is to its end, and who would lose pages first; None while half of it is free."""
        return self._reporter.pressure(pages_per_s)

    def abort(self, handle: int) -> None:
        """Forgets a request; an unknown handle is no error. Pages that a plan in flight writes are free after its commit."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        request.gone = True
        if request.row is None:
            self._queue.forget(request)
        else:
            self._seats.drop_gone()

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a plan in flight is committed. May preempt requests."""
        assert len(self._flights) < self.limits.plans_in_flight, "a step before was not committed"
        if self._is_unsorted:
            self._queue.sort(now)
            self._is_unsorted = False
        making = self._composer.make(self._step + 1, self.fit.model(), now)
        if not making.chunks:
            return None
        self._step += 1
        self._flights.append(making)
        return making.finish()

    def commit(self, result: StepResult, wall_s: float | None = None) -> wire.Tokens:
        """All tokens that the oldest plan in flight adds to requests, and the requests that it ends. Aborted ones leave silently.

        wall_s: how long the step took, if that was measured; later budgets follow it.
        """
        making = self._flights[0] if self._flights else None
        assert making is not None and result.step == making.step, (
            f"result of step {result.step} does not match the plans in flight"
        )
        runs = result.runs or [1] * len(making.draws)
        assert len(runs) == len(making.draws), f"{len(runs)} runs for {len(making.draws)} draws"
        assert len(result.tokens) == sum(runs), f"{len(result.tokens)} tokens for runs of {sum(runs)}"
        self._flights.popleft()
        for chunk in making.chunks:
            self._reporter.recomputed_tokens += max(0, min(chunk.end, chunk.request.farthest) - chunk.start)
            chunk.request.computed, chunk.request.strays = chunk.end, []
            chunk.request.in_flight = False
        self._tell_drafts(making, result)
        frame = self._read(making, result, runs)
        for chunk in making.chunks:
            chunk.request.farthest = max(chunk.request.farthest, chunk.request.computed)
            self.speculator.settle(chunk)
        self._seats.drop_gone()
        self.speculator.learn(making, self.fit.model(), wall_s, result.draft_s, result.lost)
        if wall_s is not None:
            self._learn(making, wall_s, result.draft_s)
        return frame

    def admitted(self) -> list[int]:
        """Handles of requests that the latest plan starts, for the first time or again after a preemption."""
        making = self._flights[-1]
        rows = {new.row for new in making.admitted}
        return [chunk.request.handle for chunk in making.chunks if chunk.request.row in rows]

    def expected_s(self) -> float | None:
        """How long the latest plan should take; None before enough steps were measured."""
        model = self.fit.model()
        return None if model is None else model.predict(self._flights[-1].work)

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._requests and not self._seats.running and not len(self.reservations)

    def epoch_of(self, handle: int) -> int:
        """The epoch of a request that is here."""
        return self._requests[handle].epoch

    def must_wait(self) -> bool:
        """Whether nothing can be computed before the next submit, release or thaw: all that is here is held or frozen."""
        return not self._queue.num_ready and all(one.is_frozen and not one.in_flight for one in self._seats.running)

    def load(self, now: float = 0.0) -> wire.Load:
        """The next report of what the engine has in hand."""
        counts = self.speculator.counts()
        return self._reporter.make(now, self.num_preemptions, self.reservations.num_pages, self.fit.model(), counts)

    def is_full_soon(self) -> bool:
        """Whether so few pages are free that a preemption may be near."""
        return self._reporter.is_imminent()

    def check(self) -> list[str]:
        """What is wrong with pages and rows; empty when all are accounted for."""
        return self._seats.check(self.reservations.held())

    def _read(self, making: StepBuilder, result: StepResult, runs: list[int]) -> wire.Tokens:
        """The frame of a step; its tokens are appended to their requests."""
        frame = wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[])
        ended, over, failed, taken = frozenset(result.ended), frozenset(result.over), dict(result.failed), dict(result.taken)
        self.refused = []
        for i, start, details in result.prompt_details:
            request = making.chunks[i].request
            new = details[max(0, request.told + 1 - start) :]
            if new and not request.gone:
                first, request.told = request.told + 1, request.told + len(new)
                frame.prompt_details.append(wire.PromptDetails(request.handle, request.epoch, first, new))
        first = 0
        for position, ((i, index), run) in enumerate(zip(making.draws, runs, strict=True)):
            chunk, at = making.chunks[i], range(first, first + run)
            first += run
            if chunk.request.gone:
                continue
            if position in over:
                self._finish(chunk.request, "stop", frame)
            elif position in failed:
                request = chunk.request
                self.refused.append(
                    wire.Refused(
                        handle=request.handle, epoch=request.epoch, status=400, code="nothing_to_draw", message=failed[position]
                    )
                )
                self._end(request)
            else:
                accepted = taken.get(position, range(run))[: run - 1]
                self._append(chunk, index, at=at, accepted=accepted, result=result, is_complete=position in ended, frame=frame)
        return frame

    def _append(
        self,
        chunk: ScheduledChunk,
        index: int,
        at: range,
        accepted: Sequence[int],
        result: StepResult,
        is_complete: bool,
        frame: wire.Tokens,
    ) -> None:
        """Gives a request its tokens, the result's at these places, up to its end. All but the last are these proposals."""
        request, kept = chunk.request, 0
        for place in at:
            token, kept = result.tokens[place], kept + 1
            request.tokens.append(token)
            self._policy.charge(request, 0, 1)
            if result.details:
                frame.details.append(result.details[place])
            if request.cached_tokens and not request.has_drawn:
                frame.cached.append(wire.Cached(request.handle, request.epoch, request.cached_tokens))
            request.has_drawn = True
            frame.handles.append(request.handle)
            frame.epochs.append(request.epoch)
            frame.indices.append(index + kept - 1)
            frame.tokens.append(token)
            reason = "stop" if is_complete and place == at[-1] else request.finish()
            if reason is not None:
                self._reporter.output.add(request.num_output)
                self._finish(request, reason, frame)
                break
        if accepted:
            request.computed += min(len(accepted), kept)
            request.strays = orphaned_pages(chunk.end, accepted[:kept])
            self.sharing.note_accepted(chunk)
        chunk.gained = kept
        self.speculator.heard(chunk, accepted, kept)

    def _tell_drafts(self, making: StepBuilder, result: StepResult) -> None:
        """What ranks made of drafts: shapes that they chose, and places that they left empty."""
        shapes, empty = iter(result.shapes), dict(result.undrafted)
        for at, chunk in enumerate(chunk for chunk in making.chunks if chunk.is_drafted):
            chunk.undrafted = frozenset(empty.get(at, ()))
            if chunk.growth is not None:
                chunk.parents = next(shapes, chain(chunk.depth))
                chunk.grades = draft_grades(chunk.parents)

    def _finish(self, request: Request, reason: wire.FinishReason, frame: wire.Tokens) -> None:
        frame.finished.append(wire.Finished(request.handle, request.epoch, reason, request.cached_tokens))
        self._end(request)

    def _enter(self, request: Request, now: float) -> None:
        self._policy.arrive(request, self._queue.lanes())
        self._queue.push(request, now)

    def _end(self, request: Request) -> None:
        del self._requests[request.handle]
        request.gone = True

    def _learn(self, making: StepBuilder, wall_s: float, draft_s: float) -> None:
        """Fits the step-time function, of which passes that draft for decodes are no part, and tells the policy."""
        self.fit.add(making.work, wall_s - self.speculator.draft_s_behind_decodes(making, draft_s))
        self._reporter.stepped(making, self.fit.model(), wall_s)
        model = self.fit.model()
        if model is not None:
            self._is_unsorted |= self._policy.learn(model, self._reporter.speedup)
