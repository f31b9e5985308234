"""The router's side of a move: it commits exactly when both leaders are ready and the stream is unchanged."""

from dataclasses import replace

import pytest

from phalanx_api import moves, wire
from phalanx_router.moves.board import MoveBoard, MoveStep
from phalanx_router.moves.records import (
    Action,
    Commit,
    CommitNotAccepted,
    EndSource,
    MoveEnded,
    MoveRequest,
    MoveSettings,
    StreamPosition,
    ToSource,
    ToTarget,
    TransferMode,
    Warm,
)
from tests.router.fakes import make_request

MOVE, SOURCE, TARGET = "r0:1", "a/1/1", "b/1/1"
AT = StreamPosition(SOURCE, 7, 2, 50)
SETTINGS = MoveSettings()
PREPARED = moves.Prepared(move=MOVE, cached_tokens=32, addresses=[moves.PageAddress("127.0.0.1", 1)], key=b"key")
FROZEN = moves.Frozen(move=MOVE, epoch=2, num_output=50, num_computed=149)
ARRIVED = moves.Arrived(MOVE, 149, 1000)


def move_request(transfer: TransferMode = "precopy") -> MoveRequest:
    return MoveRequest(move=MOVE, position=AT, target=TARGET, transfer=transfer, reason="manual", bytes_per_s=1e6)


def actions(steps: list[MoveStep]) -> list[Action]:
    return [step.action for step in steps]


def kinds(steps: list[MoveStep]) -> list[type]:
    return [type(step.action) for step in steps]


def frames(steps: list[MoveStep]) -> list[object]:
    return [step.action.frame for step in steps if isinstance(step.action, ToSource | ToTarget)]


def ends_of(steps: list[MoveStep]) -> list[tuple[str, str]]:
    return [(step.action.outcome, step.action.code) for step in steps if isinstance(step.action, MoveEnded)]


STEPS = ("prepare", "copy", "freeze", "arrive first", "commit", "token")


def board_at(step: str, transfer: TransferMode = "precopy") -> tuple[MoveBoard, list[MoveStep]]:
    """A board with a move in this step, and the actions of the last step."""
    board = MoveBoard(SETTINGS)
    steps = board.start(move_request(transfer), make_request(), 0.0)
    if step == "prepare":
        return board, steps
    steps = board.receive(TARGET, PREPARED, AT, 0.1)
    if step == "copy":
        return board, steps
    if step == "arrive first":
        return board, board.receive(TARGET, ARRIVED, AT, 0.2)
    steps = board.receive(SOURCE, FROZEN, AT, 0.2)
    if step == "freeze":
        return board, steps
    steps = board.receive(TARGET, ARRIVED, AT, 0.25)
    board.submitted(MOVE, 9)
    return (board, steps) if step == "commit" else (board, board.first_token(MOVE, 0.3))


def test_the_protocol_step_by_step() -> None:
    request = make_request()
    assert frames(MoveBoard(SETTINGS).start(move_request(), request, 0.0)) == [wire.Prepare(MOVE, request, 10.0)]
    _, steps = board_at("copy")
    assert frames(steps) == [moves.MoveOut(move=MOVE, handle=7, epoch=2, prepared=PREPARED, mode="precopy", bytes_per_s=1e6)]
    assert kinds(board_at("freeze")[1]) == []
    assert kinds(board_at("commit")[1]) == [Commit, EndSource]
    board, steps = board_at("token")
    (end,) = actions(steps)
    assert isinstance(end, MoveEnded) and end.outcome == "moved" and end.num_bytes == 1000
    assert end.stall_s == pytest.approx(0.1)
    assert not board.open()


def test_pages_that_arrive_before_the_word_of_the_freeze() -> None:
    board, steps = board_at("arrive first")
    assert not steps
    assert kinds(board.receive(SOURCE, FROZEN, AT, 0.3)) == [Commit, EndSource]


@pytest.mark.parametrize(
    "now",
    [None, replace(AT, key="c/1/1"), replace(AT, handle=8), replace(AT, epoch=3), replace(AT, num_delivered=51)],
    ids=["the stream ended", "another group", "another handle", "another epoch", "the source went on"],
)
def test_commit_needs_an_unchanged_stream_position(now: StreamPosition | None) -> None:
    board, _ = board_at("freeze")
    steps = board.receive(TARGET, ARRIVED, now, 0.3)
    assert frames(steps) == [moves.Thaw(MOVE), moves.Cancel(MOVE)]
    assert Commit not in kinds(steps) and len(ends_of(steps)) == 1


def test_commit_position_is_the_end_of_the_journal() -> None:
    board, _ = board_at("freeze")
    assert Commit in kinds(board.receive(TARGET, ARRIVED, replace(AT, num_delivered=48), 0.3))


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
    steps = board.tick(due)
    assert frames(steps) == undone
    assert [outcome for outcome, _ in ends_of(steps)] == ["timeout"]
    assert due == pytest.approx({"prepare": 0.0, "copy": 0.1, "freeze": 0.2}[step] + after_s)


def test_groups_with_long_steps_have_more_time() -> None:
    """Groups answer between steps."""
    board = MoveBoard(SETTINGS)
    board.start(replace(move_request(), step_s=0.5), make_request(), 0.0)
    assert board.deadline == pytest.approx(SETTINGS.prepare_s + 1.5)
    board.receive(TARGET, PREPARED, AT, 0.1)
    assert board.deadline == pytest.approx(0.1 + SETTINGS.copy_s)
    board.receive(SOURCE, FROZEN, AT, 0.2)
    assert board.deadline == pytest.approx(0.2 + SETTINGS.ready_s + 1.5)


