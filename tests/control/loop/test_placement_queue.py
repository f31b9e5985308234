"""The placement queue: one group at a time per device, in order of arrival, without starvation."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import (
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    OBSERVE_TIMEOUT_S,
    RECHECK_S,
    REPORT_AFTER_S,
    TURN_TIMEOUT_S,
    PlacementQueue,
)

ONE, OTHER = ("team", "one"), ("team", "other")
GPU = "nvidia.com/gpu"
WHY = "group one-g-a was given up"


def make_queue(draw: float = 1.0) -> PlacementQueue:
    return PlacementQueue(lambda: draw)


def test_one_service_creates_a_group_at_a_time() -> None:
    queue = make_queue()
    assert queue.turn(GPU, ONE, (), 0.0).why == ""
    queue.take(GPU, ONE, "one-g-a", 0.0)
    blocked = queue.turn(GPU, OTHER, (), 1.0)
    assert blocked.why == "group one-g-a of team/one is waiting for nodes; it is placed first"
    assert queue.turn(GPU, ONE, ["one-g-a"], 1.0).why, "its own second group waits too"
    assert queue.turn(GPU, ONE, (), 2.0, ["one-g-a"]).why == "", "the group has its nodes"
    assert queue.turn(GPU, OTHER, (), 2.0).why == ""


def test_already_scheduled_group_holds_no_turn() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    queue.turn(GPU, ONE, (), 0.5, ["one-g-a"])
    assert queue.turn(GPU, OTHER, (), 0.5).why == ""


def test_other_devices_have_turns_of_their_own() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert queue.turn("amd.com/gpu", OTHER, (), 1.0).why == ""


def test_unobserved_group_releases_the_turn() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert queue.turn(GPU, ONE, (), OBSERVE_TIMEOUT_S - 1).why
    assert queue.turn(GPU, ONE, (), OBSERVE_TIMEOUT_S).why == ""


def test_unobserved_group_of_an_idle_service_blocks_no_service() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    queue.set_queued(GPU, OTHER, is_queued=queue.turn(GPU, OTHER, (), OBSERVE_TIMEOUT_S - 1).is_queued)
    assert queue.services_to_wake(OBSERVE_TIMEOUT_S - 1) == []
    assert queue.services_to_wake(OBSERVE_TIMEOUT_S) == [OTHER]
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert queue.turn(GPU, OTHER, (), OBSERVE_TIMEOUT_S).why == ""
    queue.turn(GPU, ONE, ["one-g-a"], OBSERVE_TIMEOUT_S)
    assert queue.turn(GPU, OTHER, (), 3 * OBSERVE_TIMEOUT_S).why, "this group is observed"


def test_waiting_groups_keep_the_turn_after_operator_restart() -> None:
    queue = make_queue()
    assert queue.turn(GPU, ONE, ["one-g-a"], 0.0).why
    assert "one-g-a" in queue.turn(GPU, OTHER, (), 0.0).why


def test_short_wait_for_the_turn_is_not_reported() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert not queue.turn(GPU, OTHER, (), REPORT_AFTER_S - 1).is_reported
    assert queue.turn(GPU, OTHER, (), REPORT_AFTER_S).is_reported


def test_each_failed_try_waits_longer_and_lets_others_pass() -> None:
    queue, now = make_queue(), 0.0
    for attempt in range(8):
        queue.take(GPU, ONE, "one-g-a", now)
        queue.pause(GPU, ONE, WHY, now)
        assert queue.turn(GPU, OTHER, (), now).why == ""
        pause = queue.turn(GPU, ONE, (), now)
        assert (pause.retry_s, pause.is_reported) == (min(MIN_PAUSE_S * 2**attempt, MAX_PAUSE_S), True)
        assert pause.why == "the next attempt follows after a pause; group one-g-a was given up"
        now += pause.retry_s
        assert queue.turn(GPU, ONE, (), now).why == ""
    queue.clear_pause(ONE)
    queue.pause(GPU, ONE, WHY, now)
    assert queue.turn(GPU, ONE, (), now).retry_s == MIN_PAUSE_S


def test_pauses_are_random_so_that_services_do_not_collide() -> None:
    queue = make_queue(0.0)
    queue.pause(GPU, ONE, WHY, 0.0)
    assert queue.turn(GPU, ONE, (), 0.0).retry_s == MIN_PAUSE_S / 2


def test_deleted_service_or_other_devices_block_no_service() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    queue.forget(ONE)
    assert queue.turn(GPU, OTHER, (), 0.0).why == ""
    queue.take(GPU, ONE, "one-g-a", 0.0)
    queue.turn("amd.com/gpu", ONE, (), OBSERVE_TIMEOUT_S)
    assert queue.turn(GPU, OTHER, (), OBSERVE_TIMEOUT_S).why == ""


def test_waiting_services_are_woken_in_arrival_order() -> None:
    queue, third = make_queue(), ("team", "third")
    queue.take(GPU, ONE, "one-g-a", 0.0)
    for service in (OTHER, third, OTHER):
        queue.set_queued(GPU, service, is_queued=queue.turn(GPU, service, (), 0.0).is_queued)
    assert queue.services_to_wake(1.0) == []
    queue.turn(GPU, ONE, (), 1.0, ["one-g-a"])
    assert (queue.services_to_wake(1.0), queue.services_to_wake(2.0)) == ([OTHER], [])
    queue.set_queued(GPU, OTHER, is_queued=False)
    queue.take(GPU, OTHER, "other-g-a", 2.0)
    assert queue.services_to_wake(2.0) == []
    queue.turn(GPU, OTHER, (), 3.0, ["other-g-a"])
    assert queue.services_to_wake(3.0) == [third]


def test_no_service_overtakes_the_queue() -> None:
    queue, newcomer = make_queue(), ("team", "new")
    queue.take(GPU, ONE, "one-g-a", 0.0)
    queue.set_queued(GPU, OTHER, is_queued=queue.turn(GPU, OTHER, (), 0.0).is_queued)
    for service in (ONE, newcomer):
        turn = queue.turn(GPU, service, (), 1.0, ["one-g-a"])
        assert (turn.why, turn.retry_s, turn.is_reported) == ("team/other creates a group first", TURN_TIMEOUT_S, False)
        queue.set_queued(GPU, service, is_queued=turn.is_queued)
    holders = []
    for now in (1.0, 2.0, 3.0):
        (woken,) = queue.services_to_wake(now)
        assert queue.turn(GPU, woken, (), now).why == ""
        queue.set_queued(GPU, woken, is_queued=False)
        queue.take(GPU, woken, "a", now)
        queue.turn(GPU, woken, (), now, ["a"])
        holders.append(woken)
    assert holders == [OTHER, ONE, newcomer]


def test_service_that_failed_or_finished_blocks_no_other() -> None:
    queue = make_queue()
    queue.pause(GPU, ONE, WHY, 0.0)
    queue.set_queued(GPU, ONE, is_queued=True)
    queue.set_queued(GPU, OTHER, is_queued=True)
    pause = queue.turn(GPU, ONE, (), 0.0)
    assert pause.is_stuck and not pause.is_queued
    queue.set_queued(GPU, ONE, is_queued=pause.is_queued)
    assert queue.turn(GPU, OTHER, (), 0.0).why == ""


def test_woken_service_without_reconcile_moves_to_the_end() -> None:
    queue, third = make_queue(), ("team", "third")
    for service in (ONE, OTHER, third):
        queue.set_queued(GPU, service, is_queued=True)
    assert [
        queue.services_to_wake(now) for now in (0.0, TURN_TIMEOUT_S - 1, TURN_TIMEOUT_S, 2 * TURN_TIMEOUT_S, 3 * TURN_TIMEOUT_S)
    ] == [
        [ONE],
        [],
        [OTHER],
        [third],
        [ONE],
    ]


def test_deleted_finished_or_changed_service_leaves_the_queue() -> None:
    queue, third = make_queue(), ("team", "third")
    for service in (ONE, OTHER, third):
        queue.set_queued(GPU, service, is_queued=True)
    queue.forget(ONE)
    queue.set_queued(GPU, OTHER, is_queued=False)
    assert queue.services_to_wake(0.0) == [third]
    queue.set_queued("amd.com/gpu", third, is_queued=True)
    assert queue.services_to_wake(0.5) == [third]
    assert queue.services_to_wake(0.6) == []
    queue.set_queued(GPU, ONE, is_queued=True)
    assert queue.services_to_wake(0.7) == [ONE], "each device has its own queue"


def test_service_waiting_for_its_own_group_is_not_queued() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert not queue.turn(GPU, ONE, ["one-g-a"], 1.0).is_queued
    queue.pause(GPU, ONE, WHY, 2.0)
    pause = queue.turn(GPU, ONE, (), 2.0)
    assert pause.why and not pause.is_queued


def test_waiting_service_reconciles_when_reported_and_rarely_later() -> None:
    queue = make_queue()
    queue.take(GPU, ONE, "one-g-a", 0.0)
    assert queue.turn(GPU, OTHER, (), 1.0).retry_s == REPORT_AFTER_S - 1
    assert queue.turn(GPU, OTHER, (), REPORT_AFTER_S).retry_s == RECHECK_S


@given(st.lists(st.tuples(st.sampled_from("lpgcf"), st.integers(0, 3)), max_size=60))
def test_free_device_wakes_a_waiting_service(moves: list[tuple[str, int]]) -> None:
    """Moves: turn, placed, forget, wait. A free device wakes a queued service within TURN_TIMEOUT_S; the order is kept."""
    queue, waiting, now = make_queue(), set[Key](), 0.0
    holder: Key | None = None
    since, count = 0.0, 0
    for move, number in moves:
        key, now = ("team", str(number)), now + 0.1
        holder = None if now - since >= OBSERVE_TIMEOUT_S else holder
        if move == "l" and key != holder:
            turn = queue.turn(GPU, key, (), now)
            assert turn.why or key in waiting or not waiting
            queue.set_queued(GPU, key, is_queued=turn.is_queued)
            (waiting.add if turn.is_queued else waiting.discard)(key)
            if not turn.why:
                holder, since = key, now
                count += 1
                queue.take(GPU, key, f"g-{count}", now)
        elif move == "p" and holder:
            turn = queue.turn(GPU, holder, (), now, [f"g-{count}"])
            assert bool(turn.why) == bool(waiting), "the next group of that service queues behind others"
            queue.set_queued(GPU, holder, is_queued=turn.is_queued)
            if turn.is_queued:
                waiting.add(holder)
            since = now
            if not turn.why:
                count += 1
                queue.take(GPU, holder, f"g-{count}", now)
            holder = None if turn.why else holder
        elif move == "f":
            queue.forget(key)
            waiting.discard(key)
            holder = None if holder == key else holder
        woken = queue.services_to_wake(now)
        now += TURN_TIMEOUT_S
        woken += queue.services_to_wake(now)
        holder = None if now - since >= OBSERVE_TIMEOUT_S else holder
        assert bool(woken) == bool(waiting and holder is None)
        assert set(woken) <= waiting
