"""The parts of pages: which ones a request holds, when they are evicted, and where a hit ends without them."""

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.page_window import PageWindow, max_request_tokens
from phalanx_runtime.core.request import RequestPages
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import PoolShape, StepPlan
from phalanx_runtime.core.window_parts import NO_PART, WindowParts
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

SIZE = 4
WINDOW = PageWindow(9, SIZE)
"""A token reads at most three pages."""


class AllWritten:
    """Fully written pages, of which keys find the first ten."""

    def is_published(self, page: int) -> bool:
        return page < 10

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []

    def written(self, page: int) -> int:
        return SIZE

    def part_changed(self, page: int) -> None:
        pass

    def save_part(self, page: int, part: int) -> None:
        self.saved.append((page, part))


def make_parts(num_parts: int, num_pages: int = 20) -> WindowParts:
    parts = WindowParts(num_parts, num_pages, WINDOW)
    parts.pages = AllWritten()
    return parts


def holder(ids: list[int]) -> RequestPages:
    return RequestPages(keys=PrefixKeys(root_key("", ""), SIZE), ids=ids)


def test_a_request_holds_the_parts_of_its_window() -> None:
    parts, pages = make_parts(8), holder([7, 3, 9, 4, 8, 2])
    parts.start(pages, 0)
    assert pages.with_parts == [7, 3, 9]
    assert parts.grow(pages, 0, 19) == 19 and pages.with_parts == [7, 3, 9, 4, 8]
    assert parts.take_unsent() == [(7, 0), (3, 1), (9, 2), (4, 3), (8, 4)]
    for page in pages.with_parts:
        parts.mark_written(page, SIZE)
    parts.drop(pages, 17)
    assert pages.with_parts == [9, 4, 8], "token 17 reads tokens 9 to 17"
    assert parts.num_dropped == 2 and parts.free_parts == 5 and parts.take_unsent() == []
    assert parts.check([[9, 4, 8]]) == []
    parts.release(pages)
    assert parts.free_parts == 8 and parts.check([]) == []


def test_the_part_released_first_is_evicted_first() -> None:
    parts, pages = make_parts(3), holder([1, 2, 3])
    parts.start(pages, 0)
    for page in (1, 2, 3):
        parts.mark_written(page, SIZE)
    parts.release(pages)
    assert parts.num_hit([1, 2, 3]) == 3
    other = holder([11])
    parts.start(other, 0)
    assert (parts.num_evicted, parts.part_of(1)) == (1, NO_PART)
    assert parts.num_hit([1, 2, 3]) == 3, "a token after three pages reads the last two"
    parts.start(holder([12]), 0)
    assert parts.num_hit([1, 2, 3]) == 0


def test_parts_at_the_end_of_found_prefixes_are_kept() -> None:
    parts, pages = make_parts(8), holder([1, 2, 3, 4, 5])
    parts.start(pages, 0)
    parts.extend(pages, 5)
    for page in pages.ids:
        parts.mark_written(page, SIZE)
    parts.release(pages)
    other = holder([1, 2, 3, 11])
    assert parts.num_hit([1, 2, 3]) == 3
    parts.want([1, 2, 3], 3)
    parts.start(other, 3)
    assert other.with_parts == [2, 3, 11]
    parts.release(other)
    assert parts.evict(3) == 3
    assert parts.num_hit([1, 2, 3]) == 3 and parts.num_hit([1, 2, 3, 4, 5]) == 3
    assert parts.evict(3) == 2 and parts.num_hit([1, 2, 3]) == 0


def test_unwritten_and_unpublished_parts_are_not_kept() -> None:
    parts, pages = make_parts(4), holder([1, 11])
    parts.start(pages, 0)
    parts.mark_written(11, SIZE)
    parts.mark_written(1, SIZE - 1)
    parts.release(pages)
    assert parts.part_of(1) == parts.part_of(11) == NO_PART and parts.free_parts == 4


def test_a_request_starts_with_the_parts_of_an_image() -> None:
    parts, pages = make_parts(8), holder([7, 3, 9, 4, 8, 2, 1])
    pages.first_tokens = 10
    assert parts.can_start(pages, [], 7, 2) and not parts.can_start(pages, [], 7, 3)
    parts.start(pages, 0)
    assert pages.with_parts == [7, 3, 9, 4, 8, 2]


