"""Both ends of a move: what is copied when, when a request is frozen, what undoes it; late and double news do nothing."""

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


def prepared(held: int = 0, room: int = 0) -> moves.Prepared:
    return moves.Prepared(
        move=MOVE, held_tokens=held, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key", room_tokens=room
    )


def asked(mode: moves.MoveMode = "precopy", held: int = 0, room: int = 0, handle: int = 7) -> moves.MoveOut:
    return moves.MoveOut(move=MOVE, handle=handle, epoch=2, prepared=prepared(held, room), mode=mode)


def at(pages: float, step_s: float = 0.0) -> RequestProgress:
    """A request with so many pages of tokens computed, and one token that is not."""
    return RequestProgress(int(pages * SIZE) + 1, int(pages * SIZE), step_s)


def copies(actions: list[SourceAction]) -> list[tuple[int, int, int | None]]:
    return [(one.first, one.end, one.num_computed) for one in actions if isinstance(one, StartCopy)]


def said(actions: list[SourceAction] | list[TargetAction]) -> list[object]:
    return [one.frame for one in actions if isinstance(one, SendFrame)]


def kinds(actions: list[SourceAction] | list[TargetAction]) -> list[type]:
    return [type(one) for one in actions]


# The source


def test_full_pages_are_sent_in_rounds_then_the_rest() -> None:
    source = SourceMoves(SIZE)
    assert copies(source.ask(asked(held=32), 2, at(100.5), 0.0)) == [(2, 100, None)]
    assert copies(source.copied(MOVE, 100, at(140.5), 1.0)) == [(100, 140, None)]
    assert kinds(source.copied(MOVE, 140, at(150.5), 1.4)) == [Freeze]
    last = source.stopped(MOVE, 500, at(151.5), 1.5)
    (frozen,) = said(last)
    assert isinstance(frozen, moves.Frozen)
    assert (frozen.epoch, frozen.num_output, frozen.num_computed) == (2, 500, 2424)
    assert frozen.tail_s == pytest.approx(12 / 100)
    assert copies(last) == [(140, 152, 2424)]
    assert kinds(source.release(MOVE)) == [StopCopy, ReleaseMoved]
    assert not len(source)


def test_a_short_request_is_frozen_at_once() -> None:
    assert kinds(SourceMoves(SIZE).ask(asked(), 2, at(16), 0.0)) == [Freeze]


def test_stop_mode_copies_nothing_before_the_freeze() -> None:
    source = SourceMoves(SIZE)
    assert kinds(source.ask(asked("stop"), 2, at(1000), 0.0)) == [Freeze]
    assert copies(source.stopped(MOVE, 9, at(1000), 0.0)) == [(0, 1000, 16000)]


def test_short_rest_needs_no_further_round() -> None:
    source = SourceMoves(SIZE)
    source.ask(asked(), 2, at(1000), 0.0)
    assert kinds(source.copied(MOVE, 1000, at(1030, step_s=0.05), 1.0)) == [Freeze]


@pytest.mark.parametrize(
    ("rate", "outcome"),
    [(1000.0, Freeze), (100.0, StopCopy)],
    ids=["fast enough to wait for", "too slow"],
)
def test_a_copy_that_does_not_catch_up_ends(rate: float, outcome: type) -> None:
    source, now, pages = SourceMoves(SIZE), 0.0, 100
    actions = source.ask(asked(), 2, at(pages), now)
    sent, rounds = 0, 0
    while rounds < 3 and copies(actions):
        (first, end, _) = copies(actions)[0]
        now += (end - first) / rate
        sent, pages, rounds = end, pages + 100 // (rounds + 1), rounds + 1
        actions = source.copied(MOVE, sent, at(pages), now)
    assert kinds(actions)[0] is outcome
    if outcome is StopCopy:
        assert [frame.code for frame in said(actions) if isinstance(frame, moves.MoveFailed)] == ["not_converging"]
        assert Unfreeze not in kinds(actions)


