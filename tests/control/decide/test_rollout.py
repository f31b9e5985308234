"""Rollouts step by step: tables, golden traces, and properties over random starts and failures."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_operator.decide.groups.rollout import next_step
from phalanx_operator.decide.state.groups import deletion_order, live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod
from tests.control.builders import make_desired, make_group
from tests.control.conftest import Check
from tests.control.decide.rollouts import (
    DRAINING,
    Groups,
    apply_step,
    describe,
    drain,
    group_lists,
    make_in_state,
    num_serving,
    run_rollout,
    start_all,
    start_one,
    with_pods,
)
from tests.examples import examples

SCENARIOS = {
    "first-start": (make_desired(2), ()),
    "scale-up": (make_desired(3), (make_group("a"),)),
    "scale-down": (make_desired(1), (make_group("a", created="1"), make_group("b", created="2"), make_group("c", ready=False))),
    "to-zero": (make_desired(0), (make_group("a"), make_group("b"))),
    "rollout": (make_desired(3), tuple(make_group(n, "old", created=n) for n in "abc")),
    "rollout-broken-first": (
        make_desired(3),
        (make_group("a", "old"), make_group("b", "old", ready=False), make_group("c", "old")),
    ),
    "rollout-and-scale-down": (make_desired(1), (*tuple(make_group(n, "old", created=n) for n in "ab"), make_group("c"))),
    "second-change": (make_desired(3), (make_group("a", "old"), make_group("b", "middle", ready=False), make_group("c", "old"))),
    "scale-down-undone": (make_desired(2), (make_group("a"), make_group("b", draining=DRAINING))),
    "scale-down-while-draining": (make_desired(1), (make_group("a"), make_group("b"), make_group("c", draining=DRAINING))),
    "rollback-while-draining": (make_desired(2), (make_group("a", draining=DRAINING), make_group("b", "newer", ready=False))),
    "lost-node": (
        make_desired(2),
        (make_group("a"), make_group("b", ready=False, lost_reason="node n has not been ready for 120 s")),
    ),
    "straggler": (make_desired(2), (make_group("a", straggler_reason="a straggler for 60 s"), make_group("b"))),
    "draining-breaks": (make_desired(2), (make_group("a", "old", ready=False, draining=DRAINING), make_group("b", "old"))),
    "surge": (make_desired(2, max_surge=1), tuple(make_group(n, "old", created=n) for n in "ab")),
    "surge-of-two": (make_desired(3, max_surge=2), tuple(make_group(n, "old", created=n) for n in "abc")),
    "surge-and-broken": (make_desired(2, max_surge=1), (make_group("a", "old", ready=False), make_group("b", "old"))),
    "surge-held": (make_desired(1, max_surge=1, hold_reason="b is late"), (make_group("a", "old"), make_group("b", ready=False))),
    "late-and-one-blips": (
        make_desired(3, hold_reason="c is late", late_reason="c is late", stuck_reason="c is late"),
        (make_group("a", "old"), make_group("b", "old", ready=False), make_group("c", ready=False)),
    ),
    "paused-surge-scaled-in": (
        make_desired(2, max_surge=1, paused=True),
        tuple(make_group(n, "old", created=n) for n in "abcd"),
    ),
    "straggler-with-a-surge": (
        make_desired(2, max_unavailable=0, max_surge=1),
        (make_group("a", straggler_reason="a straggler for 60 s"), make_group("b")),
    ),
    "unreachable": (make_desired(2), (make_in_state("a", "new", "silent"), make_group("b"))),
    "unreachable-with-a-surge": (make_desired(2, max_surge=1), (make_in_state("a", "new", "silent"), make_group("b"))),
    "unreachable-without-capacity": (
        make_desired(2, max_surge=1, no_surge_reason="c waited 600 s for nodes"),
        (make_in_state("a", "new", "silent"), make_group("b"), make_group("c", ready=False)),
    ),
    "unreachable-and-old": (
        make_desired(3, max_surge=1),
        (make_in_state("a", "new", "silent"), make_in_state("b", "old", "silent"), make_group("c", "old")),
    ),
    "unreachable-held": (
        make_desired(2, max_surge=1, hold_reason="c is waiting for nodes"),
        (make_in_state("a", "new", "silent"), make_group("b"), make_group("c", ready=False)),
    ),
    "unreachable-paused": (make_desired(2, max_surge=1, paused=True), (make_in_state("a", "new", "silent"), make_group("b"))),
    "two-at-once": (make_desired(4, max_unavailable=2), tuple(make_group(n, "old", created=n) for n in "abcd")),
    "canary": (make_desired(3, partition=2), tuple(make_group(n, "old", created=n) for n in "abc")),
    "paused": (make_desired(3, paused=True), (make_group("a", "old"), make_group("b", "old", ready=False))),
    "rollback": (
        make_desired(3, "old"),
        (make_group("a", "old"), make_group("b", "new", ready=False), make_group("c", "new")),
    ),
    "three-revisions": (make_desired(3), (make_group("a", "old"), make_group("b", "middle"), make_group("c", "new"))),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_rollouts(name: str, golden: Check) -> None:
    desired, groups = SCENARIOS[name]
    history = run_rollout(desired, groups, start_one)
    lines = [f"{desired.replicas} groups of revision {desired.revision} wanted", *(describe(*moment) for moment in history)]
    golden(f"rollouts/{name}.txt", "\n".join(lines) + "\n")


def failing(name: str) -> ObservedGroup:
    pod = ObservedPod(name=f"{name}-0", index=0, owner_uid=f"uid-{name}", node="n", reason="CrashLoopBackOff")
    return make_group(name, pods=(pod,), size=1)


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ([make_group("a", created="1"), make_group("b", created="2")], "b"),
        ([make_group("a", "old", created="1"), make_group("b", created="2")], "a"),
        ([make_group("a", "old"), make_group("b", ready=False)], "b"),
        ([make_group("a", "old", ready=False), make_group("b", ready=False, created="2")], "a"),
        ([make_group("a", created="1"), make_group("b", created="1")], "b"),
        ([make_group("a", kv_tokens=5), make_group("b", kv_tokens=9, created="2")], "a"),
        ([make_group("a", "old", kv_tokens=9), make_group("b", kv_tokens=5)], "a"),
        ([make_group("a", has_cordoned_node=True, kv_tokens=9), make_group("b", kv_tokens=5)], "a"),
        ([make_group("a", "old"), make_group("b", has_cordoned_node=True)], "a"),
        ([make_group("a", ready=False), make_group("b", pods=())], "b"),
        ([make_group("a", pods=()), failing("b")], "b"),
        ([make_in_state("a", "new", "silent"), make_group("b")], "a"),
        ([make_in_state("a", "new", "silent"), make_group("b", ready=False)], "b"),
        ([make_in_state("a", "old", "silent"), make_group("b", ready=False, kept_reason="a partition")], "b"),
    ],
    ids=[
        *("youngest", "old revision before youngest", "not ready before old revision", "both", "same age", "fewest tokens"),
        *("old revision before tokens", "cordoned before tokens", "old revision before cordoned", "no node", "failing first"),
        *("silent before ready", "starting before silent", "kept before silent"),
    ],
)
def test_order_of_deletion(groups: list[ObservedGroup], first: str) -> None:
    assert deletion_order(groups, "new")[0].name == first


DRAINING_GROUP = make_group("z", created="0", kv_tokens=99, draining=DRAINING)
"""The oldest group with the most tokens: it is first only because it drains."""


@pytest.mark.parametrize(
    ("others", "replicas", "leaving"),
    [
        ([make_group("a", kv_tokens=1)], 1, set()),
        ([make_group("a", "old")], 1, set()),
        ([make_group("a", has_cordoned_node=True)], 1, set()),
        ([make_group("a", ready=False)], 1, set()),
        ([failing("a")], 1, set()),
        ([make_group("a", kv_tokens=1), make_group("b", kv_tokens=2)], 1, {"a"}),
        ([make_group("a", "old"), make_group("b", ready=False)], 1, {"b"}),
        ([make_group("a"), make_group("b")], 0, {"a", "b"}),
    ],
    ids=["fewer tokens", "old revision", "cordoned", "not ready", "failing", "one more", "one more, not ready", "all"],
)
def test_draining_group_is_deleted_before_any_other(others: list[ObservedGroup], replicas: int, leaving: set[str]) -> None:
    step = next_step(make_desired(replicas, paused=True), (*others, DRAINING_GROUP))
    assert {action.name for action in step.actions} == leaving


def test_names_of_terminating_groups_are_not_reused() -> None:
    desired = make_desired(1)
    terminating = make_group(desired.names[0], terminating=True)
    step = next_step(desired, (terminating,))
    assert [action.name for action in step.create] == [desired.names[1]]


def test_a_retry_takes_the_same_names() -> None:
    desired = make_desired(3)
    assert next_step(desired, ()) == next_step(desired, ())


def test_failing_revision_stops_the_rollout_at_one_group() -> None:
    desired = make_desired(3)
    history = run_rollout(
        desired, tuple(make_group(n, "old") for n in "abc"), lambda groups: tuple(drain(group) for group in live_groups(groups))
    )
    last = history[-1][1]
    assert sorted((group.revision, group.ready) for group in last) == [("new", False), ("old", True), ("old", True)]


@settings(max_examples=examples(100))
@given(group_lists, st.integers(0, 6), st.randoms(use_true_random=False))
def test_every_rollout_settles(groups: Groups, replicas: int, chance: object) -> None:
    desired = make_desired(replicas)
    for settle in (start_all, start_one):
        last = run_rollout(desired, groups, settle)[-1][1]
        assert [(group.revision, group.alive) for group in live_groups(last)] == [("new", True)] * replicas
        if replicas:
            surged = run_rollout(make_desired(replicas, max_surge=1), groups, settle)[-1][1]
            assert [(group.revision, group.ready) for group in live_groups(surged)] == [("new", True)] * replicas


@settings(max_examples=examples(100))
@given(group_lists, st.integers(0, 6))
def test_no_step_removes_a_second_ready_group(groups: Groups, replicas: int) -> None:
    """At most one ready group becomes unavailable, and no step exceeds both the wanted and the former number of groups."""
    desired = make_desired(replicas)
    for _ in range(60):
        before = num_serving(groups)
        step = next_step(desired, groups)
        after = apply_step(step, desired, groups, 0)
        serving = num_serving(after)
        assert serving >= min(before, replicas - desired.max_unavailable)
        assert len(staying_groups(after)) <= replicas <= len(live_groups(after)) <= max(len(live_groups(groups)), replicas)
        groups = start_one(after)


@settings(max_examples=examples(100))
@given(group_lists, st.integers(0, 6), st.integers(0, 6))
def test_serving_group_is_drained_before_its_deletion(groups: Groups, replicas: int, then: int) -> None:
    """Also if the wanted number changes in between."""
    for turn in range(80):
        desired = make_desired(replicas if turn < 3 else then)
        step = next_step(desired, groups)
        by_uid = {group.uid: group for group in groups}
        for deletion in step.delete:
            victim = by_uid[deletion.uid]
            assessment = victim.assessment
            assert not victim.alive or assessment.drained_reason or assessment.lost_reason, victim
        for drained in step.drain:
            group = by_uid[drained.uid]
            assert group.alive and not group.draining and drained.uid not in {kept.uid for kept in step.keep}
        groups = start_one(apply_step(step, desired, groups, turn))
    assert [group.alive for group in live_groups(groups)] == [True] * then


@settings(deadline=None)
@given(group_lists, st.integers(0, 6), st.lists(st.integers(0, 6), max_size=12))
def test_groups_that_fail_do_not_stop_a_rollout(groups: Groups, replicas: int, breaks: list[int]) -> None:
    desired = make_desired(replicas)
    left = list(breaks)

    def settle(groups: Groups) -> Groups:
        started = list(start_all(groups))
        if left and started:
            victim = left.pop() % len(started)
            started[victim] = with_pods(started[victim], ready=False)
        return tuple(started)

    after_failures = run_rollout(desired, groups, settle)[-1][1]
    last = run_rollout(desired, after_failures, start_all)[-1][1]
    assert [(group.revision, group.alive) for group in live_groups(last)] == [("new", True)] * replicas


@settings(deadline=None)
@given(group_lists, st.integers(0, 6), st.integers(1, 3))
def test_stale_informer_creates_no_extra_group(groups: Groups, replicas: int, reconciles: int) -> None:
    """Deletions are remembered by UID. Creations are not observed, and reuse their names."""
    desired = make_desired(replicas)
    created: set[str] = set()
    deleted: set[str] = set()
    marks: dict[str, DrainMark | None] = {}
    for _ in range(reconciles):
        stale = tuple(
            replace(g, terminating=g.terminating or g.uid in deleted, draining=marks.get(g.uid, g.draining)) for g in groups
        )
        step = next_step(desired, stale)
        deleted |= {deletion.uid for deletion in step.delete}
        created |= {creation.name for creation in step.create}
        marks |= {drained.uid: DRAINING for drained in step.drain} | {kept.uid: None for kept in step.keep}
    kept = [group for group in live_groups(groups) if group.uid not in deleted]
    assert len(kept) + len(created) <= max(replicas, len(kept))


def test_cluster_that_never_settles_is_reported() -> None:
    with pytest.raises(RuntimeError, match="no end"):
        run_rollout(
            make_desired(1),
            (make_group("a"),),
            lambda groups: tuple(with_pods(g, ready=not g.ready) for g in groups),
            max_steps=9,
        )
