"""Whose turn it is to make a group: one at a time for the same devices, in the order of coming, nobody held up for ever."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import CALLED_S, FIRST_S, LONGEST_S, LOOK_S, TOLD_S, UNSEEN_S, Turns

ONE, OTHER = ("team", "one"), ("team", "other")
GPU = "nvidia.com/gpu"
WHY = "group one-g-a was given up"


def make_turns(draw: float = 1.0) -> Turns:
    return Turns(lambda: draw)


def test_one_service_creates_a_group_at_a_time() -> None:
    turns = make_turns()
    assert turns.look(GPU, ONE, (), 0.0).why == ""
    turns.take(GPU, ONE, "one-g-a", 0.0)
    blocked = turns.look(GPU, OTHER, (), 1.0)
    assert blocked.why == "group one-g-a of team/one is waiting for nodes; it is placed first"
    assert turns.look(GPU, ONE, ["one-g-a"], 1.0).why, "not even its own second one"
    assert turns.look(GPU, ONE, (), 2.0, ["one-g-a"]).why == "", "it has its nodes"
    assert turns.look(GPU, OTHER, (), 2.0).why == ""


def test_already_scheduled_group_holds_no_turn() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    turns.look(GPU, ONE, (), 0.5, ["one-g-a"])
    assert turns.look(GPU, OTHER, (), 0.5).why == ""


def test_other_devices_have_turns_of_their_own() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert turns.look("amd.com/gpu", OTHER, (), 1.0).why == ""


def test_unobserved_group_releases_the_turn() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert turns.look(GPU, ONE, (), UNSEEN_S - 1).why
    assert turns.look(GPU, ONE, (), UNSEEN_S).why == ""


def test_unobserved_group_of_an_idle_service_blocks_no_service() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    turns.line(GPU, OTHER, waits=turns.look(GPU, OTHER, (), UNSEEN_S - 1).in_line)
    assert turns.called(UNSEEN_S - 1) == []
    assert turns.called(UNSEEN_S) == [OTHER]
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert turns.look(GPU, OTHER, (), UNSEEN_S).why == ""
    turns.look(GPU, ONE, ["one-g-a"], UNSEEN_S)
    assert turns.look(GPU, OTHER, (), 3 * UNSEEN_S).why, "this one is seen"


def test_waiting_groups_keep_the_turn_after_operator_restart() -> None:
    turns = make_turns()
    assert turns.look(GPU, ONE, ["one-g-a"], 0.0).why
    assert "one-g-a" in turns.look(GPU, OTHER, (), 0.0).why


def test_short_wait_for_the_turn_is_not_reported() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert not turns.look(GPU, OTHER, (), TOLD_S - 1).told
    assert turns.look(GPU, OTHER, (), TOLD_S).told


def test_each_failed_try_waits_longer_and_lets_others_pass() -> None:
    turns, now = make_turns(), 0.0
    for times in range(8):
        turns.take(GPU, ONE, "one-g-a", now)
        turns.gave_up(GPU, ONE, WHY, now)
        assert turns.look(GPU, OTHER, (), now).why == ""
        pause = turns.look(GPU, ONE, (), now)
        assert (pause.left_s, pause.told) == (min(FIRST_S * 2**times, LONGEST_S), True)
        assert pause.why == "the next attempt follows after a pause; group one-g-a was given up"
        now += pause.left_s
        assert turns.look(GPU, ONE, (), now).why == ""
    turns.placed(ONE)
    turns.gave_up(GPU, ONE, WHY, now)
    assert turns.look(GPU, ONE, (), now).left_s == FIRST_S


def test_pauses_are_random_so_that_services_do_not_collide() -> None:
    turns = make_turns(0.0)
    turns.gave_up(GPU, ONE, WHY, 0.0)
    assert turns.look(GPU, ONE, (), 0.0).left_s == FIRST_S / 2


def test_deleted_service_or_other_devices_block_no_service() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    turns.forget(ONE)
    assert turns.look(GPU, OTHER, (), 0.0).why == ""
    turns.take(GPU, ONE, "one-g-a", 0.0)
    turns.look("amd.com/gpu", ONE, (), UNSEEN_S)
    assert turns.look(GPU, OTHER, (), UNSEEN_S).why == ""


def test_waiting_services_are_called_in_arrival_order() -> None:
    turns, third = make_turns(), ("team", "third")
    turns.take(GPU, ONE, "one-g-a", 0.0)
    for service in (OTHER, third, OTHER):
        turns.line(GPU, service, waits=turns.look(GPU, service, (), 0.0).in_line)
    assert turns.called(1.0) == []
    turns.look(GPU, ONE, (), 1.0, ["one-g-a"])
    assert (turns.called(1.0), turns.called(2.0)) == ([OTHER], [])
    turns.line(GPU, OTHER, waits=False)
    turns.take(GPU, OTHER, "other-g-a", 2.0)
    assert turns.called(2.0) == []
    turns.look(GPU, OTHER, (), 3.0, ["other-g-a"])
    assert turns.called(3.0) == [third]


def test_no_service_overtakes_the_queue() -> None:
    turns, newcomer = make_turns(), ("team", "new")
    turns.take(GPU, ONE, "one-g-a", 0.0)
    turns.line(GPU, OTHER, waits=turns.look(GPU, OTHER, (), 0.0).in_line)
    for service in (ONE, newcomer):
        turn = turns.look(GPU, service, (), 1.0, ["one-g-a"])
        assert (turn.why, turn.left_s, turn.told) == ("team/other creates a group first", CALLED_S, False)
        turns.line(GPU, service, waits=turn.in_line)
    made = []
    for now in (1.0, 2.0, 3.0):
        (called,) = turns.called(now)
        assert turns.look(GPU, called, (), now).why == ""
        turns.line(GPU, called, waits=False)
        turns.take(GPU, called, "a", now)
        turns.look(GPU, called, (), now, ["a"])
        made.append(called)
    assert made == [OTHER, ONE, newcomer]


def test_service_that_failed_or_finished_blocks_no_other() -> None:
    turns = make_turns()
    turns.gave_up(GPU, ONE, WHY, 0.0)
    turns.line(GPU, ONE, waits=True)
    turns.line(GPU, OTHER, waits=True)
    pause = turns.look(GPU, ONE, (), 0.0)
    assert pause.is_stuck and not pause.in_line
    turns.line(GPU, ONE, waits=pause.in_line)
    assert turns.look(GPU, OTHER, (), 0.0).why == ""


def test_called_service_that_does_not_come_goes_last() -> None:
    turns, third = make_turns(), ("team", "third")
    for service in (ONE, OTHER, third):
        turns.line(GPU, service, waits=True)
    assert [turns.called(now) for now in (0.0, CALLED_S - 1, CALLED_S, 2 * CALLED_S, 3 * CALLED_S)] == [
        [ONE],
        [],
        [OTHER],
        [third],
        [ONE],
    ]


def test_deleted_finished_or_changed_service_leaves_the_queue() -> None:
    turns, third = make_turns(), ("team", "third")
    for service in (ONE, OTHER, third):
        turns.line(GPU, service, waits=True)
    turns.forget(ONE)
    turns.line(GPU, OTHER, waits=False)
    assert turns.called(0.0) == [third]
    turns.line("amd.com/gpu", third, waits=True)
    assert turns.called(0.5) == [third]
    assert turns.called(0.6) == []
    turns.line(GPU, ONE, waits=True)
    assert turns.called(0.7) == [ONE], "the lines are of their own"


def test_service_waiting_for_its_own_group_is_not_queued() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert not turns.look(GPU, ONE, ["one-g-a"], 1.0).in_line
    turns.gave_up(GPU, ONE, WHY, 2.0)
    pause = turns.look(GPU, ONE, (), 2.0)
    assert pause.why and not pause.in_line


def test_waiting_service_reconciles_when_reported_and_rarely_later() -> None:
    turns = make_turns()
    turns.take(GPU, ONE, "one-g-a", 0.0)
    assert turns.look(GPU, OTHER, (), 1.0).left_s == TOLD_S - 1
    assert turns.look(GPU, OTHER, (), TOLD_S).left_s == LOOK_S


@given(st.lists(st.tuples(st.sampled_from("lpgcf"), st.integers(0, 3)), max_size=60))
def test_free_turn_calls_a_waiting_service(moves: list[tuple[str, int]]) -> None:
    """look, placed, gone, called, forget: within CALLED_S of a free turn one of the line was called, and nobody overtakes."""
    turns, waiting, now = make_turns(), set[Key](), 0.0
    holder: Key | None = None
    since, made = 0.0, 0
    for move, number in moves:
        key, now = ("team", str(number)), now + 0.1
        holder = None if now - since >= UNSEEN_S else holder
        if move == "l" and key != holder:
            turn = turns.look(GPU, key, (), now)
            assert turn.why or key in waiting or not waiting
            turns.line(GPU, key, waits=turn.in_line)
            (waiting.add if turn.in_line else waiting.discard)(key)
            if not turn.why:
                holder, since = key, now
                made += 1
                turns.take(GPU, key, f"g-{made}", now)
        elif move == "p" and holder:
            turn = turns.look(GPU, holder, (), now, [f"g-{made}"])
            assert bool(turn.why) == bool(waiting), "the next group of that service overtakes nobody"
            turns.line(GPU, holder, waits=turn.in_line)
            if turn.in_line:
                waiting.add(holder)
            since = now
            if not turn.why:
                made += 1
                turns.take(GPU, holder, f"g-{made}", now)
            holder = None if turn.why else holder
        elif move == "f":
            turns.forget(key)
            waiting.discard(key)
            holder = None if holder == key else holder
        called = turns.called(now)
        now += CALLED_S
        called += turns.called(now)
        holder = None if now - since >= UNSEEN_S else holder
        assert bool(called) == bool(waiting and holder is None)
        assert set(called) <= waiting