def test_at_most_three_rounds() -> None:
    source, now = SourceMoves(SIZE), 0.0
    actions = source.ask(asked(), 2, at(1000), now)
    ends = [1000, 1300, 1500, 1600]
    for end, nxt in pairwise(ends):
        assert copies(actions)
        now += 1.0
        actions = source.copied(MOVE, end, at(nxt), now)
    assert not copies(actions)


def test_source_freezes_before_it_exceeds_reserved_pages() -> None:
    source = SourceMoves(SIZE)
    assert kinds(source.ask(asked(room=100 * SIZE), 2, at(99), 0.0)) == [Freeze]
    last = source.stopped(MOVE, 3, at(101), 0.0)
    assert copies(last) == [(0, 100, 1600)]


@pytest.mark.parametrize("state", ["copying", "stopping", "frozen"])
@pytest.mark.parametrize("news", ["thaw", "failed", "late"])
def test_going_on(state: str, news: str) -> None:
    source = SourceMoves(SIZE)
    source.ask(asked("precopy" if state == "copying" else "stop"), 2, at(100), 0.0)
    if state == "frozen":
        source.stopped(MOVE, 3, at(100), 0.0)
    match news:
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
    assert (said(actions) == []) == (news == "thaw")
    assert source.deadline is None
    assert not source.thaw(MOVE) and not source.release(MOVE) and not source.copied(MOVE, 100, at(100), 1.0)
    assert not source.stopped(MOVE, 3, at(100), 1.0) and not source.failed(MOVE, "target_lost", "again") and not source.tick(1e9)


def test_frozen_request_outwaits_the_routers_timeout() -> None:
    source = SourceMoves(SIZE)
    source.ask(asked("stop"), 2, at(1000), 0.0)
    frozen = said(source.stopped(MOVE, 3, at(1000), 0.0))[0]
    assert isinstance(frozen, moves.Frozen) and source.deadline is not None
    assert source.deadline > 0.2 + 2 * frozen.tail_s


def test_request_that_ended_is_neither_resumed_nor_released() -> None:
    source = SourceMoves(SIZE)
    source.ask(asked("stop"), 2, at(100), 0.0)
    actions = source.ended(7, "ended", "it finished")
    assert kinds(actions) == [StopCopy, SendFrame]
    assert source.move_of(7) is None and not source.ended(7, "ended", "again")


@pytest.mark.parametrize("epoch", [None, 1, 3], ids=["no such request", "older epoch", "newer epoch"])
def test_move_of_an_unknown_request_fails(epoch: int | None) -> None:
    source = SourceMoves(SIZE)
    answer = source.ask(asked(), epoch, None if epoch is None else at(100), 0.0)
    assert [frame.code for frame in said(answer) if isinstance(frame, moves.MoveFailed)] == ["unknown"]
    assert not len(source)


def test_repeated_move_copies_once_newer_move_replaces_it() -> None:
    source = SourceMoves(SIZE)
    source.ask(asked("stop"), 2, at(100), 0.0)
    assert not source.ask(asked("stop"), 2, at(100), 0.0)
    newer = moves.MoveOut(move="r0:2", handle=7, epoch=2, prepared=prepared(), mode="stop")
    assert kinds(source.ask(newer, 2, at(100), 0.0)) == [StopCopy, Unfreeze, SendFrame, Freeze]
    assert len(source) == 1


# The target


def reserved(held: int = 0) -> PageReservation:
    return PageReservation(held, 1000, [moves.PageAddress("127.0.0.1", 1)], b"key")


def opened(num_ranks: int = 2, held: int = 0, lease_s: float = 10.0) -> TargetMoves:
    target = TargetMoves(num_ranks)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40), lease_s), 0.0)
    target.reserved(MOVE, reserved(held), 0.1)
    return target


