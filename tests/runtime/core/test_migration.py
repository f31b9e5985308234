"""State machines of source and target: rounds, freeze, cancellation; late and repeated events have no effect."""

from itertools import pairwise

import pytest

from phalanx_api import moves, wire
from phalanx_runtime.core.migration.records import (
    Drop,
    Freeze,
    MoveLimits,
    ReleaseMoved,
    RequestProgress,
    Reserve,
    SendFrame,
    SourceAction,
    StartCopy,
    StartMoved,
    StopCopy,
    TargetAction,
    Unfreeze,
)
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import PageReservation, TargetMoves
from tests.runtime.fake_runner import make_request

SIZE = 16
MOVE = "r0:1"
LIMITS = MoveLimits()


def prepared(cached: int = 0, capacity: int = 0) -> moves.Prepared:
    return moves.Prepared(
        move=MOVE, cached_tokens=cached, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key", capacity_tokens=capacity
    )


def move_out(mode: moves.MoveMode = "precopy", cached: int = 0, capacity: int = 0, handle: int = 7) -> moves.MoveOut:
    return moves.MoveOut(move=MOVE, handle=handle, epoch=2, prepared=prepared(cached, capacity), mode=mode)


def progress(pages: float, step_s: float = 0.0) -> RequestProgress:
    """Returns a request with `pages` pages of computed tokens, and one uncomputed token."""
    return RequestProgress(int(pages * SIZE) + 1, int(pages * SIZE), step_s)


def copies(actions: list[SourceAction]) -> list[tuple[int, int, int | None]]:
    return [(action.first, action.end, action.num_computed) for action in actions if isinstance(action, StartCopy)]


def frames(actions: list[SourceAction] | list[TargetAction]) -> list[object]:
    return [action.frame for action in actions if isinstance(action, SendFrame)]


def kinds(actions: list[SourceAction] | list[TargetAction]) -> list[type]:
    return [type(action) for action in actions]


# Source


def test_full_pages_are_sent_in_rounds_then_the_tail() -> None:
    source = SourceMoves(SIZE)
    assert copies(source.start(move_out(cached=32), 2, progress(100.5), 0.0)) == [(2, 100, None)]
    assert copies(source.copied(MOVE, 100, progress(140.5), 1.0)) == [(100, 140, None)]
    assert kinds(source.copied(MOVE, 140, progress(150.5), 1.4)) == [Freeze]
    last = source.stopped(MOVE, 500, progress(151.5), 1.5)
    (frozen,) = frames(last)
    assert isinstance(frozen, moves.Frozen)
    assert (frozen.epoch, frozen.num_output, frozen.num_computed) == (2, 500, 2424)
    assert frozen.tail_s == pytest.approx(12 / 100)
    assert copies(last) == [(140, 152, 2424)]
    assert kinds(source.release(MOVE)) == [StopCopy, ReleaseMoved]
    assert not len(source)


def test_the_states_count_as_part_of_the_tail() -> None:
    source = SourceMoves(SIZE, MoveLimits(state_pages=88))
    source.start(move_out(), 2, progress(100), 0.0)
    source.copied(MOVE, 100, progress(110), 1.0)
    (frozen,) = frames(source.stopped(MOVE, 500, progress(112), 1.5))
    assert isinstance(frozen, moves.Frozen) and frozen.tail_s == pytest.approx((12 + 88) / 100)


def test_a_short_request_is_frozen_at_once() -> None:
    assert kinds(SourceMoves(SIZE).start(move_out(), 2, progress(16), 0.0)) == [Freeze]


def test_stop_mode_copies_nothing_before_the_freeze() -> None:
    source = SourceMoves(SIZE)
    assert kinds(source.start(move_out("stop"), 2, progress(1000), 0.0)) == [Freeze]
    assert copies(source.stopped(MOVE, 9, progress(1000), 0.0)) == [(0, 1000, 16000)]


def test_short_tail_needs_no_further_round() -> None:
    source = SourceMoves(SIZE)
    source.start(move_out(), 2, progress(1000), 0.0)
    assert kinds(source.copied(MOVE, 1000, progress(1030, step_s=0.05), 1.0)) == [Freeze]


