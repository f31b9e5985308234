"""The router's side of a move: it commits exactly when both ends said so and the stream is where it was; all else is undone."""

from dataclasses import replace

import pytest

from phalanx_api import moves, wire
from phalanx_router.moves.board import MoveBoard, MoveStep
from phalanx_router.moves.records import (
    Action,
    Commit,
    EndSource,
    MoveEnded,
    MoveRequest,
    MoveSettings,
    StreamPosition,
    TargetLost,
    ToSource,
    ToTarget,
    TransferMode,
    Warm,
)
from tests.router.fakes import make_request

MOVE, SOURCE, TARGET = "r0:1", "a/1/1", "b/1/1"
AT = StreamPosition(SOURCE, 7, 2, 50)
SETTINGS = MoveSettings()
PREPARED = moves.Prepared(move=MOVE, held_tokens=32, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key")
FROZEN = moves.Frozen(move=MOVE, epoch=2, num_output=50, num_computed=149)
ARRIVED = moves.Arrived(MOVE, 149, 1000)


def proposal(how: TransferMode = "precopy") -> MoveRequest:
    return MoveRequest(move=MOVE, at=AT, target=TARGET, how=how, why="asked", bytes_per_s=1e6)


def actions(todo: list[MoveStep]) -> list[Action]:
    return [one.action for one in todo]


def kinds(todo: list[MoveStep]) -> list[type]:
    return [type(one.action) for one in todo]


def frames(todo: list[MoveStep]) -> list[object]:
    return [one.action.frame for one in todo if isinstance(one.action, ToSource | ToTarget)]


def over(todo: list[MoveStep]) -> list[tuple[str, str]]:
    return [(one.action.outcome, one.action.code) for one in todo if isinstance(one.action, MoveEnded)]


STEPS = ("prepare", "copy", "freeze", "arrive first", "commit", "token")


def board_at(step: str, how: TransferMode = "precopy") -> tuple[MoveBoard, list[MoveStep]]:
    """A board whose move has got to this step, and what the last step asked for."""
    board = MoveBoard(SETTINGS)
    todo = board.start(proposal(how), make_request(), 0.0)
    if step == "prepare":
        return board, todo
    todo = board.take(TARGET, PREPARED, AT, 0.1)
    if step == "copy":
        return board, todo
    if step == "arrive first":
        return board, board.take(TARGET, ARRIVED, AT, 0.2)
    todo = board.take(SOURCE, FROZEN, AT, 0.2)
    if step == "freeze":
        return board, todo
    todo = board.take(TARGET, ARRIVED, AT, 0.25)
    board.submitted(MOVE, 9)
    return (board, todo) if step == "commit" else (board, board.first_token(MOVE, 0.3))


def test_the_protocol_step_by_step() -> None:
    request = make_request()
    assert frames(MoveBoard(SETTINGS).start(proposal(), request, 0.0)) == [wire.Prepare(MOVE, request, 10.0)]
    _, todo = board_at("copy")
    assert frames(todo) == [moves.MoveOut(move=MOVE, handle=7, epoch=2, prepared=PREPARED, mode="precopy", bytes_per_s=1e6)]
    assert kinds(board_at("freeze")[1]) == []
    assert kinds(board_at("commit")[1]) == [Commit, EndSource]
    board, todo = board_at("token")
    (end,) = actions(todo)
    assert isinstance(end, MoveEnded) and end.outcome == "moved" and end.num_bytes == 1000
    assert end.stall_s == pytest.approx(0.1)
    assert not board.open()


def test_pages_that_arrive_before_the_word_of_the_freeze() -> None:
    board, todo = board_at("arrive first")
    assert not todo
    assert kinds(board.take(SOURCE, FROZEN, AT, 0.3)) == [Commit, EndSource]


@pytest.mark.parametrize(
    "now",
    [None, replace(AT, key="c/1/1"), replace(AT, handle=8), replace(AT, epoch=3), replace(AT, num_delivered=51)],
    ids=["the stream ended", "another group", "another handle", "another epoch", "the source went on"],
)
def test_commit_needs_an_unchanged_stream_position(now: StreamPosition | None) -> None:
    board, _ = board_at("freeze")
    todo = board.take(TARGET, ARRIVED, now, 0.3)
    assert frames(todo) == [moves.Thaw(MOVE), moves.Cancel(MOVE)]
    assert Commit not in kinds(todo) and len(over(todo)) == 1


def test_commit_position_is_the_end_of_the_journal() -> None:
    board, _ = board_at("freeze")
    assert Commit in kinds(board.take(TARGET, ARRIVED, replace(AT, num_delivered=48), 0.3))


@pytest.mark.parametrize(
    ("step", "after_s", "undone"),
    [
        ("prepare", SETTINGS.prepare_s, [moves.Cancel(MOVE)]),
        ("copy", SETTINGS.copy_s, [moves.Thaw(MOVE), moves.Cancel(MOVE)]),
        ("freeze", SETTINGS.ready_s, [moves.Thaw(MOVE), moves.Cancel(MOVE)]),
    ],
)
def test_silence_ends_a_move(step: str, after_s: float, undone: list[object]) -> None:
    board, _ = board_at(step)
    due = board.deadline
    assert due is not None and not board.tick(due - 1e-6)
    todo = board.tick(due)
    assert frames(todo) == undone
    assert [outcome for outcome, _ in over(todo)] == ["timeout"]
    assert due == pytest.approx({"prepare": 0.0, "copy": 0.1, "freeze": 0.2}[step] + after_s)


def test_a_long_tail_is_waited_for() -> None:
    board, _ = board_at("copy")
    board.take(SOURCE, moves.Frozen(move=MOVE, epoch=2, num_output=50, num_computed=149, tail_s=0.5), AT, 1.0)
    assert board.deadline == pytest.approx(2.2)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["source fails", "target fails", "source lost", "target lost", "stream over"])
