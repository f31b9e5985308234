"""What the next step computes: one token budget, decodes first, then prefill chunks in the order of the policy.

    schedule: running requests that miss one token · running requests that miss more, cut to the budget · newcomers
    commit:   computed += counts · drawn tokens are appended · requests that ended leave

Only rank 0 schedules; the ranks obey the plan. The same calls in the same order give the same plans.
When pages run out the last request of the order is preempted by recompute: it loses pages and row, keeps its tokens, and waits
in its place of the order. It can never be in the plan that is being made: growth goes through the order from the front.
Admission is in `admission`, pages in `pages`, the end of a request in `request`.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_runtime.core.admission import Admit, Limits, Refuse, fits_ever, fits_now, may_wait
from phalanx_runtime.core.pages import PagePool
from phalanx_runtime.core.plan import NewRow, PoolShape, StepPlan, StepResult
from phalanx_runtime.core.request import Request, make_request, needs_history

Policy = Callable[[Request], int]
"""The sort key of requests: smaller goes first and is preempted last. Must not change while a request is in the engine."""


def fcfs(request: Request) -> int:
    """First come, first served."""
    return request.order


@dataclass(slots=True)
class _Draft:
    """A plan in the making, with the request of each row."""

    budget: int
    requests: list[Request] = field(default_factory=list)
    admitted: list[NewRow] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draws: list[tuple[int, int]] = field(default_factory=list)

    def add(self, request: Request, row: int, new_pages: list[int]) -> None:
        """Puts as many missing tokens of the request into the step as the budget allows."""
        start = request.computed
        count = min(len(request.tokens) - start, self.budget)
        if start + count == len(request.tokens):
            self.draws.append((len(self.rows), start + count - request.num_prompt))
        self.requests.append(request)
        self.rows.append(row)
        self.starts.append(start)
        self.counts.append(count)
        self.pages.append(new_pages)
        self.tokens.extend(request.tokens[start : start + count])
        self.budget -= count


class Scheduler:
    """Requests in the engine, their rows and their pages. `schedule` and `commit` alternate."""

    def __init__(self, limits: Limits, pool: PoolShape, policy: Policy = fcfs) -> None:
        self.limits = limits.within(pool)
        self.pool = PagePool(pool.num_pages, pool.page_size)
        self.num_preemptions = 0
        self.refused: list[wire.Refused] = []
        """Requests that the last `commit` ended because nothing could be drawn for them."""
        self.backlog_tokens = 0
        """Tokens of the requests in the queue, all to be computed before a newcomer's."""
        self._policy = policy
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._in_flight: _Draft | None = None
        self._some_gone = False
        self._step = 0
        self._order = 0

    def submit(self, handle: int, asked: wire.Request) -> Refuse | wire.Finished | None:
        """None when the request is taken; its end when the tokens already delivered end it; or why it does not run here."""
        fits = fits_ever(len(asked.prompt), self.limits)
        if isinstance(fits, Refuse):
            return fits
        if handle in self._requests:
            return Refuse(400, "handle_in_use", f"handle {handle} names a request that still runs")
        request = make_request(handle, self._order, asked, self.limits.max_model_len)
        reason = request.finish()
        if reason is not None:
            return wire.Finished(handle, asked.epoch, reason)
        place = may_wait(len(self._waiting), self.backlog_tokens, self.limits)
        if isinstance(place, Refuse) and asked.epoch == 0:  # a stream that has begun elsewhere is never shed
            return place
        self._order += 1
        self._requests[handle] = request
        self._enqueue(request)
        return None

    def abort(self, handle: int) -> None:
        """Forgets a request; an unknown handle is no error. Pages that a step in flight writes are free after its commit."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        request.gone = True
        if request.row is None:
            self._waiting.remove(request)
            self.backlog_tokens -= len(request.tokens)
            return
        self._some_gone = True
        if self._in_flight is None:
            self._drop_gone()

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no request has anything to compute. May preempt requests."""
        assert self._in_flight is None, "the step before was not committed"
        draft = _Draft(self.limits.max_num_batched_tokens)
        preempted = self._add_decodes(draft)
        for request in self._running:
            if draft.budget and request.missing > 1 and request.row is not None:
                draft.add(request, request.row, [])
        if not preempted:
            self._add_newcomers(draft)
        if not draft.rows:
            return None
        self._in_flight = draft
        self._step += 1
        return StepPlan(
            self._step, draft.admitted, draft.rows, draft.starts, draft.counts, draft.pages, draft.tokens, draft.draws
        )

    def commit(self, result: StepResult) -> wire.Tokens:
        """All tokens that this step adds to requests, and the requests that it ends. Aborted requests leave silently."""
        draft = self._in_flight
        assert draft is not None and result.step == self._step, f"result of step {result.step}, expected {self._step}"
        assert len(result.tokens) == len(draft.draws), f"{len(result.tokens)} tokens for {len(draft.draws)} draws"
        self._in_flight = None
        for request, count in zip(draft.requests, draft.counts, strict=True):
            request.computed += count
        frame = wire.Tokens([], [], [], [], [])
        ended, failed = frozenset(result.ended), dict(result.failed)
        self.refused = []
        for i, start, details in result.prompt_details:
            request = draft.requests[i]
            if not request.gone:
                frame.prompt_details.append(wire.PromptDetails(request.handle, request.epoch, start, details))
        for position, ((i, index), token) in enumerate(zip(draft.draws, result.tokens, strict=True)):
            request = draft.requests[i]
            if request.gone:
                continue
            if position in failed:
                self.refused.append(wire.Refused(request.handle, request.epoch, 400, "nothing_to_draw", failed[position]))
                del self._requests[request.handle]
                request.gone = self._some_gone = True
                continue
            request.tokens.append(token)
            if result.details:
                frame.details.append(result.details[position])
            frame.handles.append(request.handle)
            frame.epochs.append(request.epoch)
            frame.indices.append(index)
            frame.tokens.append(token)
            reason = "stop" if position in ended else request.finish()
            if reason is not None:
                frame.finished.append(wire.Finished(request.handle, request.epoch, reason))
                del self._requests[request.handle]
                request.gone = self._some_gone = True
        self._drop_gone()
        return frame

    def admitted(self) -> list[int]:
        """Handles of requests that the step in flight starts, for the first time or again after a preemption."""
        draft = self._in_flight
        assert draft is not None, "no step is in flight"
        rows = {new.row for new in draft.admitted}
        return [request.handle for request, row in zip(draft.requests, draft.rows, strict=True) if row in rows]

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._requests and not self._running

    def load(self) -> wire.Load:
        """What the engine has in hand."""
        outstanding = sum(request.outstanding_tokens for request in self._requests.values())
        return wire.Load(len(self._waiting), len(self._running), outstanding, self.pool.free_pages, self.pool.num_pages)

    def check(self) -> list[str]:
        """What is wrong with pages and rows; empty when all are accounted for."""
        wrong = self.pool.check([request.pages for request in self._running])
        rows = sorted(self._free_rows + [request.row for request in self._running if request.row is not None])
        if rows != list(range(self.limits.max_num_seqs)):
            wrong.append(f"rows are {rows}, expected each of {self.limits.max_num_seqs} once")
        return wrong

    def _add_decodes(self, draft: _Draft) -> bool:
        """Adds requests that miss one token; whether any request had to be preempted for their pages."""
        preempted = False
        page_size = self.pool.page_size
        position = 0
        while position < len(self._running) and draft.budget:
            request = self._running[position]
            position += 1
            if request.missing != 1 or request.row is None:
                continue
            if request.computed < len(request.pages) * page_size:
                draft.add(request, request.row, [])
                continue
            grown = self.pool.take(1)
            while grown is None:
                preempted = True
                if self._preempt_last() is request:
                    return preempted
                grown = self.pool.take(1)
            request.pages += grown
            draft.add(request, request.row, grown)
        return preempted

    def _preempt_last(self) -> Request:
        """The request that lost its pages and row and waits again."""
        request = self._running.pop()
        self._let_go(request)
        request.computed = 0
        self._enqueue(request)
        self.num_preemptions += 1
        return request

    def _enqueue(self, request: Request) -> None:
        """Puts a request where the policy wants it in the queue."""
        insort(self._waiting, request, key=self._policy)
        self.backlog_tokens += len(request.tokens)

    def _add_newcomers(self, draft: _Draft) -> None:
        """Starts requests from the front of the queue as long as budget, rows and pages last."""
        while self._waiting and draft.budget:
            request = self._waiting[0]
            needed = self.pool.pages_for(len(request.tokens))
            if not isinstance(fits_now(needed, self.pool.free_pages, len(self._free_rows), len(self._running)), Admit):
                return
            del self._waiting[0]
            self.backlog_tokens -= len(request.tokens)
            pages = self.pool.take(needed)
            assert pages is not None, "admission checked the free pages"
            row = self._free_rows.pop()
            request.row, request.pages = row, pages
            insort(self._running, request, key=self._policy)
            history = list(request.tokens) if needs_history(request.sampling) else []
            draft.admitted.append(NewRow(row, request.sampling, request.num_prompt, history))
            draft.add(request, row, list(pages))

    def _drop_gone(self) -> None:
        """Takes pages and rows of requests that ended or were aborted."""
        if not self._some_gone:
            return
        self._some_gone = False
        for request in self._running:
            if request.gone:
                self._let_go(request)
        self._running = [request for request in self._running if not request.gone]

    def _let_go(self, request: Request) -> None:
        """Frees the pages and the row of a running request."""
        assert request.row is not None, "only running requests hold a row"
        self.pool.give_back(request.pages)
        self._free_rows.append(request.row)
        request.pages, request.row = [], None