@pytest.mark.parametrize(
    ("rate", "outcome"),
    [(1000.0, Freeze), (100.0, StopCopy)],
    ids=["fast enough to wait for", "too slow"],
)
def test_a_copy_that_does_not_converge_ends(rate: float, outcome: type) -> None:
    source, now, pages = SourceMoves(SIZE), 0.0, 100
    actions = source.start(move_out(), 2, progress(pages), now)
    sent, rounds = 0, 0
    while rounds < 3 and copies(actions):
        (first, end, _) = copies(actions)[0]
        now += (end - first) / rate
        sent, pages, rounds = end, pages + 100 // (rounds + 1), rounds + 1
        actions = source.copied(MOVE, sent, progress(pages), now)
    assert kinds(actions)[0] is outcome
    if outcome is StopCopy:
        assert [frame.code for frame in frames(actions) if isinstance(frame, moves.MoveFailed)] == ["not_converging"]
        assert Unfreeze not in kinds(actions)


def test_at_most_three_rounds() -> None:
    source, now = SourceMoves(SIZE), 0.0
    actions = source.start(move_out(), 2, progress(1000), now)
    ends = [1000, 1300, 1500, 1600]
    for end, computed in pairwise(ends):
        assert copies(actions)
        now += 1.0
        actions = source.copied(MOVE, end, progress(computed), now)
    assert not copies(actions)


def test_source_freezes_before_it_exceeds_reserved_pages() -> None:
    source = SourceMoves(SIZE)
    assert kinds(source.start(move_out(capacity=100 * SIZE), 2, progress(99), 0.0)) == [Freeze]
    last = source.stopped(MOVE, 3, progress(101), 0.0)
    assert copies(last) == [(0, 100, 1600)]


@pytest.mark.parametrize("state", ["copying", "stopping", "frozen"])
@pytest.mark.parametrize("event", ["thaw", "failed", "late"])
def test_request_continues_after_a_cancelled_move(state: str, event: str) -> None:
    source = SourceMoves(SIZE)
    source.start(move_out("precopy" if state == "copying" else "stop"), 2, progress(100), 0.0)
    if state == "frozen":
        source.stopped(MOVE, 3, progress(100), 0.0)
    match event:
        case "thaw":
            actions = source.thaw(MOVE)
        case "failed":
            actions = source.failed(MOVE, "target_lost", "the target closed")
        case _:
            deadline = source.deadline
            assert deadline is not None and not source.tick(deadline - 0.001)
            actions = source.tick(deadline)
    assert (Unfreeze in kinds(actions)) == (state != "copying")
    assert StopCopy in kinds(actions) and ReleaseMoved not in kinds(actions)
    assert (frames(actions) == []) == (event == "thaw")
    assert source.deadline is None
    assert not source.thaw(MOVE) and not source.release(MOVE) and not source.copied(MOVE, 100, progress(100), 1.0)
    assert (
        not source.stopped(MOVE, 3, progress(100), 1.0)
        and not source.failed(MOVE, "target_lost", "again")
        and not source.tick(1e9)
    )


def test_frozen_request_outwaits_the_routers_timeout() -> None:
    source = SourceMoves(SIZE)
    source.start(move_out("stop"), 2, progress(1000), 0.0)
    frozen = frames(source.stopped(MOVE, 3, progress(1000), 0.0))[0]
    assert isinstance(frozen, moves.Frozen) and source.deadline is not None
    assert source.deadline > 0.2 + 2 * frozen.tail_s


def test_request_that_ended_is_neither_resumed_nor_released() -> None:
    source = SourceMoves(SIZE)
    source.start(move_out("stop"), 2, progress(100), 0.0)
    actions = source.ended(7, "ended", "it finished")
    assert kinds(actions) == [StopCopy, SendFrame]
    assert source.move_of(7) is None and not source.ended(7, "ended", "again")


@pytest.mark.parametrize("epoch", [None, 1, 3], ids=["no such request", "older epoch", "newer epoch"])
def test_move_of_an_unknown_request_fails(epoch: int | None) -> None:
    source = SourceMoves(SIZE)
    answer = source.start(move_out(), epoch, None if epoch is None else progress(100), 0.0)
    assert [frame.code for frame in frames(answer) if isinstance(frame, moves.MoveFailed)] == ["unknown"]
    assert not len(source)


def test_repeated_move_copies_once_newer_move_replaces_it() -> None:
    source = SourceMoves(SIZE)
    source.start(move_out("stop"), 2, progress(100), 0.0)
    assert not source.start(move_out("stop"), 2, progress(100), 0.0)
    newer = moves.MoveOut(move="r0:2", handle=7, epoch=2, prepared=prepared(), mode="stop")
    assert kinds(source.start(newer, 2, progress(100), 0.0)) == [StopCopy, Unfreeze, SendFrame, Freeze]
    assert len(source) == 1


# Target


def reservation(cached: int = 0) -> PageReservation:
    return PageReservation(cached, 1000, [moves.PageAddress("127.0.0.1", 1)], b"key")


