"""Rollouts step by step: tables, golden traces, and properties over random starts and random breakdowns."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_operator.decide.groups.rollout import RolloutStep, carry_out, next_step, run_to_end
from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DrainGroup, KeepGroup
from phalanx_operator.decide.state.groups import in_order_of_deletion, live, staying
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod
from tests.control.builders import make_desired, make_group
from tests.control.conftest import Check

Groups = tuple[ObservedGroup, ...]


def with_pods(group: ObservedGroup, ready: bool) -> ObservedGroup:
    pods = tuple(ObservedPod(name=f"{group.name}-{i}", index=i, owner_uid=group.uid, ready=ready) for i in range(group.size))
    return replace(group, pods=pods, lost="")


def empty(group: ObservedGroup) -> ObservedGroup:
    return replace(group, drained="it has no streams") if group.draining else group


def start_all(groups: Groups) -> Groups:
    """A good world: what is being deleted goes, what is to be emptied is empty, and every pod becomes ready."""
    return tuple(with_pods(empty(group), ready=True) for group in live(groups))


def start_one(groups: Groups) -> Groups:
    """A slow world: what is being deleted goes; the first that is to be emptied is, and the first that starts is ready."""
    full = next((group.name for group in live(groups) if group.draining and not group.drained), None)
    here = [empty(group) if group.name == full else group for group in live(groups)]
    late = next((group.name for group in here if not group.ready), None)
    return tuple(with_pods(group, ready=True) if group.name == late else group for group in here)


def phase_of(group: ObservedGroup) -> str:
    if group.terminating:
        return "terminating"
    return "draining" if group.draining else "ready" if group.ready else "starting"


def shown(step: RolloutStep | None, groups: Groups) -> str:
    names = sorted({group.name for group in groups})
    signs = {KeepGroup: "=", DrainGroup: "~", DeleteGroup: "-", CreateGroup: "+"}
    words = [f"{signs[type(action)]} {action.name}: {action.why}" for action in step.actions] if step else ["- wait"]
    state = {g.name: phase_of(g) for g in groups}
    return "\n".join([*words, "    " + ", ".join(f"{n} {state[n]}" for n in names)])


GOING = DrainMark("2026-01-02T03:04:05Z", "3 groups, 2 wanted")
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
    "scale-down-undone": (make_desired(2), (make_group("a"), make_group("b", draining=GOING))),
    "scale-down-while-draining": (make_desired(1), (make_group("a"), make_group("b"), make_group("c", draining=GOING))),
    "rollback-while-draining": (make_desired(2), (make_group("a", draining=GOING), make_group("b", "newer", ready=False))),
    "lost-node": (make_desired(2), (make_group("a"), make_group("b", ready=False, lost="node n was not heard for 120 s"))),
    "straggler": (make_desired(2), (make_group("a", slow="a straggler for 60 s"), make_group("b"))),
    "draining-breaks": (make_desired(2), (make_group("a", "old", ready=False, draining=GOING), make_group("b", "old"))),
    "surge": (make_desired(2, max_surge=1), tuple(make_group(n, "old", created=n) for n in "ab")),
    "surge-of-two": (make_desired(3, max_surge=2), tuple(make_group(n, "old", created=n) for n in "abc")),
    "surge-and-broken": (make_desired(2, max_surge=1), (make_group("a", "old", ready=False), make_group("b", "old"))),
    "surge-held": (make_desired(1, max_surge=1, held="b is late"), (make_group("a", "old"), make_group("b", ready=False))),
    "late-and-one-blips": (
        make_desired(3, held="c is late", late="c is late", stuck="c is late"),
        (make_group("a", "old"), make_group("b", "old", ready=False), make_group("c", ready=False)),
    ),
    "paused-surge-scaled-in": (
        make_desired(2, max_surge=1, paused=True),
        tuple(make_group(n, "old", created=n) for n in "abcd"),
    ),
    "straggler-with-a-surge": (
        make_desired(2, max_unavailable=0, max_surge=1),
        (make_group("a", slow="a straggler for 60 s"), make_group("b")),
    ),
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
    history = run_to_end(desired, groups, start_one)
    lines = [f"{desired.replicas} groups of revision {desired.revision} wanted", *(shown(*moment) for moment in history)]
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
        ([make_group("a", tokens=5), make_group("b", tokens=9, created="2")], "a"),
        ([make_group("a", "old", tokens=9), make_group("b", tokens=5)], "a"),
        ([make_group("a", cordoned=True, tokens=9), make_group("b", tokens=5)], "a"),
        ([make_group("a", "old"), make_group("b", cordoned=True)], "a"),
        ([make_group("a", ready=False), make_group("b", pods=())], "b"),
        ([make_group("a", pods=()), failing("b")], "b"),
    ],
    ids=[
        *("youngest", "old revision before youngest", "not ready before old revision", "both", "same age", "fewest tokens"),
        *("old revision before tokens", "cordoned before tokens", "old revision before cordoned", "no node", "failing first"),
    ],
)
def test_order_of_deletion(groups: list[ObservedGroup], first: str) -> None:
    assert in_order_of_deletion(groups, "new")[0].name == first


LAST = make_group("z", created="0", tokens=99, draining=GOING)
"""The oldest group, with the most tokens: nothing but that it is being emptied already makes it go."""


@pytest.mark.parametrize(
    ("others", "replicas", "leaving"),
    [
        ([make_group("a", tokens=1)], 1, set()),
        ([make_group("a", "old")], 1, set()),
        ([make_group("a", cordoned=True)], 1, set()),
        ([make_group("a", ready=False)], 1, set()),
        ([failing("a")], 1, set()),
        ([make_group("a", tokens=1), make_group("b", tokens=2)], 1, {"a"}),
        ([make_group("a", "old"), make_group("b", ready=False)], 1, {"b"}),
        ([make_group("a"), make_group("b")], 0, {"a", "b"}),
    ],
    ids=["fewer tokens", "old revision", "cordoned", "not ready", "failing", "one more", "one more, not ready", "all"],
)
def test_draining_group_is_deleted_before_any_other(others: list[ObservedGroup], replicas: int, leaving: set[str]) -> None:
    step = next_step(make_desired(replicas, paused=True), (*others, LAST))
    assert {action.name for action in (step.actions if step else ())} == leaving


def test_names_of_groups_that_still_go_are_not_taken() -> None:
    desired = make_desired(1)
    going = make_group(desired.names[0], terminating=True)
    step = next_step(desired, (going,))
    assert step is not None
    assert [made.name for made in step.create] == [desired.names[1]]


def test_a_retry_takes_the_same_names() -> None:
    desired = make_desired(3)
    assert next_step(desired, ()) == next_step(desired, ())


def test_failing_revision_stops_the_rollout_at_one_group() -> None:
    desired = make_desired(3)
    history = run_to_end(
        desired, tuple(make_group(n, "old") for n in "abc"), lambda groups: tuple(empty(group) for group in live(groups))
    )
    last = history[-1][1]
    assert sorted((group.revision, group.ready) for group in last) == [("new", False), ("old", True), ("old", True)]


STATES = st.sampled_from(["ready", "slow", "starting", "draining", "drained", "broken", "lost", "terminating"])


def in_state(name: str, revision: str, state: str, created: int) -> ObservedGroup:
    """A group: being emptied and ready, empty, or no longer ready; lost with its node; or in a plain state."""
    return make_group(
        name,
        revision,
        ready=state not in ("starting", "broken", "lost"),
        terminating=state == "terminating",
        created=str(created),
        draining=GOING if state in ("draining", "drained", "broken") else None,
        drained="it has no streams" if state == "drained" else "",
        lost="its node is lost" if state == "lost" else "",
        slow="far slower than its equals" if state == "slow" else "",
    )


group_lists = st.lists(st.tuples(st.sampled_from(["new", "old", "older"]), STATES, st.integers(0, 3)), max_size=7).map(
    lambda rows: tuple(in_state(f"g{i}", *row) for i, row in enumerate(rows))
)


@settings(deadline=None)
@given(group_lists, st.integers(0, 6), st.randoms(use_true_random=False))
def test_every_rollout_ends_at_rest(groups: Groups, replicas: int, chance: object) -> None:
    desired = make_desired(replicas)
    for settle in (start_all, start_one):
        last = run_to_end(desired, groups, settle)[-1][1]
        assert [(group.revision, group.serving) for group in live(last)] == [("new", True)] * replicas


@settings(deadline=None)
@given(group_lists, st.integers(0, 6))
def test_no_step_removes_a_second_ready_group(groups: Groups, replicas: int) -> None:
    """Beyond what was broken before, at most one group is unavailable, and no step has more groups than wanted or than were."""
    desired = make_desired(replicas)
    for _ in range(60):
        before = sum(group.serving for group in staying(groups))
        step = next_step(desired, groups)
        after = carry_out(step, desired, groups, 0) if step else groups
        serving = sum(group.serving for group in staying(after))
        assert serving >= min(before, replicas - desired.max_unavailable)
        assert len(staying(after)) <= replicas <= len(live(after)) <= max(len(live(groups)), replicas)
        groups = start_one(after)


@settings(deadline=None)
@given(group_lists, st.integers(0, 6), st.integers(0, 6))
def test_serving_group_is_drained_before_its_deletion(groups: Groups, replicas: int, then: int) -> None:
    """Also when the wish changes half way: a group that is ready is first emptied, and deleted only once it may go."""
    for turn in range(80):
        desired = make_desired(replicas if turn < 3 else then)
        step = next_step(desired, groups)
        by_uid = {group.uid: group for group in groups}
        for deletion in step.delete if step else ():
            victim = by_uid[deletion.uid]
            assert not victim.ready or victim.drained or victim.lost, victim
        for drain in step.drain if step else ():
            assert by_uid[drain.uid].serving and drain.uid not in {kept.uid for kept in step.keep} if step else True
        groups = start_one(carry_out(step, desired, groups, turn) if step else groups)
    assert [group.serving for group in live(groups)] == [True] * then


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

    shaken = run_to_end(desired, groups, settle)[-1][1]
    last = run_to_end(desired, shaken, start_all)[-1][1]
    assert [(group.revision, group.ready) for group in live(last)] == [("new", True)] * replicas


@settings(deadline=None)
@given(group_lists, st.integers(0, 6), st.integers(1, 3))
def test_stale_informer_creates_no_extra_group(groups: Groups, replicas: int, looks: int) -> None:
    """Deletions count at once, for their UIDs are remembered. Creations are missed, and take the same names again."""
    desired = make_desired(replicas)
    created: set[str] = set()
    doomed: set[str] = set()
    notes: dict[str, DrainMark | None] = {}
    for _ in range(looks):
        stale = tuple(
            replace(g, terminating=g.terminating or g.uid in doomed, draining=notes.get(g.uid, g.draining)) for g in groups
        )
        if step := next_step(desired, stale):
            doomed |= {deletion.uid for deletion in step.delete}
            created |= {creation.name for creation in step.create}
            notes |= {drain.uid: GOING for drain in step.drain} | {kept.uid: None for kept in step.keep}
    kept = [group for group in live(groups) if group.uid not in doomed]
    assert len(kept) + len(created) <= max(replicas, len(kept))


def test_a_world_that_never_settles_is_reported() -> None:
    with pytest.raises(RuntimeError, match="no end"):
        run_to_end(
            make_desired(1),
            (make_group("a"),),
            lambda groups: tuple(with_pods(g, ready=not g.ready) for g in groups),
            max_steps=9,
        )
