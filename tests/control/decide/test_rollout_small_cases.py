"""Every rollout of up to three groups in any state, up to three wanted, with any strategy.

Each ends with the wanted groups serving, at most `partition` of them of an old revision. No step exceeds `replicas` and the
surge, falls below availability, deletes a serving group before unready ones, or reuses a name.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_operator.decide.state.groups import live_groups, staying_groups
from tests.control.builders import make_desired
from tests.control.decide.rollouts import (
    MAX_STEPS,
    STRATEGIES,
    Groups,
    check_step,
    group_lists,
    make_in_state,
    small_starts,
    start_one,
)


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
@pytest.mark.parametrize("partition", [0, 1])
def test_every_small_rollout(unavailable: int, surge: int, partition: int) -> None:
    for replicas in range(4):
        desired = make_desired(replicas, max_unavailable=unavailable, max_surge=surge, partition=partition)
        for start in small_starts():
            groups = start
            for moment in range(MAX_STEPS):
                step, after = check_step(desired, groups, moment)
                settled = start_one(after)
                if not step.actions and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}, {desired}")
            assert [group.alive for group in live_groups(groups)] == [True] * replicas, start
            assert sum(group.revision != "new" for group in live_groups(groups)) <= partition, start


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_held_or_paused_rollout_resumes(unavailable: int, surge: int) -> None:
    """While stopped, no serving group drains; stopped at any step, it ends as usual."""
    start = tuple(make_in_state(name, "old", "ready", size=1) for name in "abc")
    free = make_desired(3, max_unavailable=unavailable, max_surge=surge)
    stops = (
        replace(free, hold_reason="queued"),
        replace(free, hold_reason="late", stuck_reason="late"),
        replace(free, paused=True),
    )
    for stopped, after_moments in itertools.product(stops, range(12)):
        groups = start
        for moment in range(MAX_STEPS):
            desired = stopped if after_moments <= moment < after_moments + 6 else free
            step, after = check_step(desired, groups, moment)
            assert desired is free or not step.drain
            groups = start_one(after)
        assert sorted((group.revision, group.serving) for group in live_groups(groups)) == [("new", True)] * 3


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_uncertain_successor_keeps_the_old_group(unavailable: int, surge: int) -> None:
    """An unready group is kept too, because it may recover."""
    kept_unready = 0
    for replicas in range(4):
        stuck = make_desired(replicas, max_unavailable=unavailable, max_surge=surge, hold_reason="late", stuck_reason="late")
        for start in small_starts():
            step, _ = check_step(stuck, start, 0)
            removed_uids = {action.uid for action in step.delete} | {action.uid for action in step.drain}
            removed = [group for group in start if group.uid in removed_uids]
            surplus = [group for group in removed if not group.assessment.lost_reason and not group.draining]
            assert len(surplus) <= max(len(staying_groups(start)) - replicas, 0), start
            staying = staying_groups(start)
            kept_unready += any(group.revision == "old" and not group.ready and group not in removed for group in staying)
    assert kept_unready > 100


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_stopped_rollout_keeps_at_most_the_wanted_groups(unavailable: int, surge: int) -> None:
    """Of a surge, only groups of the newest revision are kept."""
    for replicas, start in itertools.product((1, 2), small_starts()):
        free = make_desired(replicas, max_unavailable=unavailable, max_surge=surge)
        for stopped in (
            replace(free, hold_reason="queued"),
            replace(free, hold_reason="late", stuck_reason="late"),
            replace(free, paused=True),
        ):
            groups = start
            for moment in range(MAX_STEPS):
                step, after = check_step(stopped, groups, moment)
                settled = start_one(after)
                if not step.actions and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}, {stopped}")
            new = sum(group.revision == "new" for group in live_groups(groups))
            assert replicas <= len(live_groups(groups)) <= replicas + min(surge, new), (start, stopped)


SPECS = st.tuples(st.sampled_from(["new", "old", "older"]), st.integers(0, 5), st.sampled_from(STRATEGIES), st.integers(0, 2))


@settings(deadline=None, max_examples=80)
@given(group_lists, st.lists(st.tuples(SPECS, st.integers(1, 4)), min_size=1, max_size=4))
def test_repeated_spec_changes_end_at_the_latest_spec(
    groups: Groups, specs: list[tuple[tuple[str, int, tuple[int, int], int], int]]
) -> None:
    """Larger services and rollbacks in between; the invariants hold at every step."""
    moment = 0
    for (revision, replicas, (unavailable, surge), partition), reconciles in [*specs, (specs[-1][0], 150)]:
        desired = make_desired(replicas, revision, max_unavailable=unavailable, max_surge=surge, partition=partition)
        for _ in range(reconciles):
            moment += 1
            _, after = check_step(desired, groups, moment)
            groups = start_one(after)
    assert [group.alive for group in live_groups(groups)] == [True] * replicas
    assert sum(group.revision != revision for group in live_groups(groups)) <= partition