def open_move(num_ranks: int = 2, cached: int = 0, lease_s: float = 10.0) -> TargetMoves:
    target = TargetMoves(num_ranks)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40), lease_s), 0.0)
    target.reserved(MOVE, reservation(cached), 0.1)
    return target


def test_request_starts_on_pages_of_every_rank() -> None:
    target = TargetMoves(2)
    (reserve,) = target.prepare(wire.Prepare(MOVE, make_request(100, 400)), 0.0)
    assert isinstance(reserve, Reserve) and reserve.num_tokens == 164
    assert frames(target.reserved(MOVE, reservation(32), 0.1)) == [
        moves.Prepared(
            move=MOVE, cached_tokens=32, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key", capacity_tokens=1000
        )
    ]
    assert not target.received(MOVE, 0, 5, None, 0.2)
    assert not target.received(MOVE, 0, 5, 104, 0.3)
    assert frames(target.received(MOVE, 1, 10, 104, 0.3)) == [moves.Arrived(MOVE, 104, 20)]
    start, actions = target.submit(3, make_request(100, 400, delivered=[1] * 5), MOVE, 0.4)
    assert isinstance(start, StartMoved) and start.num_computed == 104 and not actions
    assert not len(target)


def test_no_more_is_reserved_than_the_request_can_use() -> None:
    (reserve,) = TargetMoves(1).prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    assert isinstance(reserve, Reserve) and reserve.num_tokens == 140


def test_pages_beyond_the_journal_are_computed_again() -> None:
    target = open_move(num_ranks=1)
    target.received(MOVE, 0, 1, 120, 0.2)
    start, _ = target.submit(3, make_request(100, 40, delivered=[1] * 10), MOVE, 0.3)
    assert start is not None and start.num_computed == 109


def test_longer_cached_prefix_is_used() -> None:
    target = open_move(num_ranks=1, cached=96)
    assert frames(target.received(MOVE, 0, 1, 60, 0.2)) == [moves.Arrived(MOVE, 96, 1)]


def test_different_lengths_at_ranks_fail_the_move() -> None:
    target = open_move()
    target.received(MOVE, 0, 1, 100, 0.2)
    actions = target.received(MOVE, 1, 1, 99, 0.2)
    assert kinds(actions) == [Drop, SendFrame] and not len(target)


@pytest.mark.parametrize("state", ["reserving", "open", "arrived"])
@pytest.mark.parametrize("event", ["cancel", "failed", "late", "early submit"])
def test_reserved_pages_are_freed_once(state: str, event: str) -> None:
    target = TargetMoves(1)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    if state != "reserving":
        target.reserved(MOVE, reservation(), 0.0)
    if state == "arrived":
        target.received(MOVE, 0, 1, 100, 0.0)
    match event:
        case "cancel":
            actions = target.cancel(MOVE, 1.0)
        case "failed":
            actions = target.failed(MOVE, "checksum", "page 3 is damaged", 1.0)
            if state != "open":  # before, no sender is connected; after, no page is missing
                assert not actions and len(target) == 1
                return
        case "late":
            assert not target.tick(9.9)
            actions = target.tick(10.1)
        case _:
            start, actions = target.submit(3, make_request(100, 40), MOVE, 1.0)
            if state == "arrived":
                assert start is not None and not actions
                return
            assert start is None
    dropped = kinds(actions).count(Drop)
    if state == "reserving":
        dropped += kinds(target.reserved(MOVE, reservation(), 2.0)).count(Drop)
    assert dropped == 1
    assert not len(target) and target.deadline is None
    assert not target.received(MOVE, 0, 1, 100, 3.0) and not target.failed(MOVE, "checksum", "again", 3.0)


def test_a_finished_move_is_not_prepared_again() -> None:
    target = open_move()
    target.cancel(MOVE, 1.0)
    assert not target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 2.0)
    assert not target.cancel(MOVE, 2.0)


def test_a_cancel_that_overtakes_its_prepare_holds() -> None:
    target = TargetMoves(1)
    target.cancel(MOVE, 0.0)
    assert not target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.5)


def test_lease_is_renewed_while_pages_arrive() -> None:
    target = open_move(num_ranks=1)
    for second in range(1, 30):
        target.received(MOVE, 0, 1, None, float(second))
        assert not target.tick(float(second))
    assert kinds(target.tick(40.0)) == [Drop, SendFrame]


def test_missing_pages_are_reported() -> None:
    target = TargetMoves(1)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    assert [f.code for f in frames(target.refused(MOVE, "no_room", "no pages", 0.1)) if isinstance(f, moves.MoveFailed)] == [
        "no_room"
    ]
    assert not len(target)
