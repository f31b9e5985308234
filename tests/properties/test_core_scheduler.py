"""Random workloads with shared prefixes, aborts and small pools, under every policy and with several plans in flight.

Pages are conserved, requests progress, and tokens equal those of an undisturbed run: the fake runner samples from the contents of
page slots, so a page that is shared before it is written, or written twice with different tokens, gives other tokens.
"""

from collections import deque
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.engine_config import SCHEDULING_POLICIES, SchedulingPolicy
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.speculation import Method, Tree
from phalanx_router.routing.prefixes import KeySpace, PrefixIndex, PromptKeys
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import StepPlan
from tests.properties.fake_disk import FakeDisk
from tests.runtime.fake_runner import VOCAB, FakeRunner, expected_output, make_request


@dataclass(frozen=True)
class Arrival:
    """A request with the first `common` tokens of a family and tokens of its own, `prompt` tokens in all."""

    at_step: int
    prompt: int
    max_tokens: int
    delivered: int = 0
    abort_after: int | None = None
    family: int = 0
    common: int = 0
    tenant: int = 0
    priority: int = 0
    target_ms: float | None = None
    stop: int | None = None
    """Token that ends the request."""

    def request(self, handle: int) -> wire.Request:
        shared = [(self.family * 17 + 5 * i * i) % VOCAB for i in range(min(self.common, self.prompt))]
        own = [(handle * 11 + 7 * i) % VOCAB for i in range(self.prompt - len(shared))]
        request = make_request(shared + own, self.max_tokens, seed=handle, stop=None if self.stop is None else [self.stop])
        return msgspec.structs.replace(request, priority=self.priority, tenant=f"t{self.tenant}", ttft_target_ms=self.target_ms)


NO_SPECULATION = SpeculationConfig()


@dataclass(frozen=True)
class Shape:
    num_pages: int
    page_size: int
    seqs: int
    budget: int
    policy: SchedulingPolicy = "fcfs"
    flights: int = 1
    threshold: int = 0
    caching: bool = True
    speculation: SpeculationConfig = NO_SPECULATION
    is_async: bool = False
    num_host_pages: int = 0
    load_s: float = 0.0
    """Measured time to load a page."""
    resizes: bool = False
    """The host tier gets another size after every few steps."""
    window: int = 0
    """Tokens that a layer reads; 0: all."""
    num_parts: int = 0
    """With a window: pages have parts, because another layer reads all tokens."""
    num_host_parts: int = 0
    has_disk: bool = False
    """Pages and parts of host memory go to a disk, which loses some of them."""
    failures: frozenset[int] = frozenset()
    """Steps for which the ranks have no memory."""

    @property
    def page_window(self) -> int:
        """The window by which pages or parts are dropped: a draft model computes tokens again, in pages, which parts leave."""
        return 0 if self.speculation.method in DRAFTS and not self.num_parts else self.window

    @property
    def parts(self) -> int:
        return self.num_parts if self.page_window else 0

    @property
    def max_flights(self) -> int:
        return self.flights + (self.is_async and self.flights == 1)


