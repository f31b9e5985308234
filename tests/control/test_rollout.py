"""Rollouts step by step: tables, golden traces, and properties over random starts and random breakdowns."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_operator.decide.groups import in_order_of_deletion, live
from phalanx_operator.decide.rollout import MAX_UNAVAILABLE, Step, carry_out, next_step, run_to_end
from phalanx_operator.decide.snapshot import ObservedGroup, ObservedPod
from tests.control.builders import make_desired, make_group
from tests.control.conftest import Check

Groups = tuple[ObservedGroup, ...]


def with_pods(group: ObservedGroup, ready: bool) -> ObservedGroup:
    return replace(group, pods=tuple(ObservedPod(f"{group.name}-{i}", i, group.uid, ready=ready) for i in range(group.size)))


def start_all(groups: Groups) -> Groups:
    """A good world: what is being deleted goes, and every pod becomes ready."""
    return tuple(with_pods(group, ready=True) for group in live(groups))


def start_one(groups: Groups) -> Groups:
    """A slow world: what is being deleted goes, and the first group that is not ready becomes so."""
    here = live(groups)
    late = next((group.name for group in here if not group.ready), None)
    return tuple(with_pods(group, ready=True) if group.name == late else group for group in here)


def shown(step: Step | None, groups: Groups) -> str:
    names = sorted({group.name for group in groups})
    words = [f"- {deletion.name}: {deletion.why}" for deletion in step.delete] if step else ["- wait"]
    words += [f"+ {creation.name}: {creation.why}" for creation in step.create] if step else []
    state = {g.name: "terminating" if g.terminating else "ready" if g.ready else "starting" for g in groups}
    return "\n".join([*words, "    " + ", ".join(f"{n} {state[n]}" for n in names)])


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
    "three-revisions": (make_desired(3), (make_group("a", "old"), make_group("b", "middle"), make_group("c", "new"))),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_rollouts(name: str, golden: Check) -> None:
    desired, groups = SCENARIOS[name]
    history = run_to_end(desired, groups, start_one)
    lines = [f"{desired.replicas} groups of revision {desired.revision} wanted", *(shown(*moment) for moment in history)]
    golden(f"rollouts/{name}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ([make_group("a", created="1"), make_group("b", created="2")], "b"),
        ([make_group("a", "old", created="1"), make_group("b", created="2")], "a"),
        ([make_group("a", "old"), make_group("b", ready=False)], "b"),
        ([make_group("a", "old", ready=False), make_group("b", ready=False, created="2")], "a"),
        ([make_group("a", created="1"), make_group("b", created="1")], "b"),
    ],
    ids=["youngest", "old revision before youngest", "not ready before old revision", "both", "same age"],
)
def test_order_of_deletion(groups: list[ObservedGroup], first: str) -> None:
    assert in_order_of_deletion(groups, "new")[0].name == first


def test_names_of_groups_that_still_go_are_not_taken() -> None:
    desired = make_desired(1)
    going = make_group(desired.names[0], terminating=True)
    step = next_step(desired, (going,))
    assert step is not None
    assert [made.name for made in step.create] == [desired.names[1]]


def test_a_retry_takes_the_same_names() -> None:
    desired = make_desired(3)
    assert next_step(desired, ()) == next_step(desired, ())


def test_a_new_revision_that_never_starts_stops_the_rollout_at_one_group() -> None:
    desired = make_desired(3)
    history = run_to_end(desired, tuple(make_group(n, "old") for n in "abc"), lambda groups: tuple(live(groups)))
    last = history[-1][1]
    assert sorted((group.revision, group.ready) for group in last) == [("new", False), ("old", True), ("old", True)]


group_lists = st.lists(
    st.tuples(st.sampled_from(["new", "old", "older"]), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=7
).map(
    lambda rows: tuple(
        make_group(f"g{i}", revision, ready=ready, terminating=terminating, created=str(created))
        for i, (revision, ready, terminating, created) in enumerate(rows)
    )
)


@given(group_lists, st.integers(0, 6), st.randoms(use_true_random=False))
def test_every_rollout_ends_at_rest(groups: Groups, replicas: int, chance: object) -> None:
    desired = make_desired(replicas)
    for settle in (start_all, start_one):
        last = run_to_end(desired, groups, settle)[-1][1]
        assert [(group.revision, group.ready) for group in live(last)] == [("new", True)] * replicas


@given(group_lists, st.integers(0, 6))
def test_a_step_never_takes_a_second_ready_group_from_a_service(groups: Groups, replicas: int) -> None:
    """Beyond what was broken before, at most one group is unavailable, and no step has more groups than wanted or than were."""
    desired = make_desired(replicas)
    for _ in range(40):
        before = sum(group.ready for group in live(groups))
        step = next_step(desired, groups)
        if step is None:
            break
        after = carry_out(step, desired, groups, 0)
        ready = sum(group.ready for group in live(after))
        assert ready >= min(before, replicas - MAX_UNAVAILABLE if len(live(groups)) <= replicas else replicas)
        assert len(live(after)) == max(replicas, 0)
        groups = start_one(after)


@given(group_lists, st.integers(0, 6), st.lists(st.integers(0, 6), max_size=12))
def test_groups_that_break_during_a_rollout_do_not_stop_it(groups: Groups, replicas: int, breaks: list[int]) -> None:
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


@given(group_lists, st.integers(0, 6), st.integers(1, 3))
def test_looks_before_the_informer_has_told_make_no_group_too_many(groups: Groups, replicas: int, looks: int) -> None:
    """Deletions count at once, for their UIDs are remembered. Creations are missed, and take the same names again."""
    desired = make_desired(replicas)
    created: set[str] = set()
    doomed: set[str] = set()
    for _ in range(looks):
        stale = tuple(replace(group, terminating=group.terminating or group.uid in doomed) for group in groups)
        if step := next_step(desired, stale):
            doomed |= {deletion.uid for deletion in step.delete}
            created |= {creation.name for creation in step.create}
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
