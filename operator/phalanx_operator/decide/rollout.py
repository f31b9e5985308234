"""The next step from the groups that are there to the groups that should be there.

    at rest: `replicas` groups, all of the newest revision

    too many groups           -> delete the surplus in order of deletion
    too few                   -> create the rest, of the newest revision
    old groups, not ready     -> delete them at once: they serve nobody, so they cost no availability
    old groups, ready         -> delete one, if that leaves no more than one group unready (delete first, no surge)

Deleting and creating its successor are one step: the new pods wait in the scheduler for what the old ones give back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx_operator.decide.actions import CreateGroup, DeleteGroup
from phalanx_operator.decide.groups import Desired, free_names, in_order_of_deletion, live
from phalanx_operator.decide.snapshot import ObservedGroup

MAX_UNAVAILABLE = 1


@dataclass(frozen=True, slots=True)
class Step:
    """Groups to delete and to create, in this order."""

    delete: tuple[DeleteGroup, ...]
    create: tuple[CreateGroup, ...]


def next_step(desired: Desired, groups: tuple[ObservedGroup, ...]) -> Step | None:
    """What to do now, or None when there is nothing to do but wait, or nothing at all."""
    here = live(groups)
    surplus = len(here) - desired.replicas
    if surplus > 0:
        victims = in_order_of_deletion(here, desired.revision)[:surplus]
        deletions = tuple(_delete(g, f"{len(here)} groups, {desired.replicas} wanted") for g in victims)
    else:
        deletions = tuple(_outdated(desired, here))
    missing = desired.replicas - (len(here) - len(deletions))
    creations = tuple(
        CreateGroup(name, f"{len(here) - len(deletions)} groups of {desired.replicas}, revision {desired.revision}")
        for name in free_names(desired, groups, max(missing, 0))
    )
    return Step(deletions, creations) if deletions or creations else None


def _outdated(desired: Desired, here: list[ObservedGroup]) -> list[DeleteGroup]:
    """The groups of an old revision that may go now."""
    old = [group for group in in_order_of_deletion(here, desired.revision) if group.revision != desired.revision]
    broken = [_delete(g, f"revision {g.revision} is old, and the group is not ready") for g in old if not g.ready]
    budget = MAX_UNAVAILABLE - (desired.replicas - sum(group.ready for group in here))
    ready = [group for group in old if group.ready][: max(budget, 0)]
    return broken + [_delete(g, f"revision {g.revision} is old, {desired.revision} is wanted") for g in ready]


def _delete(group: ObservedGroup, why: str) -> DeleteGroup:
    return DeleteGroup(group.name, group.uid, why)


def run_to_end(
    desired: Desired,
    groups: tuple[ObservedGroup, ...],
    settle: Callable[[tuple[ObservedGroup, ...]], tuple[ObservedGroup, ...]],
    max_steps: int = 10_000,
) -> list[tuple[Step | None, tuple[ObservedGroup, ...]]]:
    """Every step of a rollout with the groups after it, for tests. `settle` is what the world does between two steps.

    Ends when there is no step and `settle` changes nothing. Raises: RuntimeError when that is not so after `max_steps`.
    """
    history: list[tuple[Step | None, tuple[ObservedGroup, ...]]] = []
    for moment in range(max_steps):
        step = next_step(desired, groups)
        after = carry_out(step, desired, groups, moment) if step else groups
        history.append((step, after))
        groups = settle(after)
        if step is None and groups == after:
            return history
    raise RuntimeError(f"no end after {max_steps} steps: {groups}")


def carry_out(step: Step, desired: Desired, groups: tuple[ObservedGroup, ...], moment: int) -> tuple[ObservedGroup, ...]:
    """The groups right after a step: victims are being deleted, new groups are not ready."""
    doomed = {deletion.uid for deletion in step.delete}
    size = groups[0].size if groups else 1
    left = tuple(replace(group, terminating=True) if group.uid in doomed else group for group in groups)
    new = (ObservedGroup(made.name, f"uid-{moment}-{made.name}", desired.revision, f"{moment:06}", size) for made in step.create)
    return (*left, *new)
