"""Moves of requests between two schedulers at random steps, some of them cancelled.

The fake runner samples from the contents of page slots, so a page that did not arrive, or has another owner, gives other tokens.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.engine_config import SCHEDULING_POLICIES, SchedulingPolicy
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.reservations import Reservation
from phalanx_runtime.core.scheduling.scheduler import RunningRequest
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_backfill import drafted_when_sent
from phalanx_runtime.core.step_plan import StepPlan
from tests.examples import examples
from tests.runtime.fake_runner import VOCAB, FakeRunner, expected_output, make_request

End = Literal["move", "thaw", "drop", "replay", "lose"]
"""A completed move; one cancelled before or after all pages arrived; one with late pages; one with an aborted source."""


@dataclass(frozen=True)
class Order:
    """A move of a request to the other group: prepared at a step, frozen `copies` steps later, decided `wait` steps later."""

    at_step: int
    handle: int
    copies: int
    wait: int
    end: End
    ahead: int = 16


@dataclass(frozen=True)
class Shape:
    tokens: int
    page_size: int
    seqs: int
    flights: int
    policy: SchedulingPolicy
    caching: bool
    drafts: bool = False
    is_async: bool = False
    num_host_pages: int = 0
    window: int = 0
    """Tokens that a layer reads; 0: all. Requests with a draft model keep all pages."""

    @property
    def page_window(self) -> int:
        return 0 if self.drafts else self.window


@dataclass
class Moving:
    """A move in progress."""

    order: Order
    name: str
    source: int
    reservation: Reservation
    num_preemptions: int
    copied: int
    freeze_at: int
    decide_at: int | None = None
    drafted: int | None = None


@dataclass
class Side:
    """One group."""

    shape: Shape
    flights: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_pages = -(-self.shape.tokens // self.shape.page_size)
        self.runner = FakeRunner(
            num_pages, self.shape.page_size, num_host_pages=self.shape.num_host_pages, window=self.shape.page_window
        )
        limits = Limits(
            max_model_len=64,
            max_num_seqs=self.shape.seqs,
            max_num_batched_tokens=24,
            plans_in_flight=self.shape.flights,
            async_scheduling=self.shape.is_async,
        )
        speculation = SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=frozenset({"draft"}))
        config = SchedulerConfig(scheduling_policy=self.shape.policy, eviction_policy="lru", prefix_caching=self.shape.caching)
        config = replace(config, speculation=speculation) if self.shape.drafts else config
        self.scheduler = make_scheduler(limits, self.runner.pool, config)


class World:
    """Two groups, requests at the first, and moves, checked at every step."""

    def __init__(self, prompts: list[tuple[int, int, int]], orders: list[Order], shape: Shape) -> None:
        self.sides = [Side(shape), Side(shape)]
        self.requests = {i: self._request(i, *prompt) for i, prompt in enumerate(prompts)}
        self.at = dict.fromkeys(self.requests, 0)
        self.output: dict[int, list[int]] = {i: [] for i in self.requests}
        self.orders = list(orders)
        self.moving: list[Moving] = []
        self.num_moved = self.num_held = self.num_aborted = 0

    def _request(self, number: int, own: int, common: int, max_tokens: int) -> wire.Request:
        prompt = [(5 * i * i) % VOCAB for i in range(common)] + [(number * 11 + 7 * i) % VOCAB for i in range(own)]
        request = make_request(prompt, max_tokens, seed=number)
        speculation = (Speculation(), Speculation("none"), Speculation("ngram"))[number % 3]  # some pages lack the draft's KV
        return msgspec.structs.replace(request, speculation=speculation if self.sides[0].shape.drafts else Speculation())

    def run(self) -> "World":
        for handle, request in self.requests.items():
            assert self.sides[0].scheduler.submit(handle, request) is None
        for step in range(5000):
            self._start(step)
            for moving in list(self.moving):
                self._advance(moving, step)
            for side, group in enumerate(self.sides):
                assert group.scheduler.check() == []
                self._turn(side, group, step)
            if not self.output and not self.moving and not any(group.flights for group in self.sides):
                break
        assert not self.output, "unfinished requests"
        for group in self.sides:
            assert group.scheduler.is_idle()
            assert group.scheduler.pool.free_pages == group.runner.pool.num_pages
        return self

    def _start(self, step: int) -> None:
        for order in [order for order in self.orders if order.at_step <= step]:
            self.orders.remove(order)
            source = self.at.get(order.handle, 0)
            held = self.sides[source].scheduler.running_request(order.handle)
            if order.handle not in self.output or held is None or any(m.order.handle == order.handle for m in self.moving):
                continue
            target, name = self.sides[1 - source].scheduler, f"m{order.at_step}-{order.handle}"
            before = target.pool.free_pages
            answer = target.reservations.reserve(name, self._current(order.handle), len(self._tokens(order.handle)) + order.ahead)
            if isinstance(answer, Refusal):
                assert target.pool.free_pages == before
                continue
            self.num_held += answer.num_held - answer.pages.count(NULL_PAGE)
            self.sides[source].scheduler.pin(order.handle, True)
            self.moving.append(Moving(order, name, source, answer, held.num_preemptions, answer.num_held, step + order.copies))

    def _current(self, handle: int) -> wire.Request:
        request = self.requests[handle]
        return msgspec.structs.replace(request, epoch=1, delivered=list(self.output[handle]))

    def _tokens(self, handle: int) -> list[int]:
        return self.requests[handle].prompt + self.output[handle]

    def _advance(self, moving: Moving, step: int) -> None:
        order, source = moving.order, self.sides[moving.source].scheduler
        held = source.running_request(order.handle) if self.at.get(order.handle) == moving.source else None
        if held is None or held.num_preemptions != moving.num_preemptions or order.handle not in self.output:
            self._cancel(moving)
        elif moving.decide_at is None and step < moving.freeze_at:
            self._copy(moving, held, held.num_computed // self.sides[0].shape.page_size)
        elif moving.decide_at is None:
            assert source.freeze(order.handle)
            moving.decide_at = step + order.wait
        elif held.is_settled and step >= moving.decide_at:
            self._decide(moving, held)

    def _decide(self, moving: Moving, held: RunningRequest) -> None:
        computed = held.num_computed
        handle, source = moving.order.handle, self.sides[moving.source].scheduler
        target = self.sides[1 - moving.source].scheduler
        self._copy(moving, held, -(-computed // self.sides[0].shape.page_size))
        target.reservations.set_drafted(moving.name, moving.drafted or 0)
        has_room = computed <= len(moving.reservation.pages) * self.sides[0].shape.page_size
        if moving.order.end in ("move", "drop") and has_room:
            target.reservations.set_arrived(moving.name, computed)
        if moving.order.end in ("thaw", "drop") or moving.order.end == "lose":
            source.thaw(handle)
            self._cancel(moving)
            return
        request = self._current(handle)
        assert target.submit(handle, request, move=moving.name) is None
        arrived = target.running_request(handle)
        if target.reservations.get(moving.name) is None:
            assert moving.order.end == "move"
            assert arrived is not None
            assert arrived.num_computed >= computed, "arrived tokens are not computed again"
            self.num_moved += 1
        source.abort(handle)
        self.at[handle] = 1 - moving.source
        self._cancel(moving)

    def _cancel(self, moving: Moving) -> None:
        source, target = self.sides[moving.source].scheduler, self.sides[1 - moving.source].scheduler
        if self.at.get(moving.order.handle) == moving.source:
            source.thaw(moving.order.handle)
            source.pin(moving.order.handle, False)
            if moving.order.end == "lose" and moving.order.handle in self.output:
                source.abort(moving.order.handle)
                del self.output[moving.order.handle]
                self.num_aborted += 1
        target.reservations.drop(moving.name)
        self.moving.remove(moving)

    def _copy(self, moving: Moving, held: RunningRequest, end: int) -> None:
        """Copies pages as they are after all plans in flight, which the ranks compute before they send."""
        size, end = self.sides[0].shape.page_size, min(end, len(moving.reservation.pages))
        if end > moving.copied:
            moving.drafted = drafted_when_sent(moving.drafted, moving.copied * size, end * size, held.num_drafted)
        source, target = deepcopy(self.sides[moving.source].runner), self.sides[1 - moving.source].runner
        for plan in self.sides[moving.source].flights:
            source.run(plan)
        for i in range(moving.copied, end):
            moving.copied = i + 1
            if held.pages[i] == NULL_PAGE:
                continue
            target.put(moving.reservation.pages[i], source.page(held.pages[i]), source.drafted_page(held.pages[i]))

    def _turn(self, side: int, group: Side, step: int) -> None:
        plan = group.scheduler.schedule(float(step))
        if plan is not None:
            group.flights.append(plan)
        if group.flights and (plan is None or len(group.flights) == group.scheduler.limits.max_flights):
            frame = group.scheduler.commit(group.runner.run(group.flights.pop(0)), wall_s=0.01)
            frozen = {m.order.handle for m in self.moving if m.source == side and m.decide_at is not None}
            for handle, index, token in zip(frame.handles, frame.indices, frame.tokens, strict=True):
                if self.at[handle] != side:
                    raise AssertionError("a request continues at its source")
                assert index == len(self.output[handle]), "indices are consecutive"
                assert handle not in frozen or group.shape.flights > 0
                self.output[handle].append(token)
            for end in frame.finished:
                limit = group.scheduler.limits.max_model_len
                whole = expected_output(self.requests[end.handle], limit, group.shape.page_window)
                assert self.output.pop(end.handle) == whole


PROMPTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 16), st.integers(1, 25)), min_size=1, max_size=6)
ORDERS = st.lists(
    st.builds(
        Order,
        at_step=st.integers(0, 40),
        handle=st.integers(0, 5),
        copies=st.integers(0, 5),
        wait=st.integers(0, 5),
        ahead=st.integers(0, 16),
        end=st.sampled_from(["move", "move", "move", "thaw", "drop", "replay", "lose"]),
    ),
    max_size=10,
)
SHAPES = st.builds(
    Shape,
    tokens=st.integers(40, 120),
    page_size=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 5),
    flights=st.integers(1, 3),
    policy=st.sampled_from(SCHEDULING_POLICIES),
    caching=st.booleans(),
    drafts=st.booleans(),
    is_async=st.booleans(),
    num_host_pages=st.sampled_from([0, 2, 30]),
    window=st.sampled_from([0, 0, 2, 5, 9, 14]),
)


SHARES_A_PAGE_IN_FLIGHT = {
    "prompts": [(1, 3, 1), (20, 0, 1), (1, 1, 2)],
    "orders": [Order(2, 2, 1, 0, "move", 0)],
    "shape": Shape(40, 1, 3, 3, "fcfs", True),
}
"""The third request is copied while a plan in flight writes a page that it shares."""


@settings(max_examples=examples(200), deadline=None)
@given(prompts=PROMPTS, orders=ORDERS, shape=SHAPES)
@example(**SHARES_A_PAGE_IN_FLIGHT)
def test_moves_at_any_step_lose_no_page_or_token(prompts: list[tuple[int, int, int]], orders: list[Order], shape: Shape) -> None:
    World(prompts, orders, shape).run()


@settings(max_examples=30, deadline=None)
@given(prompts=PROMPTS, orders=ORDERS, shape=SHAPES)
def test_the_same_moves_give_the_same_plans(prompts: list[tuple[int, int, int]], orders: list[Order], shape: Shape) -> None:
    once, twice = World(prompts, orders, shape).run(), World(prompts, orders, shape).run()
    assert [side.runner.plans for side in once.sides] == [side.runner.plans for side in twice.sides]


@pytest.mark.parametrize("is_async", [False, True])
def test_crowd_moves_back_and_shares_existing_pages(is_async: bool) -> None:
    orders = [Order(4 + 6 * turn + i, i, i % 3, 1, "move") for turn in range(3) for i in range(4)]
    world = World([(4 + i, 16, 25) for i in range(4)], orders, Shape(240, 4, 5, 1, "fcfs", caching=True, is_async=is_async)).run()
    assert world.num_moved >= 8
    assert world.num_held > 0
    assert all((side.runner.num_pending > 0) == is_async for side in world.sides)


def test_moves_send_no_page_that_was_dropped() -> None:
    orders = [Order(6 + 6 * turn + i, i, i % 3, 1, "move") for turn in range(3) for i in range(4)]
    shape = Shape(120, 4, 5, 1, "fcfs", caching=True, window=9)
    world = World([(14 + i, 16, 25) for i in range(4)], orders, shape).run()
    assert world.num_moved >= 8
    windowed = [side.scheduler.sharing.windowed for side in world.sides]
    assert all(pages is not None and pages.num_dropped > 10 for pages in windowed)


def test_moved_draft_reuses_its_pages_and_computes_the_rest() -> None:
    """Some requests have no drafts, and others share their pages; the fake draft asserts that it has all tokens."""
    orders = [Order(4 + 6 * turn + i, i, i % 3, 1, "move") for turn in range(3) for i in range(6)]
    world = World([(4 + i, 16, 25) for i in range(6)], orders, Shape(360, 4, 6, 1, "fcfs", caching=True, drafts=True)).run()
    assert world.num_moved >= 8
    runners = [side.runner for side in world.sides]
    assert any(plan.backfills for runner in runners for plan in runner.plans)
    assert all(runner.num_accepted > 0 for runner in runners)


def test_request_awaiting_its_grammar_stays_frozen() -> None:
    scheduler = make_scheduler(
        Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24), FakeRunner(16, 4).pool, SchedulerConfig()
    )
    request = make_request(5, 6)
    assert isinstance(scheduler.reservations.reserve("m", request, len(request.prompt) + 16), Reservation)
    assert scheduler.submit(1, request, move="m", is_held=True) is None
    scheduler.thaw(1)  # a cancelled move to another group
    assert scheduler.is_blocked() and scheduler.schedule() is None
    scheduler.release(1)
    assert scheduler.schedule() is not None