DRAFTS: frozenset[Method] = frozenset({"draft", "self_draft"})
SPECULATIONS = [
    SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False),
    SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=DRAFTS),
    SpeculationConfig(method="self_draft", num_tokens=16, is_adaptive=False, draft_methods=DRAFTS),
    SpeculationConfig(method="draft", num_tokens=5, draft_methods=DRAFTS),
    SpeculationConfig(method="draft", num_tokens=8, is_adaptive=False, draft_methods=DRAFTS, tree=Tree([2, 2, 2], "static")),
    SpeculationConfig(
        method="self_draft", num_tokens=7, is_adaptive=False, draft_methods=DRAFTS, tree=Tree([3, 2], "best_first")
    ),
    SpeculationConfig(method="ngram", num_tokens=6, is_adaptive=False, tree=Tree([3, 2])),
    SpeculationConfig(method="draft", num_tokens=9, draft_methods=DRAFTS, tree=Tree([2, 2, 2], "static")),
]
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 30),
        prompt=st.integers(0, 40),
        max_tokens=st.integers(0, 25),
        delivered=st.integers(0, 5),
        abort_after=st.none() | st.integers(0, 20),
        family=st.integers(0, 1),
        common=st.integers(0, 40),
        tenant=st.integers(0, 2).map(lambda n: n // 2),
        priority=st.integers(-2, 2),
        target_ms=st.none() | st.floats(1, 20_000),
        stop=st.none() | st.integers(0, VOCAB - 1),
    ),
    max_size=12,
)
SHAPES = st.builds(
    Shape,
    num_pages=st.integers(2, 14),
    page_size=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 5),
    budget=st.integers(5, 24),
    policy=st.sampled_from(SCHEDULING_POLICIES),
    flights=st.integers(1, 3),
    threshold=st.sampled_from([0, 0, 7]),
    caching=st.booleans(),
    speculation=st.sampled_from([NO_SPECULATION, *SPECULATIONS]),
    is_async=st.booleans(),
    num_host_pages=st.sampled_from([0, 1, 3, 20]),
    load_s=st.sampled_from([0.0, 0.001, 1.0]),
    resizes=st.booleans(),
    window=st.sampled_from([0, 0, 2, 3, 5, 8, 13]),
    num_parts=st.sampled_from([0, 0, 2, 3, 5, 8, 14]),
    num_host_parts=st.sampled_from([0, 2, 4, 20]),
    has_disk=st.booleans(),
    failures=st.frozensets(st.integers(1, 40), max_size=4),
)