def test_a_page_that_becomes_free_loses_its_part() -> None:
    parts, pages = make_parts(2), holder([1])
    parts.start(pages, 0)
    parts.mark_written(1, SIZE)
    parts.release(pages)
    assert parts.written(1) == SIZE
    parts.forget(1)
    assert parts.written(1) == 0 and parts.check([]) == []


def test_holding_pages_takes_parts_for_all_or_none() -> None:
    parts = make_parts(2)
    assert not parts.hold([1, 2, 3]) and parts.free_parts == 2
    assert parts.hold([1, 2]) and parts.free_parts == 0
    parts.unhold([1, 2])
    assert parts.free_parts == 2


def test_check_names_lost_holders() -> None:
    parts, pages = make_parts(2), holder([1])
    parts.start(pages, 0)
    assert parts.check([]) == ["part 0 has 1 holders, expected 0"]
    assert parts.check([[1, 2]])[0] == "the part of page 2 is held and does not exist"


def test_pages_limit_requests_whose_parts_hold_the_window() -> None:
    assert max_request_tokens(10, 16, 33, num_parts=4) == 160
    assert max_request_tokens(10, 16, 33, num_parts=3) == 48
    assert (
        Limits(max_model_len=500, max_num_seqs=1, max_num_batched_tokens=8)
        .within(PoolShape(10, 16, window=33, num_parts=4))
        .max_model_len
        == 160
    )


class Engine:
    """A scheduler with a runner that reads pages and parts."""

    def __init__(self, num_pages: int, num_parts: int, budget: int = 16) -> None:
        self.runner = FakeRunner(num_pages, SIZE, window=WINDOW.tokens, num_parts=num_parts)
        limits = Limits(max_model_len=200, max_num_seqs=4, max_num_batched_tokens=budget)
        self.scheduler: Scheduler = make_scheduler(limits, self.runner.pool)
        self.output: dict[int, list[int]] = {}

    def submit(self, handle: int, request: wire.Request) -> None:
        assert self.scheduler.submit(handle, request) is None
        self.output[handle] = []

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.start(plan)
            frame = self.scheduler.commit(self.runner.finish())
            for handle, token in zip(frame.handles, frame.tokens, strict=True):
                self.output[handle].append(token)
        assert self.scheduler.check() == []
        return plan

    def run(self, handle: int, request: wire.Request) -> None:
        self.submit(handle, request)
        while self.step() is not None:
            pass
        assert self.output[handle] == expected_output(request, window=WINDOW.tokens, is_mixed=True)


def test_a_hit_ends_where_parts_are_lost() -> None:
    engine, request = Engine(40, 10), make_request(48, 6, seed=3)
    engine.run(0, request)
    parts, sharing = engine.scheduler.sharing.parts, engine.scheduler.sharing
    assert parts is not None and parts.num_dropped > 8
    engine.run(1, request)
    assert sharing.hit_tokens == 47, "the last full page and the tail are found"
    parts.evict(parts.num_parts)
    engine.run(2, request)
    assert sharing.hit_tokens == 47, "all pages are cached, and no part"
    assert engine.scheduler.pool.counters.hits == 22, "the request computes into the pages that it found"
    engine.run(3, request)
    assert sharing.hit_tokens == 47 + 44, "it brought the parts of the found pages back"


def test_equal_prompts_compute_lost_parts_once() -> None:
    engine, request = Engine(40, 24), make_request(48, 6, seed=3)
    engine.run(0, request)
    assert engine.scheduler.sharing.parts is not None
    engine.scheduler.sharing.parts.evict(24)
    for handle in range(1, 4):
        engine.submit(handle, request)
    num_tokens = 0
    while (plan := engine.step()) is not None:
        num_tokens += sum(plan.counts)
    assert num_tokens == 47 + 3 * 6
    assert engine.output[1] == engine.output[2] == engine.output[3] == engine.output[0]


def test_few_parts_delay_requests_and_lose_no_token() -> None:
    engine, requests = Engine(60, 9), {i: make_request(30, 12, seed=i) for i in range(4)}
    for handle, request in requests.items():
        engine.submit(handle, request)
    while engine.step() is not None:
        pass
    assert engine.output == {
        handle: expected_output(request, window=WINDOW.tokens, is_mixed=True) for handle, request in requests.items()
    }
    parts = engine.scheduler.sharing.parts
    assert parts is not None and parts.num_dropped > 10 and parts.free_parts == 9
