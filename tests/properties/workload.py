"""Random workloads for the scheduler, checked at every step.

Pages are conserved, requests progress, and tokens equal those of an undisturbed run: the fake runner samples from the contents of
page slots, so a page that is shared before it is written, or written twice with different tokens, gives other tokens.
"""

from collections import deque
from dataclasses import dataclass

import msgspec
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
        self.on_disk: set[bytes] = set()
        """Keys of pages that only the disk has."""
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
        for i, (is_added, key) in enumerate(changes.changes):
            (self.found.add if is_added else self.found.discard)(key)
            (self.on_disk.add if i in changes.on_disk else self.on_disk.discard)(key)
        assert self.shape.parts or self.on_disk == self.scheduler.sharing.disk.keys - self.found
        assert self.found == set(pool.keys()) <= self.undisturbed
        self.check_expected_hits(changes)

    def check_expected_hits(self, changes: wire.PageChanges) -> None:
        """A router expects what a waiting request would find: with parts on the device, without in host memory too."""
        size, sharing, host = self.shape.page_size, self.scheduler.sharing, self.scheduler.pool.host
        if self.shape.num_host_parts if self.shape.parts else self.shape.page_window or not self.shape.caching:
            return
        hit_pages = PageWindow(self.shape.page_window, size).pages_before if self.shape.parts else 0
        self.index.apply("group", KeySpace("", size), changes, hit_pages, has_gaps=self.shape.num_host_pages > 0)
        for handle, request in self.scheduler.requests.items():
            if request.row is None:
                found = sharing.find(request)
                num_found = sharing.num_hit(found)
                if not self.shape.parts:
                    keys = request.pages.keys.extend(request.tokens)[: (len(request.tokens) - 1) // size]
                    num_found += len(host.match(keys[len(found) :]))
                hits = self.index.hits(PromptKeys(request.tokens, self.requests[handle].tenant, ""))
                assert min(hits.get("group", 0), (len(request.tokens) - 1) // size * size) == num_found * size

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