class Workload:
    """One run, checked at every step. Times are numbers of steps."""

    def __init__(self, arrivals: list[Arrival], shape: Shape) -> None:
        self.runner = FakeRunner(
            shape.num_pages,
            shape.page_size,
            has_pages=shape.speculation.method != "self_draft",
            num_host_pages=shape.num_host_pages,
            min_host_pages=min(1, shape.num_host_pages) if shape.resizes else None,
            window=shape.page_window,
            num_parts=shape.parts,
            num_host_parts=shape.num_host_parts if shape.parts else 0,
            has_disk=shape.has_disk,
            depth=shape.flights,
            runs_ahead=shape.is_async,
        )
        limits = Limits(
            max_model_len=64,
            max_num_seqs=shape.seqs,
            max_num_batched_tokens=shape.budget,
            long_prefill_tokens=shape.threshold,
            plans_in_flight=shape.flights,
            async_scheduling=shape.is_async,
        )
        config = SchedulerConfig(
            scheduling_policy=shape.policy, eviction_policy="lru", prefix_caching=shape.caching, speculation=shape.speculation
        )
        self.scheduler = make_scheduler(limits, self.runner.pool, config)
        self.disk = FakeDisk(self.runner, self.scheduler)
        self.shape = shape
        self.todo = dict(enumerate(arrivals))
        self.requests = {handle: arrival.request(handle) for handle, arrival in self.todo.items()}
        self.aborts: dict[int, int] = {}
        self.output: dict[int, list[int]] = {}
        self.flights: deque[StepPlan] = deque()
        self.lacks_memory = False
        self.found: set[bytes] = set()
        """Keys by the changes so far."""
        self.next_change = 0
        self.index = PrefixIndex()
        """What a router knows."""
        self.undisturbed = {key for request in self.requests.values() for key in self.keys_of(request)}
        """Keys of prompts and right outputs; pages with rejected draft tokens have other keys."""

    def keys_of(self, request: wire.Request) -> list[bytes]:
        tokens = [*request.prompt, *(self.expected(request) if request.prompt else [])]
        return PrefixKeys(root_key("", tenant=request.tenant), self.shape.page_size).extend(tokens)

    def expected(self, request: wire.Request) -> list[int]:
        shape = self.shape
        return expected_output(request, self.scheduler.limits.max_model_len, shape.page_window, is_mixed=shape.parts > 0)

    def check_window(self) -> None:
        """Each page that a running request may still read has its tokens, once `preempt_newest` has followed `take_back`."""
        size, window = self.shape.page_size, self.shape.page_window
        for request in self.scheduler.requests.values() if window and not (self.flights or self.lacks_memory) else ():
            if request.row is not None:
                first, pages = max(0, request.num_computed - window + 1) // size, request.pages
                assert pages.num_dropped <= first and pages.part_start <= first
                for i in range(first, request.num_in_place // size):
                    assert self.runner.page(pages.ids[i]) == request.tokens[i * size : (i + 1) * size]
                    assert not self.shape.parts or self.runner.part(pages.ids[i]) == request.tokens[i * size : (i + 1) * size]

    def run(self) -> "Workload":
        for step in range(10_000):
            self.submit(step)
            self.abort(step)
            if self.shape.resizes and step % 3 == 0:
                self.scheduler.pool.host.want(1 + step * 7 % (self.shape.num_host_pages + 1), "test")
            self.disk.turn(step)
            assert self.scheduler.check() == []
            self.turn(step)
            self.check_report(step)
            if not self.todo and not self.flights and self.scheduler.is_idle():
                break
        assert self.output == {}, "unfinished requests"
        assert self.scheduler.pool.free_pages == self.shape.num_pages
        parts = self.scheduler.sharing.parts
        assert parts is None or parts.free_parts == self.shape.parts
        assert self.scheduler.is_idle()
        assert self.scheduler.backlog_tokens == 0
        return self

    def submit(self, step: int) -> None:
        max_model_len = self.scheduler.limits.max_model_len
        for handle in [handle for handle, arrival in self.todo.items() if arrival.at_step <= step]:
            arrival, request = self.todo.pop(handle), self.requests[handle]
            whole = self.expected(request) if request.prompt else []
            submitted = replace_delivered(request, whole[: arrival.delivered])
            answer = self.scheduler.submit(handle, submitted, float(step), is_held=self.disk.is_on)
            never_fits = arrival.prompt == 0 or arrival.prompt >= max_model_len
            assert (isinstance(answer, Refusal) and answer.status == 400) == never_fits
            if answer is None:
                self.disk.start(handle, step)
                self.output[handle] = list(submitted.delivered)
                if arrival.abort_after is not None:
                    self.aborts[handle] = step + arrival.abort_after

    def abort(self, step: int) -> None:
        for handle in [handle for handle, at in self.aborts.items() if at <= step]:
            del self.aborts[handle]
            self.output.pop(handle, None)
            self.disk.request_left(handle)
            self.scheduler.abort(handle)

    def check_report(self, step: int) -> None:
        """Compares the load report with a count over all requests, and the key changes with the keys."""
        load, pool = self.scheduler.load(float(step)), self.scheduler.pool
        requests = list(self.scheduler.requests.values())
        waiting, running = [r for r in requests if r.row is None], [r for r in requests if r.row is not None]
        found = [self.scheduler.sharing.find(request) for request in waiting]
        rows = {request.row for request in running}.union(*(plan.rows for plan in self.flights))
        assert (load.waiting, load.running) == (len(waiting), len(rows)), "aborted requests keep their rows in flight"
        assert load.outstanding_tokens == sum(request.outstanding_tokens for request in requests)
        assert load.waiting_prompt_tokens == sum(
            len(request.tokens) - self.scheduler.sharing.num_hit(pages) * pool.page_size
            for request, pages in zip(waiting, found, strict=True)
        )
        assert load.waiting_pages == sum(
            sum(self.scheduler.sharing.needs(request, pages)) for request, pages in zip(waiting, found, strict=True)
        )
        assert (self.shape.page_window and not self.shape.parts) or load.waiting_pages == sum(
            pool.pages_for(len(request.tokens)) - len(pages) + pool.num_unheld(pages)
            for request, pages in zip(waiting, found, strict=True)
        )
        assert load.context_tokens == sum(request.num_computed for request in running)
        assert 0 <= load.running_prompt_tokens <= sum(request.num_uncomputed for request in running)
        assert load.oldest_wait_s == max((step - request.scheduling.waits_since_s for request in waiting), default=0)
        assert load.steps_to_full is None or (load.running > 0 and load.steps_to_full >= 0)
        changes = pool.take_changes()
        assert changes.first == self.next_change
        self.next_change += len(changes.changes)
        for is_added, key in changes.changes:
            (self.found.add if is_added else self.found.remove)(key)
        assert self.found == set(pool.keys()) <= self.undisturbed
        self.check_expected_hits(changes)

    def check_expected_hits(self, changes: wire.PageChanges) -> None:
        """If pages have parts, a router expects what a waiting request would find on the device."""
        size, sharing = self.shape.page_size, self.scheduler.sharing
        if not self.shape.parts or self.shape.num_host_parts:
            return
        self.index.apply("group", KeySpace("", size), changes, PageWindow(self.shape.page_window, size).pages_before)
        for handle, request in self.scheduler.requests.items():
            if request.row is None:
                hits = self.index.hits(PromptKeys(request.tokens, self.requests[handle].tenant, ""))
                assert hits.get("group", 0) == sharing.num_hit(sharing.find(request)) * size

    def turn(self, step: int) -> None:
        """Schedules a plan. Plans are committed as late as possible."""
        if self.lacks_memory:
            if self.flights:
                self.commit()
                return
            self.scheduler.preempt_newest(float(step))
            self.lacks_memory = False
        plan = self.scheduler.schedule(float(step))
        if plan is not None and plan.step in self.shape.failures and plan.step - 1 not in self.shape.failures:
            self.runner.fail(plan)
            self.scheduler.take_back()
            self.lacks_memory = True
            return
        if plan is not None:
            assert 0 < sum(plan.counts) <= self.shape.budget
            in_flight = {row for other in self.flights for row in other.rows}
            assert self.scheduler.limits.runs_ahead or not in_flight & set(plan.rows), "plans in flight have disjoint requests"
            self.flights.append(plan)
            self.runner.start(plan)
        elif not self.flights and not self.disk.is_reading:
            assert self.scheduler.is_idle(), "no request is left without a plan"
        if plan is None or len(self.flights) == self.shape.max_flights:
            self.commit()

    def commit(self) -> None:
        if not self.flights:
            return
        before, parts_before = self.runner.num_loaded, self.runner.num_loaded_parts
        self.flights.popleft()
        result = self.runner.finish()
        num_loaded = self.runner.num_loaded - before
        result = msgspec.structs.replace(result, loaded_pages=num_loaded, load_s=num_loaded * self.shape.load_s)
        num_parts = self.runner.num_loaded_parts - parts_before
        result = msgspec.structs.replace(result, loaded_parts=num_parts, part_load_s=num_parts * self.shape.load_s)
        is_expensive = result.step // 32 % 2 and any(
            path.is_drafted for path in self.runner.plans[-1].paths
        )  # then requests pause their drafts
        result = msgspec.structs.replace(result, draft_s=0.02 if is_expensive else 0.0)
        frame = self.scheduler.commit(result, wall_s=0.01 + result.draft_s)
        for handle, index, token in zip(frame.handles, frame.indices, frame.tokens, strict=True):
            assert index == len(self.output[handle]), "indices are consecutive"
            self.output[handle].append(token)
        for end in frame.finished:
            self.aborts.pop(end.handle, None)
            request = self.requests[end.handle]
            assert self.output.pop(end.handle) == self.expected(request)
            assert 0 <= end.cached_tokens <= len(request.prompt)
        self.check_window()


