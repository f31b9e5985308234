"""Rollouts step by step against a simulated cluster: starting states, the cluster's reactions, and the invariants of a step."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import strategies as st

from phalanx_operator.decide.groups.rollout import RolloutStep, next_step
from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DrainGroup, KeepGroup
from phalanx_operator.decide.state.groups import DesiredGroups, live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod, with_assessment
from tests.control.builders import make_group

Groups = tuple[ObservedGroup, ...]
DRAINING = DrainMark("2026-01-02T03:04:05Z", "3 groups, 2 wanted")
STRATEGIES = ((1, 0), (0, 1), (1, 1), (2, 0), (1, 2))
"""Pairs of `maxUnavailable` and `maxSurge`."""
MAX_STEPS = 60
"""Bound of a rollout of three groups."""
STATES = ("ready", "slow", "starting", "draining", "drained", "broken", "silent", "lost", "terminating")
_KINDS = tuple(itertools.product(("new", "old"), [state for state in STATES if state not in ("slow", "broken", "silent")]))


def make_in_state(name: str, revision: str, state: str, created: int = 1, size: int = 2) -> ObservedGroup:
    return make_group(
        name,
        revision,
        size=size,
        ready=state not in ("starting", "broken", "silent", "lost"),
        terminating=state == "terminating",
        created=str(created),
        draining=DRAINING if state in ("draining", "drained", "broken") else None,
        drained_reason="it has no streams" if state == "drained" else "",
        lost_reason="its node is lost" if state == "lost" else "",
        straggler_reason="a straggler" if state == "slow" else "",
        alive_reason="its node is silent" if state == "silent" else "",
        unreachable_reason="its node is lost" if state == "silent" else "",
    )


group_lists = st.lists(
    st.tuples(st.sampled_from(["new", "old", "older"]), st.sampled_from(STATES), st.integers(0, 3)), max_size=7
).map(lambda rows: tuple(make_in_state(f"g{i}", *row) for i, row in enumerate(rows)))


def small_starts() -> Iterator[Groups]:
    """Yields every combination of up to three groups of two revisions in any state."""
    for count in range(4):
        for kinds in itertools.combinations_with_replacement(_KINDS, count):
            yield tuple(make_in_state(f"g{i}", *kind, size=1) for i, kind in enumerate(kinds))


def run_rollout(
    desired: DesiredGroups, groups: Groups, settle: Callable[[Groups], Groups], max_steps: int = 1000
) -> list[tuple[RolloutStep, Groups]]:
    """Returns every step with the groups after it. `settle` simulates the cluster between two steps.

    Ends when no step has actions and `settle` changes nothing. Raises RuntimeError after `max_steps`.
    """
    history: list[tuple[RolloutStep, Groups]] = []
    for moment in range(max_steps):
        step = next_step(desired, groups)
        after = apply_step(step, desired, groups, moment)
        history.append((step, after))
        groups = settle(after)
        if not step.actions and groups == after:
            return history
    raise RuntimeError(f"no end after {max_steps} steps: {groups}")


def apply_step(step: RolloutStep, desired: DesiredGroups, groups: Groups, moment: int) -> Groups:
    """Returns the groups right after a step: drained, deleted, or new and not ready."""
    size = groups[0].size if groups else 1
    kept = {action.uid for action in step.keep}
    drained = {action.uid: DrainMark(f"{moment:06}", action.why, action.purpose) for action in step.drain}
    deleted = {action.uid for action in step.delete}
    left = tuple(
        with_assessment(
            replace(
                group,
                draining=None if group.uid in kept else drained.get(group.uid, group.draining),
                terminating=group.terminating or group.uid in deleted,
            ),
            drained_reason="" if group.uid in kept else group.assessment.drained_reason,
        )
        for group in groups
    )
    new = (
        ObservedGroup(
            name=action.name,
            uid=f"uid-{moment}-{action.name}",
            revision=desired.revision,
            created=f"{moment:06}",
            size=size,
        )
        for action in step.create
    )
    return (*left, *new)


def with_pods(group: ObservedGroup, ready: bool) -> ObservedGroup:
    """No kubelet changes the pods of a silent node."""
    if group.assessment.alive_reason:
        return group
    pods = tuple(ObservedPod(name=f"{group.name}-{i}", index=i, owner_uid=group.uid, ready=ready) for i in range(group.size))
    return with_assessment(replace(group, pods=pods), lost_reason="")


def drain(group: ObservedGroup) -> ObservedGroup:
    return with_assessment(group, drained_reason="it has no streams") if group.draining else group


def start_all(groups: Groups) -> Groups:
    """Deletes terminating groups, drains draining ones, and makes every pod ready."""
    return tuple(with_pods(drain(group), ready=True) for group in live_groups(groups))


def start_one(groups: Groups) -> Groups:
    """Deletes terminating groups, drains the first draining one, and makes the first unready one ready."""
    live = live_groups(groups)
    draining = next((group.name for group in live if group.draining and not group.assessment.drained_reason), None)
    left = [drain(group) if group.name == draining else group for group in live]
    starting = next((group.name for group in left if not group.alive), None)
    return tuple(with_pods(group, ready=True) if group.name == starting else group for group in left)


def phase(group: ObservedGroup) -> str:
    if group.terminating:
        return "terminating"
    if group.draining:
        return "draining"
    return "ready" if group.ready else "silent" if group.alive else "starting"


def describe(step: RolloutStep, groups: Groups) -> str:
    """Returns the actions of a step and the phases after it, for golden files."""
    names = sorted({group.name for group in groups})
    signs = {KeepGroup: "=", DrainGroup: "~", DeleteGroup: "-", CreateGroup: "+"}
    words = [f"{signs[type(action)]} {action.name}: {action.why}" for action in step.actions] or ["- wait"]
    state = {g.name: phase(g) for g in groups}
    return "\n".join([*words, "    " + ", ".join(f"{n} {state[n]}" for n in names)])


def num_serving(groups: Groups) -> int:
    return sum(group.alive for group in staying_groups(groups))


def check_step(desired: DesiredGroups, groups: Groups, moment: int) -> tuple[RolloutStep, Groups]:
    """Returns the next step and the groups after it. Asserts the invariants of every step."""
    step = next_step(desired, groups)
    if not step.actions:
        return step, groups
    names = {group.name for group in groups}
    created = [action.name for action in step.actions if isinstance(action, CreateGroup)]
    assert not names & set(created) and len(set(created)) == len(created), "a name is reused"
    after = apply_step(step, desired, groups, moment)
    limit = desired.replicas + desired.max_surge
    assert len(live_groups(after)) <= max(limit, len(live_groups(groups)) - len(step.delete)), "above the surge"
    serving = num_serving(after) - len(step.keep)  # routers choose a kept group once they have read that its drain ended
    assert serving >= min(num_serving(groups), desired.replicas - desired.max_unavailable), "below availability"
    if desired.max_surge and any(action.purpose == "revision" for action in step.drain):
        assert serving >= desired.replicas, "a group drains before its successor serves"
    by_uid = {group.uid: group for group in groups}
    deleted = [by_uid[action.uid] for action in step.delete]
    assert not any(group.alive and group.draining is None for group in deleted), "a serving group is deleted without drain"
    if any(by_uid[action.uid].revision != desired.revision for action in step.drain):
        left = [g for g in staying_groups(after) if g.revision != desired.revision and not g.alive]
        assert len(left) <= desired.partition, "a serving group drains before an unready one"
    return step, after