def test_request_starts_on_pages_of_every_rank() -> None:
    target = TargetMoves(2)
    (reserve,) = target.prepare(wire.Prepare(MOVE, make_request(100, 400)), 0.0)
    assert isinstance(reserve, Reserve) and reserve.num_tokens == 164
    assert said(target.reserved(MOVE, reserved(32), 0.1)) == [
        moves.Prepared(move=MOVE, held_tokens=32, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key", room_tokens=1000)
    ]
    assert not target.came(MOVE, 0, 5, None, 0.2)
    assert not target.came(MOVE, 0, 5, 104, 0.3)
    assert said(target.came(MOVE, 1, 10, 104, 0.3)) == [moves.Arrived(MOVE, 104, 20)]
    begin, actions = target.submit(3, make_request(100, 400, delivered=[1] * 5), MOVE, 0.4)
    assert isinstance(begin, StartMoved) and begin.num_computed == 104 and not actions
    assert not len(target)


def test_no_more_is_reserved_than_the_request_can_use() -> None:
    (reserve,) = TargetMoves(1).prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    assert isinstance(reserve, Reserve) and reserve.num_tokens == 140


def test_pages_beyond_the_journal_are_computed_again() -> None:
    target = opened(num_ranks=1)
    target.came(MOVE, 0, 1, 120, 0.2)
    begin, _ = target.submit(3, make_request(100, 40, delivered=[1] * 10), MOVE, 0.3)
    assert begin is not None and begin.num_computed == 109


def test_longer_cached_prefix_is_used() -> None:
    target = opened(num_ranks=1, held=96)
    assert said(target.came(MOVE, 0, 1, 60, 0.2)) == [moves.Arrived(MOVE, 96, 1)]


def test_ranks_that_got_different_lengths_begin_nothing() -> None:
    target = opened()
    target.came(MOVE, 0, 1, 100, 0.2)
    actions = target.came(MOVE, 1, 1, 99, 0.2)
    assert kinds(actions) == [Drop, SendFrame] and not len(target)


@pytest.mark.parametrize("state", ["reserving", "open", "arrived"])
@pytest.mark.parametrize("news", ["cancel", "failed", "late", "early submit"])
def test_pages_are_given_back_once(state: str, news: str) -> None:
    target = TargetMoves(1)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    if state != "reserving":
        target.reserved(MOVE, reserved(), 0.0)
    if state == "arrived":
        target.came(MOVE, 0, 1, 100, 0.0)
    match news:
        case "cancel":
            actions = target.cancel(MOVE, 1.0)
        case "failed":
            actions = target.failed(MOVE, "checksum", "page 3 is damaged", 1.0)
            if state != "open":  # before, nobody can send; after, nobody need
                assert not actions and len(target) == 1
                return
        case "late":
            assert not target.tick(9.9)
            actions = target.tick(10.1)
        case _:
            begin, actions = target.submit(3, make_request(100, 40), MOVE, 1.0)
            if state == "arrived":
                assert begin is not None and not actions
                return
            assert begin is None
    dropped = kinds(actions).count(Drop)
    if state == "reserving":
        dropped += kinds(target.reserved(MOVE, reserved(), 2.0)).count(Drop)
    assert dropped == 1
    assert not len(target) and target.deadline is None
    assert not target.came(MOVE, 0, 1, 100, 3.0) and not target.failed(MOVE, "checksum", "again", 3.0)


def test_a_move_that_is_over_is_not_prepared_again() -> None:
    target = opened()
    target.cancel(MOVE, 1.0)
    assert not target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 2.0)
    assert not target.cancel(MOVE, 2.0)


def test_a_cancel_that_overtakes_its_prepare_holds() -> None:
    target = TargetMoves(1)
    target.cancel(MOVE, 0.0)
    assert not target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.5)


def test_lease_is_renewed_while_pages_arrive() -> None:
    target = opened(num_ranks=1)
    for second in range(1, 30):
        target.came(MOVE, 0, 1, None, float(second))
        assert not target.tick(float(second))
    assert kinds(target.tick(40.0)) == [Drop, SendFrame]


def test_missing_pages_are_reported() -> None:
    target = TargetMoves(1)
    target.prepare(wire.Prepare(MOVE, make_request(100, 40)), 0.0)
    assert [f.code for f in said(target.refused(MOVE, "no_room", "no pages", 0.1)) if isinstance(f, moves.MoveFailed)] == [
        "no_room"
    ]
    assert not len(target)