def test_failure_undoes_all_before_commit_and_nothing_after(step: str, what: str) -> None:
    board, _ = board_at(step)
    failed = moves.MoveFailed(MOVE, "ended", "x")
    match what:
        case "source fails":
            todo = board.take(SOURCE, failed, AT, 0.3)
        case "target fails":
            todo = board.take(TARGET, failed, AT, 0.3)
        case "source lost":
            todo = board.link_lost(SOURCE, "x", 0.3)
        case "target lost":
            todo = board.link_lost(TARGET, "x", 0.3)
        case _:
            todo = board.stream_over(MOVE, "x", 0.3)
    assert Commit not in kinds(todo)
    if step in ("commit", "token"):
        assert not [frame for frame in frames(todo) if isinstance(frame, moves.Thaw)]
        assert (EndSource in kinds(todo)) == (what == "source fails")
    else:
        assert moves.Cancel(MOVE) in frames(todo)
        assert (moves.Thaw(MOVE) in frames(todo)) == (step != "prepare")
        assert len(over(todo)) == 1 and not board.open()


def test_late_frames_of_an_aborted_move_are_answered() -> None:
    board, _ = board_at("freeze")
    board.tick(1.0)
    assert frames(board.take(TARGET, ARRIVED, AT, 1.1)) == [moves.Cancel(MOVE)]
    assert frames(board.take(TARGET, PREPARED, AT, 1.1)) == [moves.Cancel(MOVE)]
    assert frames(board.take(SOURCE, FROZEN, AT, 1.1)) == [moves.Thaw(MOVE)]
    assert not board.take(SOURCE, moves.MoveFailed(MOVE, "lease", "x"), AT, 1.1)


def test_frames_that_come_twice_do_nothing() -> None:
    board, _ = board_at("copy")
    assert not board.take(TARGET, PREPARED, AT, 0.2) or board.open()
    board, _ = board_at("freeze")
    assert not board.take(SOURCE, FROZEN, AT, 0.2)
    board, _ = board_at("commit")
    assert not board.take(TARGET, ARRIVED, AT, 0.3)
    assert kinds(board.take(SOURCE, FROZEN, AT, 0.3)) == [EndSource]


def test_a_leader_cannot_speak_for_the_other() -> None:
    board, _ = board_at("freeze")
    assert not board.take(SOURCE, ARRIVED, AT, 0.3)
    assert not board.take("c/1/1", moves.MoveFailed(MOVE, "ended", "x"), AT, 0.3)
    assert board.open()


def test_target_that_never_accepted_loses_the_request() -> None:
    board, _ = board_at("commit")
    board.reported(TARGET, 8, 0.5)
    todo = board.tick(0.25 + SETTINGS.start_s)
    assert [one.action.epoch for one in todo if isinstance(one.action, TargetLost)] == [3]


def test_a_target_that_took_it_is_not_hurried() -> None:
    board, _ = board_at("commit")
    board.reported(TARGET, 9, 0.5)
    assert not board.tick(1000.0) and board.open()
    assert over(board.first_token(MOVE, 1001.0)) == [("moved", "")]


def test_recompute_needs_no_word_of_the_source() -> None:
    board = MoveBoard(SETTINGS)
    assert kinds(board.start(proposal("recompute"), make_request(), 0.0)) == [Warm]
    todo = board.warmed(MOVE, "computed", replace(AT, num_delivered=60), 1.0)
    assert [one.action.move for one in todo if isinstance(one.action, Commit)] == [""]
    assert kinds(todo) == [Commit, EndSource]


def test_recompute_of_an_ended_stream_does_nothing() -> None:
    board = MoveBoard(SETTINGS)
    board.start(proposal("recompute"), make_request(), 0.0)
    todo = board.warmed(MOVE, "computed", None, 1.0)
    assert not frames(todo) and over(todo) == [("stream", "ended")]


def test_target_without_capacity_ends_only_moves_to_it() -> None:
    board, _ = board_at("copy")
    away = MoveRequest(
        move="r0:2", at=StreamPosition(TARGET, 3, 1, 10), target="c/1/1", how="precopy", why="drain", bytes_per_s=None
    )
    board.start(away, make_request(), 0.1)
    assert over(board.target_lost(MOVE, "it drains", 0.2)) == [("target", "target_lost")]
    assert board.open() == [away]
    assert board.target_lost("r0:3", "nobody knows it", 0.2) == []
    assert over(board.link_lost(TARGET, "its link ended", 0.3)) == [("source", "source_lost")]


def test_moves_that_are_over_are_forgotten() -> None:
    board, _ = board_at("token")
    board.tick(100.0)
    assert board.deadline is None and not board.take(SOURCE, FROZEN, AT, 100.0)


def test_open_moves_are_counted_by_group() -> None:
    board, _ = board_at("copy")
    assert (board.num_out(SOURCE), board.num_in(TARGET), board.num_in(SOURCE)) == (1, 1, 0)
    board.tick(1e9)
    assert (board.num_out(SOURCE), board.num_in(TARGET)) == (0, 0)