def replace_delivered(request: wire.Request, delivered: list[int]) -> wire.Request:
    return msgspec.structs.replace(request, delivered=delivered)


@settings(max_examples=300, deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_pages_are_conserved_and_tokens_equal_an_undisturbed_run(arrivals: list[Arrival], shape: Shape) -> None:
    Workload(arrivals, shape).run()


@settings(max_examples=200, deadline=None)
@given(
    requests=st.integers(2, 6),
    prompt=st.integers(1, 30),
    differ=st.integers(0, 3),
    kills=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=5),
    shape=st.builds(
        Shape,
        num_pages=st.integers(12, 40),
        page_size=st.sampled_from([2, 4]),
        seqs=st.integers(2, 6),
        budget=st.integers(6, 20),
        flights=st.integers(1, 2),
        is_async=st.booleans(),
    ),
)
def test_equal_prompts_survive_aborts_of_their_writers(
    requests: int, prompt: int, differ: int, kills: list[tuple[int, int]], shape: Shape
) -> None:
    abort_steps = dict(kills)
    arrivals = [
        Arrival(0, prompt, 6, abort_after=abort_steps.get(i), common=prompt - (differ if i % 2 else 0)) for i in range(requests)
    ]
    Workload(arrivals, shape).run()


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.builds(
            Arrival,
            at_step=st.integers(0, 12),
            prompt=st.integers(25, 60),
            max_tokens=st.integers(0, 12),
            abort_after=st.none() | st.integers(0, 20),
            family=st.integers(0, 1),
            common=st.integers(20, 60),
        ),
        min_size=2,
        max_size=8,
    ),
    shape=st.builds(
        Shape,
        num_pages=st.integers(8, 40),
        page_size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(2, 5),
        budget=st.integers(5, 12),
        flights=st.integers(1, 3),
        is_async=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 20]),
        window=st.sampled_from([2, 3, 5, 8, 13]),
        num_parts=st.sampled_from([0, 4, 7, 16, 40]),
        failures=st.frozensets(st.integers(1, 40), max_size=3),
    ),
)
def test_equal_prompts_longer_than_their_pages_share_them(arrivals: list[Arrival], shape: Shape) -> None:
    Workload(arrivals, shape).run()


