"""The queue: order, bounds, late binding, requeueing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.late_binding import Dispatch, DispatchInputs, UnstartedRequest, find_requeues, is_open, next_dispatch
from phalanx_router.routing.queue import QueueBounds, QueuedRequest, RequestQueue, check_bounds, predict_drain_s
from phalanx_router.routing.view import GroupView
from tests.router.views import STEP_MODEL, make_group_view


def waiting(
    ticket: int, tenant: str = "", priority: int = 0, started: bool = False, prompt: int = 100, at: float = 0.0, kind: str = ""
) -> QueuedRequest:
    return QueuedRequest(
        ticket=ticket,
        demand=RequestDemand(prompt, 50),
        arrived_at=at,
        tenant=tenant,
        priority=priority,
        has_started=started,
        kind=kind,
    )


def group(
    key: str, waits: int = 0, queued: int = 0, unreported: int = 0, running: int = 0, used: int = 0, **more: object
) -> GroupView:
    return make_group_view(
        key,
        step_model=STEP_MODEL,
        waiting=waits,
        queued_prompt_tokens=queued,
        unreported=unreported,
        running=running,
        used_pages=used,
        total_pages=1000,
        max_num_seqs=32,
        **more,
    )


def known(*views: GroupView, hits: Mapping[str, int] | None = None, excluded: Sequence[str] = ()) -> DispatchInputs:
    return DispatchInputs(lambda _: views, lambda _: hits or {}, lambda _: frozenset(excluded))


def test_the_order_of_turns() -> None:
    queue = RequestQueue()
    for entry in (
        waiting(1, "a", 5), waiting(2, "a"), waiting(3, "a"), waiting(4, "b"), waiting(5, started=True), waiting(6, "b", -1),
    ):  # fmt: skip
        queue.add(entry)
    queue.charge("a", 10, 0)
    assert [entry.ticket for entry in queue.in_order()] == [5, 6, 4, 2, 3, 1]
    assert (len(queue), queue.num_unstarted, queue.prompt_tokens, queue.bands) == (6, 5, 500, [-1, 0, 5])
    assert queue.remove(2) and not queue.remove(2)
    queue.add(waiting(2, "a"))
    assert [entry.ticket for entry in queue.in_order()] == [5, 6, 4, 2, 3, 1], "one that comes back has its old place"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), min_size=1, max_size=120))
def test_tenants_get_equal_shares_while_they_wait(events: list[tuple[str, int, bool]]) -> None:
    """Counters of two waiting tenants differ by at most the largest request (Sheng et al., theorem)."""
    queue, given_tokens = RequestQueue(), {"a": 0, "b": 0}
    for ticket in range(400):
        queue.add(waiting(ticket + 1, "ab"[ticket % 2], prompt=1 + ticket % 50))
    for ticket, (tenant, prompt, _) in enumerate(events, 1000):
        queue.add(waiting(ticket, tenant, prompt=prompt))
        turn = next(queue.in_order())
        queue.remove(turn.ticket)
        queue.charge(turn.tenant, turn.demand.prompt_tokens, 0)
        if turn.tenant in given_tokens:
            given_tokens[turn.tenant] += turn.demand.prompt_tokens
            assert abs(given_tokens["a"] - given_tokens["b"]) <= 100


def test_a_tenant_that_was_away_earns_nothing_by_it() -> None:
    queue = RequestQueue()
    for ticket in range(1, 20):
        queue.add(waiting(ticket, "steady"))
    for ticket in range(1, 10):
        queue.remove(ticket)
        queue.charge("steady", 100, 0)
    for ticket in range(20, 40):
        queue.add(waiting(ticket, "late"))
    turns = []
    for _ in range(8):
        turn = next(queue.in_order())
        turns.append(turn.tenant)
        queue.remove(turn.ticket)
        queue.charge(turn.tenant, 100, 0)
    assert turns.count("late") == 4


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc"), st.integers(-1, 1), st.booleans(), st.booleans()), max_size=80)
)
def test_queue_contains_added_requests_not_yet_removed(events: list[tuple[int, str, int, bool, bool]]) -> None:
    queue, held = RequestQueue(), dict[int, QueuedRequest]()
    for ticket, tenant, priority, started, leaves in events:
        if leaves:
            assert queue.remove(ticket) == (held.pop(ticket, None) is not None)
        elif ticket not in held:
            held[ticket] = waiting(ticket, tenant, priority, started, prompt=ticket)
            queue.add(held[ticket])
        newcomers = [entry for entry in held.values() if not entry.has_started]
        assert (len(queue), queue.num_unstarted) == (len(held), len(newcomers))
        assert queue.prompt_tokens == sum(entry.demand.prompt_tokens for entry in newcomers)
        assert {entry.ticket for entry in queue.in_order()} <= held.keys()
        assert not held or next(queue.in_order()).has_started == any(entry.has_started for entry in held.values())
        last = queue.last()
        assert (last is None) == (not newcomers)
        assert last is None or last.priority == max(entry.priority for entry in newcomers)


@pytest.mark.parametrize(
    ("view", "open"),
    [
        (group("idle"), True),
        (group("runs", running=20, queued=500), True),
        (group("two wait", waits=2, running=32), False),
        (group("one waits", waits=1, running=32), True),
        (group("one waits, one is on its way", waits=1, unreported=1, running=32), False),
        (group("rows full", unreported=3, running=32), False),
        (group("backlog", unreported=3, queued=5000), False),
        (group("pages full", unreported=2, used=1000), False),
        (group("many on their way, all fit", unreported=9, running=9, queued=600), True),
        (group("stale", waits=9, state="degraded"), True),
        (group("not yet reported", has_report=False, unreported=9), True),
        (group("not yet reported, much is on its way", has_report=False, unreported=9, queued=5000), False),
        (group("should have reported", has_report=False, unreported=9, queued=5000, state="degraded"), True),
    ],
    ids=lambda value: value.key if isinstance(value, GroupView) else "",
)
def test_late_binding_opens_a_group(view: GroupView, open: bool) -> None:
    assert is_open(view) == open


def sent(found: Dispatch | None) -> tuple[int, str] | None:
    return None if found is None else (found.queued.ticket, found.choice.key)


FULL = group("full", waits=2, running=32, queued=4000)


def test_waiting_request_goes_to_a_group_with_space() -> None:
    queue = RequestQueue()
    queue.add(waiting(1))
    assert next_dispatch(queue, known(FULL), 0.0, 0.0) is None
    assert sent(next_dispatch(queue, known(FULL, group("free")), 0.0, 0.0)) == (1, "free")
    assert next_dispatch(queue, known(FULL, group("free"), excluded=["free"]), 0.0, 0.0) is None
    queue.add(waiting(2, started=True))
    assert sent(next_dispatch(queue, known(FULL), 0.0, 0.0)) == (2, "full"), "a started stream goes at once"


def test_streams_without_matching_weights_block_no_other() -> None:
    """They wait for minutes: the last group of an old revision died, and the new revision has other weights."""
    queue = RequestQueue()
    for ticket in range(1, 101):
        queue.add(waiting(ticket, tenant=str(ticket % 40), started=ticket <= 50, kind="old" if ticket <= 50 else "new"))
    queue.add(waiting(200, started=True, kind="new"))
    views = DispatchInputs(lambda entry: [group("new")] if entry.kind == "new" else [], lambda _: {}, lambda _: frozenset())
    served = []
    while (found := next_dispatch(queue, views, 0.0, 0.0)) is not None:
        queue.remove(found.queued.ticket)
        served.append(found.queued.ticket)
    assert served == [200, *range(51, 101)]
    assert (len(queue), queue.num_unstarted) == (50, 0)


def test_request_waits_for_the_group_with_its_prefix() -> None:
    queue = RequestQueue()
    queue.add(waiting(1, prompt=9000))
    home, away = group("home", waits=2, running=32, queued=1000), group("away")
    views = known(home, away, hits={"home": 8992})
    assert next_dispatch(queue, views, 0.5, 0.0) is None
    assert sent(next_dispatch(queue, views, 1.5, 0.0)) == (1, "away")
    queue.add(waiting(2, prompt=100, at=0.5))
    assert sent(next_dispatch(queue, known(home, away, hits={}), 0.5, 0.0)) == (1, "away")


def test_reserved_space_counts_for_requests_behind() -> None:
    queue = RequestQueue()
    for ticket in range(1, 9):
        queue.add(waiting(ticket, tenant=str(ticket), prompt=6000))
    home, away = group("home", waits=2, running=32, queued=100), group("away")
    assert sent(next_dispatch(queue, known(home, away, hits={"home": 4000}), 0.0, 0.0)) == (2, "away")


@pytest.mark.parametrize(
    ("queued", "bounds", "priority", "displaced", "why"),
    [
        (3, QueueBounds(4, 10_000), 0, None, None),
        (4, QueueBounds(4, 10_000), 0, None, "4 requests are queued already"),
        (4, QueueBounds(4, 10_000), 9, None, "4 requests are queued already"),
        (4, QueueBounds(4, 10_000), -1, 4, "4 requests are queued already"),
        (3, QueueBounds(4, 350), 0, None, "requests with 300 prompt tokens are queued already"),
        (0, QueueBounds(4, 50), 0, None, None),
    ],
    ids=["room", "full", "full for the less urgent", "full, but more urgent", "too many tokens", "alone"],
)
def test_the_queue_is_bounded(queued: int, bounds: QueueBounds, priority: int, displaced: int | None, why: str | None) -> None:
    queue = RequestQueue()
    for ticket in range(1, queued + 1):
        queue.add(waiting(ticket))
    queue.add(waiting(100, started=True))
    full = check_bounds(queue, waiting(200, priority=priority), bounds)
    assert (full.why if full else None) == why
    assert (full.displaced.ticket if full and full.displaced else None) == displaced


def test_retry_after_is_the_time_to_drain() -> None:
    queue = RequestQueue()
    for ticket in range(1, 101):
        queue.add(waiting(ticket, prompt=2000))
    one, two = (
        predict_drain_s(queue, [group("a", running=8)]),
        predict_drain_s(queue, [group("a", running=8), group("b", running=8)]),
    )
    assert one is not None
    assert two == pytest.approx(one / 2)
    assert one == pytest.approx(100 * 2000 * group("a", running=8).token_s + 100 * 50 * group("a", running=8).itl_s / 8)
    assert predict_drain_s(queue, []) is None
    attends = replace(group("a", running=8), step_model=replace(STEP_MODEL, attention_s=1e-7))
    assert predict_drain_s(queue, [attends]) == pytest.approx(one + 100 * 1e-7 * 2000**2 / 2)
    for ticket in range(1, 101):
        queue.remove(ticket)
    assert (queue.prompt_tokens, queue.attention) == (0, 0)


def taken_back(own: GroupView, *takers: GroupView, now: float = 1.0) -> list[int]:
    """Tickets taken back from seven requests in `own`, with candidates `takers`."""
    requests = [UnstartedRequest(waiting(ticket), own.key, sent_at=ticket / 100) for ticket in range(1, 8)]
    return [found.unstarted.queued.ticket for found in find_requeues(requests, [own, *takers], known(*takers), now)]


def test_unstarted_requests_move_to_a_much_better_group() -> None:
    slow, free = group("slow", waits=3, running=32, queued=30_000), group("free")
    assert taken_back(slow, slow, free) == [7, 6, 5]
    assert taken_back(slow, slow, free, now=0.3) == []
    assert taken_back(slow, slow, group("free", queued=29_000)) == []
    assert taken_back(slow, slow) == []
    many = group("slow", waits=9, running=32, queued=30_000)
    assert len(taken_back(many, many, free)) == 4


def test_requests_leave_a_group_that_is_being_evacuated() -> None:
    """The group is not among the candidates."""
    slow, free = group("slow", waits=3, running=32, queued=30_000, is_draining=True), group("free")
    assert taken_back(slow, free) == [7, 6, 5]
    assert taken_back(slow) == []
    requests = [UnstartedRequest(waiting(1), "removed", sent_at=0.0)]
    assert find_requeues(requests, [free], known(free), 1.0) == []
