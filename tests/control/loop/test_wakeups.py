"""The keyed queue."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_operator.kube.store import Key
from phalanx_operator.loop.worker import Wakeups, backoff

A, B = ("n", "a"), ("n", "b")


def test_a_key_is_taken_when_it_is_due() -> None:
    queue = Wakeups()
    queue.wake(A, 2.0)
    assert (queue.take(1.9), queue.next_due(), queue.take(2.0), queue.take(9.9)) == (None, 2.0, A, None)


def test_queue_counts_only_due_keys() -> None:
    queue = Wakeups()
    queue.wake(A, 2.0)
    queue.wake(B, 600.0)
    assert [queue.num_due(now) for now in (1.0, 2.0, 600.0)] == [0, 1, 2]


def test_many_wakes_are_one_reconcile_at_the_earliest_time() -> None:
    queue = Wakeups()
    for at in (5.0, 1.0, 3.0):
        queue.wake(A, at)
    assert (queue.take(1.0), queue.take(10.0), len(queue)) == (A, None, 0)


def test_busy_key_waits_and_lets_others_pass() -> None:
    queue = Wakeups()
    queue.wake(A, 0.0)
    assert queue.take(0.0) == A
    queue.wake(A, 0.0)
    queue.wake(B, 1.0)
    assert (queue.take(0.5), queue.next_due(), queue.take(1.0)) == (None, 1.0, B)
    queue.done(A)
    assert queue.take(1.0) == A


@given(st.lists(st.tuples(st.sampled_from("wtd"), st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_no_key_has_two_workers_or_loses_a_wakeup(moves: list[tuple[str, int, int]]) -> None:
    queue, busy, woken = Wakeups(), list[Key](), set[Key]()
    for move, number, at in moves:
        key = ("n", str(number))
        if move == "w":
            queue.wake(key, float(at))
            woken.add(key)
        elif move == "t" and (taken := queue.take(float(at))):
            assert taken not in busy and taken in woken
            busy.append(taken)
            woken.discard(taken)
        elif move == "d" and busy:
            queue.done(busy.pop())
    for key in busy:
        queue.done(key)
    left = {key for key in iter(lambda: queue.take(100.0), None)}
    assert left == woken


@pytest.mark.parametrize(("failures", "least", "most"), [(0, 0.25, 0.5), (1, 0.5, 1.0), (20, 30.0, 60.0)])
def test_waits_grow_and_are_spread(failures: int, least: float, most: float) -> None:
    draw = random.Random(1).random
    assert all(least <= backoff(failures, draw) <= most for _ in range(50))


@given(st.lists(st.tuples(st.sampled_from("wwtd"), st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_next_due_time_is_the_earliest_idle_key(moves: list[tuple[str, int, int]]) -> None:
    queue, busy, due = Wakeups(), list[Key](), dict[Key, float]()
    for move, number, at in moves:
        key = ("n", str(number))
        if move == "w":
            queue.wake(key, float(at))
            due[key] = min(due.get(key, float("inf")), float(at))
        elif move == "t" and (taken := queue.take(float(at))):
            busy.append(taken)
            assert due.pop(taken) <= at
        elif move == "d" and busy:
            queue.done(busy.pop())
        assert queue.next_due() == min((at for key, at in due.items() if key not in busy), default=None)