def test_parts_are_dropped_and_evicted_and_computed_again() -> None:
    """Of pages that some layers read whole: fewer parts than pages, so that hits end where parts are lost."""
    for num_parts, is_async in ((26, False), (30, False), (36, True)):
        arrivals = [Arrival(3 * i, 30 + 5 * (i % 3), 12, common=30, family=i % 2) for i in range(16)]
        shape = Shape(60, 2, 4, 16, is_async=is_async, window=8, num_parts=num_parts)
        scheduler = Workload(arrivals, shape).run().scheduler
        parts = scheduler.sharing.parts
        assert parts is not None and parts.num_dropped > 100 and parts.num_evicted > 20
        assert 100 < scheduler.sharing.hit_tokens < 16 * 30
        assert scheduler.pool.counters.hits > 16 * 12, "pages are found whose parts are lost"


def test_parts_come_back_from_host_memory() -> None:
    """Without host memory the same requests compute their windows again."""
    for is_async in (False, True):
        arrivals = [Arrival(4 * i, 34, 6, common=30, family=i % 5) for i in range(40)]
        shape = Shape(50, 2, 4, 16, is_async=is_async, window=8, num_parts=24)
        without = Workload(arrivals, shape).run()
        run = Workload(arrivals, replace(shape, num_host_pages=80, num_host_parts=40)).run()
        load = run.scheduler.load()
        assert load.host_total_parts == 40 and load.host_loaded_parts == run.runner.num_loaded_parts > 40
        assert load.host_stored_parts >= run.runner.num_stored_parts > 40 and run.runner.num_loaded > 20
        assert run.scheduler.sharing.hit_tokens > 1.3 * without.scheduler.sharing.hit_tokens


@pytest.mark.parametrize("num_parts", [0, 24])
def test_pages_and_parts_come_back_from_disk(num_parts: int) -> None:
    """Host memory holds the prefixes of two families of seven; without a disk the others compute them again."""
    for is_async in (False, True):
        arrivals = [Arrival(6 * i, 34, 6, common=30, family=i % 7) for i in range(56)]
        shape = Shape(50, 2, 4, 16, is_async=is_async, window=8 if num_parts else 0, num_parts=num_parts)
        shape = replace(shape, num_host_pages=40, num_host_parts=20)
        without = Workload(arrivals, shape).run()
        run = Workload(arrivals, replace(shape, has_disk=True)).run()
        counters, load = run.scheduler.sharing.disk.counters, run.scheduler.load()
        assert run.disk.num_waits > 10 and counters.fetched > 40 and counters.failed > 0
        assert load.disk_fetched_parts == counters.fetched_parts and (counters.fetched_parts > 15) == (num_parts > 0)
        assert (load.disk_cached_parts > 15) == (num_parts > 0)
        assert run.scheduler.sharing.hit_tokens > 1.2 * without.scheduler.sharing.hit_tokens


def test_part_of_a_copied_page_is_not_evicted() -> None:
    """Five parts: the page with the equal start has the oldest one, which the request that copies it gets."""
    prompts = (0, 17, 6), (1, 30, 9), (0, 10, 1)
    arrivals = [Arrival(*prompt, family=1, common=33) for prompt in prompts]
    shape = Shape(25, 4, 1, 7, window=13, num_parts=5, num_host_parts=40)
    assert Workload(arrivals, shape).run().scheduler.sharing.hit_tokens > 0


