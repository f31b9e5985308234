"""Every small rollout there is: up to three groups in any state, up to three wanted, any strategy. Each is run to its end.

It ends; with as many groups as are wanted, all serving, and no more of an old revision than the partition keeps; it never has
more groups than `replicas` and the surge, nor less that serve than `replicas` without those that may be missing, but for what was
so before; groups that do not serve go first; and no name is ever taken while a group of that name is there.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_operator.decide.groups.rollout import RolloutStep, carry_out, next_step
from phalanx_operator.decide.state.actions import CreateGroup
from phalanx_operator.decide.state.groups import Desired, live, staying
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup
from tests.control.builders import make_desired, make_group
from tests.control.decide.test_rollout import group_lists, start_one

Groups = tuple[ObservedGroup, ...]
GOING = DrainMark("2026-01-02T03:04:05Z", "it goes")
STATES = ("ready", "starting", "draining", "drained", "lost", "terminating")
KINDS = tuple(itertools.product(("new", "old"), STATES))
STRATEGIES = ((1, 0), (0, 1), (1, 1), (2, 0), (1, 2))
MOST_STEPS = 60


def in_state(name: str, revision: str, state: str) -> ObservedGroup:
    return make_group(
        name,
        revision,
        size=1,
        ready=state not in ("starting", "lost"),
        terminating=state == "terminating",
        draining=GOING if state in ("draining", "drained") else None,
        drained="it has no streams" if state == "drained" else "",
        lost="its node is lost" if state == "lost" else "",
    )


def starts() -> Iterator[Groups]:
    for count in range(4):
        for kinds in itertools.combinations_with_replacement(KINDS, count):
            yield tuple(in_state(f"g{i}", *kind) for i, kind in enumerate(kinds))


def serving(groups: Groups) -> int:
    return sum(group.serving for group in staying(groups))


def checked(desired: Desired, groups: Groups, moment: int) -> tuple[RolloutStep | None, Groups]:
    """The next step, carried out. What must hold of every step is asserted here."""
    step = next_step(desired, groups)
    if step is None:
        return None, groups
    there = {group.name for group in groups}
    made = [action.name for action in step.actions if isinstance(action, CreateGroup)]
    assert not there & set(made) and len(set(made)) == len(made), "a name that is taken"
    after = carry_out(step, desired, groups, moment)
    most = desired.replicas + desired.max_surge
    assert len(live(after)) <= max(most, len(live(groups)) - len(step.delete)), "above the surge"
    assert serving(after) >= min(serving(groups), desired.replicas - desired.max_unavailable), "below availability"
    if desired.max_surge and any(one.purpose == "revision" for one in step.drain):
        assert serving(after) >= desired.replicas, "with a surge nothing goes before its successor serves"
    by_uid = {group.uid: group for group in groups}
    assert not any(by_uid[one.uid].serving for one in step.delete), "a group that serves was not emptied first"
    if any(by_uid[one.uid].revision != desired.revision for one in step.drain):
        left = [g for g in staying(after) if g.revision != desired.revision and not g.ready]
        assert len(left) <= desired.partition, "one that serves goes, and one that does not stays"
    return step, after


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
@pytest.mark.parametrize("partition", [0, 1])
def test_every_small_rollout(unavailable: int, surge: int, partition: int) -> None:
    for replicas in range(4):
        desired = make_desired(replicas, max_unavailable=unavailable, max_surge=surge, partition=partition)
        for start in starts():
            groups = start
            for moment in range(MOST_STEPS):
                step, after = checked(desired, groups, moment)
                settled = start_one(after)
                if step is None and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}, {desired}")
            assert [group.serving for group in live(groups)] == [True] * replicas, start
            assert sum(group.revision != "new" for group in live(groups)) <= partition, start


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_held_or_paused_rollout_resumes(unavailable: int, surge: int) -> None:
    """While it is stopped nothing that serves is given up; and stopped at any moment, it ends as if it had not been."""
    start = tuple(in_state(name, "old", "ready") for name in "abc")
    free = make_desired(3, max_unavailable=unavailable, max_surge=surge)
    stops = (replace(free, held="its turn comes"), replace(free, held="late", stuck="late"), replace(free, paused=True))
    for stopped, after_moments in itertools.product(stops, range(12)):
        groups = start
        for moment in range(MOST_STEPS):
            desired = stopped if after_moments <= moment < after_moments + 6 else free
            step, after = checked(desired, groups, moment)
            assert desired is free or step is None or not step.drain
            groups = start_one(after)
        assert sorted((group.revision, group.serving) for group in live(groups)) == [("new", True)] * 3


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_uncertain_successor_keeps_the_old_group(unavailable: int, surge: int) -> None:
    """Not even one that is not ready now: it may be back in a moment."""
    blips = 0
    for replicas in range(4):
        stuck = make_desired(replicas, max_unavailable=unavailable, max_surge=surge, held="late", stuck="late")
        for start in starts():
            step, _ = checked(stuck, start, 0)
            gone = {one.uid for one in step.delete} | {one.uid for one in step.drain} if step else set()
            given_up = [group for group in start if group.uid in gone]
            surplus = [group for group in given_up if not group.lost and not group.draining]
            assert len(surplus) <= max(len(staying(start)) - replicas, 0), start
            blips += any(group.revision == "old" and not group.ready and group not in given_up for group in staying(start))
    assert blips > 100


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_stopped_rollout_keeps_at_most_the_wanted_groups(unavailable: int, surge: int) -> None:
    """Whatever the count was when it was stopped: of a surge only groups of the newest revision are kept."""
    for replicas, start in itertools.product((1, 2), starts()):
        free = make_desired(replicas, max_unavailable=unavailable, max_surge=surge)
        for stopped in (
            replace(free, held="its turn comes"),
            replace(free, held="late", stuck="late"),
            replace(free, paused=True),
        ):
            groups = start
            for moment in range(MOST_STEPS):
                step, after = checked(stopped, groups, moment)
                settled = start_one(after)
                if step is None and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}, {stopped}")
            new = sum(group.revision == "new" for group in live(groups))
            assert replicas <= len(live(groups)) <= replicas + min(surge, new), (start, stopped)


SPECS = st.tuples(st.sampled_from(["new", "old", "older"]), st.integers(0, 5), st.sampled_from(STRATEGIES), st.integers(0, 2))


@settings(deadline=None, max_examples=80)
@given(group_lists, st.lists(st.tuples(SPECS, st.integers(1, 4)), min_size=1, max_size=4))
def test_repeated_spec_changes_end_at_the_latest_spec(
    groups: Groups, specs: list[tuple[tuple[str, int, tuple[int, int], int], int]]
) -> None:
    """Larger services, and rollbacks half-way: all that holds of small ones holds at every step."""
    moment = 0
    for (revision, replicas, (unavailable, surge), partition), looks in [*specs, (specs[-1][0], 150)]:
        desired = make_desired(replicas, revision, max_unavailable=unavailable, max_surge=surge, partition=partition)
        for _ in range(looks):
            moment += 1
            _, after = checked(desired, groups, moment)
            groups = start_one(after)
    assert [group.serving for group in live(groups)] == [True] * replicas
    assert sum(group.revision != revision for group in live(groups)) <= partition