def test_frozen_stream_waits_for_no_step_of_seconds() -> None:
    board = MoveBoard(SETTINGS)
    board.start(replace(move_request(), step_s=5.0), make_request(), 0.0)
    (step,) = board.receive(TARGET, PREPARED, AT, 0.1)
    (order,) = frames([step])
    assert isinstance(order, moves.MoveOut) and order.answer_s == SETTINGS.max_answer_s
    board.receive(SOURCE, FROZEN, AT, 0.2)
    assert board.deadline == pytest.approx(0.2 + SETTINGS.ready_s + SETTINGS.max_answer_s)


def test_a_long_tail_is_waited_for() -> None:
    board, _ = board_at("copy")
    board.receive(SOURCE, moves.Frozen(move=MOVE, epoch=2, num_output=50, num_computed=149, tail_s=0.5), AT, 1.0)
    assert board.deadline == pytest.approx(2.2)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("event", ["source fails", "target fails", "source lost", "target lost", "stream over"])
def test_failure_undoes_all_before_commit_and_nothing_after(step: str, event: str) -> None:
    board, _ = board_at(step)
    failed = moves.MoveFailed(MOVE, "ended", "x")
    match event:
        case "source fails":
            steps = board.receive(SOURCE, failed, AT, 0.3)
        case "target fails":
            steps = board.receive(TARGET, failed, AT, 0.3)
        case "source lost":
            steps = board.link_lost(SOURCE, "x", 0.3)
        case "target lost":
            steps = board.link_lost(TARGET, "x", 0.3)
        case _:
            steps = board.stream_ended(MOVE, "x", 0.3)
    assert Commit not in kinds(steps)
    if step in ("commit", "token"):
        assert not [frame for frame in frames(steps) if isinstance(frame, moves.Thaw)]
        assert (EndSource in kinds(steps)) == (event == "source fails")
    else:
        assert moves.Cancel(MOVE) in frames(steps)
        assert (moves.Thaw(MOVE) in frames(steps)) == (step != "prepare")
        assert len(ends_of(steps)) == 1 and not board.open()


def test_late_frames_of_an_aborted_move_are_answered() -> None:
    board, _ = board_at("freeze")
    board.tick(1.0)
    assert frames(board.receive(TARGET, ARRIVED, AT, 1.1)) == [moves.Cancel(MOVE)]
    assert frames(board.receive(TARGET, PREPARED, AT, 1.1)) == [moves.Cancel(MOVE)]
    assert frames(board.receive(SOURCE, FROZEN, AT, 1.1)) == [moves.Thaw(MOVE)]
    assert not board.receive(SOURCE, moves.MoveFailed(MOVE, "lease", "x"), AT, 1.1)


def test_frames_that_come_twice_do_nothing() -> None:
    board, _ = board_at("copy")
    assert not board.receive(TARGET, PREPARED, AT, 0.2) or board.open()
    board, _ = board_at("freeze")
    assert not board.receive(SOURCE, FROZEN, AT, 0.2)
    board, _ = board_at("commit")
    assert not board.receive(TARGET, ARRIVED, AT, 0.3)
    assert kinds(board.receive(SOURCE, FROZEN, AT, 0.3)) == [EndSource]


def test_a_leader_cannot_speak_for_the_other() -> None:
    board, _ = board_at("freeze")
    assert not board.receive(SOURCE, ARRIVED, AT, 0.3)
    assert not board.receive("c/1/1", moves.MoveFailed(MOVE, "ended", "x"), AT, 0.3)
    assert board.open()


def test_target_that_never_accepted_loses_the_request() -> None:
    board, _ = board_at("commit")
    board.load_reported(TARGET, 8)
    steps = board.tick(0.25 + SETTINGS.start_s)
    assert [step.action.epoch for step in steps if isinstance(step.action, CommitNotAccepted)] == [3]


def test_a_target_that_took_it_is_not_hurried() -> None:
    board, _ = board_at("commit")
    board.load_reported(TARGET, 9)
    assert not board.tick(1000.0) and board.open()
    assert ends_of(board.first_token(MOVE, 1001.0)) == [("moved", "")]


def test_recompute_needs_no_word_of_the_source() -> None:
    board = MoveBoard(SETTINGS)
    assert kinds(board.start(move_request("recompute"), make_request(), 0.0)) == [Warm]
    steps = board.warmed(MOVE, "computed", replace(AT, num_delivered=60), 1.0)
    assert [step.action.move for step in steps if isinstance(step.action, Commit)] == [""]
    assert kinds(steps) == [Commit, EndSource]


def test_recompute_of_an_ended_stream_does_nothing() -> None:
    board = MoveBoard(SETTINGS)
    board.start(move_request("recompute"), make_request(), 0.0)
    steps = board.warmed(MOVE, "computed", None, 1.0)
    assert not frames(steps) and ends_of(steps) == [("stream", "ended")]


def test_target_without_capacity_ends_only_moves_to_it() -> None:
    board, _ = board_at("copy")
    away = MoveRequest(move="r0:2", position=StreamPosition(TARGET, 3, 1, 10), target="c/1/1", transfer="precopy", reason="drain")
    board.start(away, make_request(), 0.1)
    assert ends_of(board.target_lost(MOVE, "it drains", 0.2)) == [("target", "target_lost")]
    assert board.open() == [away]
    assert board.target_lost("r0:3", "unknown", 0.2) == []
    assert ends_of(board.link_lost(TARGET, "its link ended", 0.3)) == [("source", "source_lost")]


def test_moves_that_are_over_are_forgotten() -> None:
    board, _ = board_at("token")
    board.tick(100.0)
    assert board.deadline is None and not board.receive(SOURCE, FROZEN, AT, 100.0)