def test_loading_request_has_a_part_to_compute_in() -> None:
    """Another request has all other parts when it starts, and its plan is in flight."""
    prompts = (0, 11, 1, 11), (11, 32, 6, 31), (52, 35, 13, 35), (49, 21, 3, 21), (0, 29, 3, 29)
    arrivals = [
        Arrival(at, prompt, output, common=common, family=2 + (at + prompt == 11)) for at, prompt, output, common in prompts
    ]
    shape = Shape(19, 4, 5, 11, speculation=SPECULATIONS[6], is_async=True, window=8, num_parts=7, num_host_parts=40)
    run = Workload(arrivals, shape).run().runner
    assert run.num_loaded_parts > 0


def test_tiny_pool_preempts_and_keeps_the_tokens() -> None:
    shape = Shape(14, 2, 5, 16)
    for policy in SCHEDULING_POLICIES:
        for common in (0, 4):
            arrivals = [Arrival(0, 6, 20, common=common, tenant=i % 2) for i in range(5)]
            scheduler = Workload(arrivals, replace(shape, policy=policy)).run().scheduler
            assert scheduler.num_preemptions > 0


def test_host_tier_brings_pages_back_and_keeps_the_tokens() -> None:
    """Copies are executed as late as the plans allow."""
    for speculation in (NO_SPECULATION, SPECULATIONS[1], SPECULATIONS[4]):
        for is_async in (False, True):
            arrivals = [Arrival(3 * i, 17, 5, common=17, family=i % 4) for i in range(32)]
            shape = Shape(32, 2, 4, 16, speculation=speculation, is_async=is_async, num_host_pages=30)
            run = Workload(arrivals, shape).run()
            host = run.scheduler.pool.host
            assert run.runner.num_loaded == host.counters.loaded > 20
            assert run.runner.num_stored >= host.counters.loaded / 2
            assert 0 < run.runner.num_awaited < sum(bool(plan.host_copies) for plan in run.runner.plans)
            assert run.scheduler.load().host_loaded_pages == host.counters.loaded


def test_host_tier_of_changing_size_keeps_the_tokens() -> None:
    for is_async in (False, True):
        arrivals = [Arrival(3 * i, 17, 5, common=17, family=i % 4) for i in range(32)]
        run = Workload(arrivals, Shape(32, 2, 4, 16, is_async=is_async, num_host_pages=40, resizes=True)).run()
        assert run.runner.num_resized > 20 and run.runner.num_moved > 20
        assert run.runner.num_loaded == run.scheduler.pool.host.counters.loaded > 20


