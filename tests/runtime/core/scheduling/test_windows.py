"""Requests that drop the pages before their window: what they hold, who is preempted, what is refused."""

from collections.abc import Iterator

import msgspec
import pytest

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import StepPlan
from tests.runtime.fake_runner import VOCAB, FakeRunner, expected_output, make_request

WINDOW, PAGE = 12, 4


class WindowedEngine:
    """A scheduler over a fake runner; `tokens` has the output of each request."""

    def __init__(
        self, num_pages: int, window: int = WINDOW, budget: int = 16, *, is_async: bool = False, num_host_pages: int = 0
    ) -> None:
        self.runner = FakeRunner(num_pages, PAGE, runs_ahead=is_async, num_host_pages=num_host_pages, window=window)
        limits = Limits(max_model_len=400, max_num_seqs=4, max_num_batched_tokens=budget, async_scheduling=is_async)
        self.scheduler: Scheduler = make_scheduler(limits, self.runner.pool)
        self.tokens: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []

    def submit(self, request: wire.Request) -> Refusal | wire.Finished | None:
        handle = len(self.tokens)
        self.tokens[handle] = []
        return self.scheduler.submit(handle, request)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.start(plan)
            self.plans.append(plan)
        return plan

    def commit(self) -> None:
        frame = self.scheduler.commit(self.runner.finish())
        self.plans.pop(0)
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            self.tokens[handle].append(token)

    def run(self) -> Iterator[int]:
        """Yields the pages in use after each plan."""
        while True:
            plan = self.plan()
            pool = self.scheduler.pool
            yield pool.num_pages - pool.free_pages
            if self.plans and (plan is None or len(self.plans) == self.scheduler.limits.max_flights):
                self.commit()
            if not self.plans and self.scheduler.is_idle():
                return


@pytest.mark.parametrize(("is_async", "plans"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("budget", [4, 16])
def test_request_holds_window_chunk_and_a_page(is_async: bool, plans: int, budget: int) -> None:
    engine = WindowedEngine(60, budget=budget, is_async=is_async)
    request = make_request(200, 50, seed=3)
    assert engine.submit(request) is None
    most = max(engine.run())
    assert most * PAGE <= WINDOW + plans * budget + 2 * PAGE
    assert engine.tokens[0] == expected_output(request, window=WINDOW)
    assert engine.scheduler.load().dropped_pages > 50
    assert engine.scheduler.load().max_request_pages == most


def test_prompts_longer_than_the_pool_are_served() -> None:
    request = make_request(100, 5)
    refused = WindowedEngine(8, window=0).submit(request)
    assert isinstance(refused, Refusal) and (refused.status, refused.code) == (400, "context_length_exceeded")
    engine = WindowedEngine(8)
    assert engine.submit(request) is None
    assert max(engine.run()) <= 8
    assert engine.tokens[0] == expected_output(request, window=WINDOW)


@pytest.mark.parametrize(("num_pages", "num_parts"), [(7, 0), (8, 0), (9, 0), (40, 7), (40, 8), (40, 9), (40, 10)])
@pytest.mark.parametrize("start", range(16))
def test_image_that_never_fits_its_pages_is_refused(num_pages: int, num_parts: int, start: int) -> None:
    """One step computes its 20 tokens, which read those of the window before them; it preempted itself for ever."""
    runner = FakeRunner(num_pages, PAGE, window=WINDOW, num_parts=num_parts)
    limits = Limits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler: Scheduler = make_scheduler(limits, runner.pool)
    span = wire.Image(digest=bytes(16), num_tiles=1, height=1, width=1, pixels=b"", spans=[(start, 20)], attends_within=True)
    request = msgspec.structs.replace(make_request(start + 21, 2), images=[span])
    refusal, tokens = scheduler.submit(0, request), []
    dropped_at = start // PAGE * PAGE if num_parts else start
    needed = -(-(start + 20) // PAGE) - max(0, dropped_at - WINDOW + 1) // PAGE
    if needed > (num_parts or num_pages):
        assert isinstance(refusal, Refusal) and (refusal.status, refusal.code) == (400, "no_images")
        assert f"needs {needed} pages" in refusal.message and f"the pool has {num_parts or num_pages}" in refusal.message
        assert isinstance(scheduler.reservations.reserve("a move", request, start + 22), Refusal)
        return
    while (plan := scheduler.schedule()) is not None:
        tokens += scheduler.commit(runner.run(plan)).tokens
    assert tokens == expected_output(request, window=WINDOW, is_mixed=num_parts > 0)
    assert scheduler.is_idle() and not scheduler.num_preemptions


def test_equal_prompts_are_computed_once() -> None:
    """Each follows the other, page by page: no request has the pages of its whole prompt."""
    engine = WindowedEngine(60)
    requests = [make_request([at * at % VOCAB for at in range(200)], 2, seed=seed) for seed in (1, 2, 3)]
    for request in requests:
        assert engine.submit(request) is None
    most = max(engine.run())
    assert most < 40 < 200 // PAGE
    assert engine.tokens == {i: expected_output(request, window=WINDOW) for i, request in enumerate(requests)}
    assert engine.scheduler.sharing.hit_tokens > 350, "of 400 that two of three requests need not compute"


def test_prompt_without_pages_waits_for_requests_of_the_step() -> None:
    """Both requests run; then others hold the pages that the first one drops, and all free ones."""
    engine = WindowedEngine(14, budget=16)
    first, second = make_request(90, 3, seed=1), make_request([9] * 20, 30, seed=2)
    assert engine.submit(first) is None and engine.plan() is not None
    engine.commit()
    assert engine.submit(second) is None and engine.plan() is not None
    engine.commit()
    scheduler = engine.scheduler
    shared = list(scheduler.requests[0].pages.held)
    scheduler.pool.share(shared)  # as followers do: dropped pages stay in use
    taken = scheduler.pool.allocate(scheduler.pool.free_pages) or []
    num_waited = 0
    while scheduler.requests[0].num_uncomputed > 1 and (plan := engine.plan()) is not None:
        num_waited += scheduler.requests[0].row not in plan.rows
        engine.commit()
    assert num_waited > 0
    scheduler.pool.release(shared)
    scheduler.pool.release(taken)
    list(engine.run())
    assert engine.tokens == {0: expected_output(first, window=WINDOW), 1: expected_output(second, window=WINDOW)}


def test_prompt_without_pages_preempts_a_later_prompt() -> None:
    engine = WindowedEngine(20, budget=16)
    first, second = make_request(90, 3, seed=1), make_request([9] * 80, 3, seed=2)
    assert engine.submit(first) is None and engine.submit(second) is None
    scheduler = engine.scheduler
    assert engine.plan() is not None
    engine.commit()
    assert scheduler.requests[1].row is not None
    taken: list[int] = []
    while not scheduler.num_preemptions:
        taken += scheduler.pool.allocate(scheduler.pool.free_pages) or []
        assert engine.plan() is not None
        engine.commit()
    assert scheduler.requests[0].row is not None and scheduler.requests[1].row is None
    scheduler.pool.release(taken)
    list(engine.run())
    assert engine.tokens == {0: expected_output(first, window=WINDOW), 1: expected_output(second, window=WINDOW)}


def test_a_follower_whose_pages_are_taken_back_starts_again() -> None:
    """It skips tokens that the plan of another one writes, without the pages before; that plan has no memory."""
    engine = WindowedEngine(60, budget=60)
    prompt = [at * at % VOCAB for at in range(50)]
    leader, follower = make_request(prompt, 2, seed=1), make_request([*prompt, 1, 2], 2, seed=2)
    assert engine.submit(leader) is None and engine.submit(follower) is None
    scheduler = engine.scheduler
    plan = scheduler.schedule()
    assert plan is not None
    broken = scheduler.requests[1]
    assert broken.pages.num_dropped > 0, "the follower starts behind pages that it never reads"
    engine.runner.fail(plan)
    scheduler.take_back()
    assert scheduler.sharing.lacks_pages(broken)
    scheduler.preempt_newest()
    assert broken.row is None and scheduler.check() == []
    list(engine.run())
    assert engine.tokens == {0: expected_output(leader, window=WINDOW), 1: expected_output(follower, window=WINDOW)}


def test_no_load_waits_for_a_plan() -> None:
    """Without a page for the next token the loads had no plan, and a move could get the pages that they write."""
    engine = WindowedEngine(12, budget=4, num_host_pages=12)
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    whole, start = make_request(26, 1), make_request(13, 5)
    assert engine.submit(whole) is None
    list(engine.run())
    assert engine.submit(start) is None and engine.plan() is not None
    engine.commit()
    assert scheduler.freeze(1)
    taken = pool.allocate(pool.free_pages) or []
    pool.release(taken[:3])
    taken = taken[3:]
    keys = scheduler.sharing.make_keys(whole).extend(whole.prompt)
    assert len(pool.match(keys)) == 3 and len(pool.host.match(keys[3:6])) == 3
    assert engine.submit(whole) is None
    assert engine.plan() is not None and not pool.host.is_loading(range(12))
    engine.commit()
    scheduler.thaw(1)
    pool.release(taken)
    list(engine.run())
    assert [engine.tokens[handle] for handle in range(3)] == [
        expected_output(request, window=WINDOW) for request in (whole, start, whole)
    ]


def test_long_prompts_hide_no_unused_slots() -> None:
    """A prompt has more tokens than slots while it is computed in windows."""
    engine = WindowedEngine(60, budget=8)
    assert engine.submit(make_request(5, 9)) is None and engine.plan() is not None
    engine.commit()
    (unused,) = (len(request.pages.ids) * PAGE - len(request.tokens) for request in engine.scheduler.requests.values())
    assert engine.scheduler.load().unused_slots == unused > 0
    assert engine.scheduler.freeze(0) and engine.submit(make_request(200, 1, seed=1)) is None and engine.plan() is not None
    engine.commit()
    assert engine.scheduler.load().unused_slots == unused


def test_host_memory_keeps_the_window_of_waiting_requests() -> None:
    """A request that waits for pages from disk needs those before them."""
    engine = WindowedEngine(12, num_host_pages=8)
    sharing, pool, whole = engine.scheduler.sharing, engine.scheduler.pool, make_request(26, 1)
    assert engine.submit(whole) is None
    list(engine.run())
    pool.release(pool.allocate(pool.free_pages) or [])
    pool.host.take()
    assert engine.scheduler.submit(1, make_request([*whole.prompt[:24], 7, 8, 9], 1), is_held=True) is None
    prefix = sharing.find_on_disk(engine.scheduler.requests[1])
    assert (prefix.start, prefix.end, prefix.keys) == (6, 6, [])
    for number in range(5):
        pool.host.store(number, bytes([number]) * 16)
    keys = sharing.make_keys(whole).extend(whole.prompt)
    assert [key in pool.host for key in keys] == [False] * 3 + [True] * 3


def test_parts_that_no_move_brought_are_not_found() -> None:
    """The source computes 7 tokens between the reservation and the end of the copy, so that a page leaves the window."""
    size, window = 8, 24
    runner = FakeRunner(40, size, window=window, num_parts=30)
    scheduler = make_scheduler(Limits(max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64), runner.pool)
    request = make_request(100, 40, delivered=[1] * 5)
    reservation = scheduler.reservations.reserve("m", request, 112, 104)
    assert not isinstance(reservation, Refusal) and reservation.part_start == 10
    scheduler.reservations.set_arrived("m", 111)
    moved = msgspec.structs.replace(request, delivered=[1] * 12)
    assert scheduler.submit(1, moved, move="m") is None and scheduler.reservations.get("m") is None
    parts = scheduler.sharing.parts
    assert parts is not None
    assert [parts.written(page) for page in reservation.pages[9:13]] == [0, 0, size, size]


def test_tokens_of_dropped_pages_count_as_cached() -> None:
    """A hit needs the pages of the window before its end; the request never holds those before, whether or not they exist."""
    runner = FakeRunner(20, 2, window=8)
    scheduler = make_scheduler(
        Limits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16), runner.pool, SchedulerConfig(eviction_policy="lru")
    )
    cached: list[int] = []
    for handle in range(2):
        scheduler.pool.release(scheduler.pool.allocate(8) or [])
        assert scheduler.submit(handle, make_request(list(range(31)), 4)) is None
        while (plan := scheduler.schedule()) is not None:
            cached += [end.cached_tokens for end in scheduler.commit(runner.run(plan)).finished]
    keys = scheduler.sharing.make_keys(make_request(4)).extend(list(range(31)))
    assert scheduler.pool.find(keys[0]) is None, "the first page is lost"
    assert cached == [0, 22] and scheduler.sharing.hit_tokens == 22 and scheduler.pool.counters.hits == 11


def test_a_cancelled_move_leaves_pages_for_its_request() -> None:
    """It kept all of them during the move; once it drops those that no layer reads, it needs no preemption."""
    engine = WindowedEngine(num_pages=8, window=2)
    assert engine.submit(make_request(4, 60)) is None
    engine.plan()
    engine.commit()
    engine.scheduler.pin(0, True)
    while engine.scheduler.pool.free_pages > 0:
        engine.plan()
        engine.commit()
    while engine.scheduler.requests[0].num_computed % PAGE:
        engine.plan()
        engine.commit()
    assert engine.scheduler.freeze(0)
    engine.scheduler.pin(0, False)
    engine.scheduler.thaw(0)
    assert engine.scheduler.pool.free_pages == 7
    list(engine.run())
    assert engine.scheduler.num_preemptions == 0
    assert engine.tokens[0] == expected_output(make_request(4, 60), window=2)