def test_slots_for_parts_follow_those_for_pages() -> None:
    for is_async in (False, True):
        arrivals = [Arrival(4 * i, 34, 6, common=30, family=i % 5) for i in range(40)]
        shape = Shape(
            50, 2, 4, 16, is_async=is_async, window=8, num_parts=24, num_host_pages=120, num_host_parts=60, resizes=True
        )
        run = Workload(arrivals, shape).run()
        host, parts = run.scheduler.pool.host, run.scheduler.pool.host_parts
        assert run.runner.num_resized_parts > 20 and parts.counters.moved > 5
        assert run.runner.num_loaded_parts == parts.counters.loaded > 10 and host.counters.loaded > 20
        assert abs(parts.num_slots - max(10, host.num_slots // 2)) <= 1, (
            "those of two windows, else as many per page as the limits"
        )


def test_slow_loads_are_declined() -> None:
    arrivals = [Arrival(6 * i, 17, 5, common=17, family=i % 3) for i in range(40)]
    run = Workload(arrivals, Shape(18, 2, 4, 16, num_host_pages=24, load_s=10.0)).run()
    assert run.scheduler.pool.host.counters.declined > run.scheduler.pool.host.counters.loaded > 0


def test_plans_with_pending_tokens_keep_the_tokens() -> None:
    """Asynchronous scheduling. A request that stops early has one more token computed, one that reaches its length has not."""
    shape = Shape(14, 2, 5, 16, is_async=True)
    for policy in SCHEDULING_POLICIES:
        arrivals = [Arrival(0, 6, 20, common=4, tenant=i % 2) for i in range(5)]
        run = Workload(arrivals, replace(shape, policy=policy)).run()
        assert run.scheduler.num_preemptions > 0 and run.scheduler.sharing.hit_tokens > 0
        assert run.runner.num_pending > 40
        assert run.scheduler.load().wasted_tokens == 0
    first = expected_output(Arrival(0, 6, 20).request(0))
    run = Workload([Arrival(0, 6, 20, stop=first[3])], shape).run()
    assert run.scheduler.load().wasted_tokens == 1


@settings(max_examples=50, deadline=None)
@given(arrivals=ARRIVALS, shape=SHAPES)
def test_the_same_workload_gives_the_same_plans(arrivals: list[Arrival], shape: Shape) -> None:
    once, twice = Workload(arrivals, shape).run(), Workload(arrivals, shape).run()
    assert once.runner.plans == twice.runner.plans


def test_multi_step_runs_free_pages_and_keep_the_tokens() -> None:
    """Every third draft is wrong, with drafts across page ends, preemptions and shared pages."""
    for speculation in (*SPECULATIONS[1:3], *SPECULATIONS[4:6]):
        for common in (0, 4):
            arrivals = [Arrival(i, 6, 25, common=common) for i in range(5)]
            run = Workload(arrivals, Shape(16, 2, 5, 40, speculation=speculation)).run()
            assert run.scheduler.num_preemptions > 0
            assert any(plan.truncations for plan in run.runner.plans)
            assert 0.2 < run.runner.num_accepted / run.runner.num_proposed < 0.95
            assert bool(run.runner.num_branched > 3) == bool(speculation.tree.widths), "other branches than the first are sampled"
            assert bool(any(plan.relocations for plan in run.runner.plans)) == bool(speculation.tree.widths)
            assert bool(any(plan.backfills for plan in run.runner.plans)) == (speculation.method == "draft")
            counts = run.scheduler.speculator.counts()
            assert counts.branched == run.runner.num_branched
            assert counts.saved <= sum(counts.accepted) == run.runner.num_accepted
            assert sum(counts.drafted) == sum(path.depth for plan in run.runner.plans for path in plan.paths)


def test_draft_tokens_preempt_no_request_and_take_no_page() -> None:
    """Requests that just fit the pool are not preempted with draft tokens either."""
    drafts = SpeculationConfig(method="draft", num_tokens=16, is_adaptive=False, draft_methods=DRAFTS)
    for speculation in (NO_SPECULATION, drafts, replace(drafts, tree=Tree([2, 2, 2], "static"))):
        arrivals = [Arrival(0, 7, 9) for _ in range(4)]
        run = Workload(arrivals, Shape(16, 4, 4, 60, speculation=speculation)).run()
        assert run.scheduler.num_preemptions == 0
    assert run.runner.num_accepted > 0


def test_strays_of_a_plan_without_memory_are_computed_again() -> None:
    """The failed plan moves an accepted token of another branch, which fills its page."""
    arrivals = [Arrival(3, 2, 7), Arrival(0, 1, 24, family=1, common=8)]
    shape = Shape(4, 4, 3, 15, policy="deadline", flights=3, speculation=SPECULATIONS[5], failures=frozenset({3}))
    undisturbed = Workload(arrivals, replace(shape, failures=frozenset())).run().runner.plans[2]
    assert undisturbed.step == 3 and undisturbed.relocations
    Workload(arrivals, shape).run()


@pytest.mark.parametrize("speculation", [SPECULATIONS[1], SPECULATIONS[4]], ids=["chain", "tree"])
def test_pages_filled_by_draft_tokens_are_found_later(speculation: SpeculationConfig) -> None:
    shape = Shape(40, 4, 1, 40, speculation=speculation)
    first = Workload([Arrival(0, 6, 24)], shape)
    first.run()
    assert first.runner.num_accepted > 6
    tokens = [*first.requests[0].prompt, *expected_output(first.requests[0])]
    later = msgspec.structs.replace(first.requests[0], prompt=[*tokens, 1, 2])
    assert first.scheduler.submit(7, later) is None
    plan = first.scheduler.schedule(1.0)
    assert plan is not None and plan.starts == [(len(tokens) - 1) // 4 * 4]
