"""Computes the next step of a rollout from the existing groups to the desired ones.

    final state               `replicas` groups, all of the newest revision, none draining

    lost with a node          -> delete it: its successor starts elsewhere
    too many remain           -> drain the surplus in order of deletion; groups that are not ready are deleted at once
    too few remain            -> keep draining groups after all, if they have the newest revision
    drained, or broken now    -> delete it
    too few                   -> create the rest with the newest revision
    old groups, not ready     -> delete them at once, which costs no availability; not while `stuck`: they may recover, and a
                                 successor may never start
    old groups, ready         -> drain as many as leave at most `max_unavailable` missing (delete first), or with a surge as many
                                 as are ready above `replicas`
    stragglers                -> likewise, after the old ones

A draining group still has its devices, so its successor is created in the step that deletes it: the new pods wait in the
scheduler for the devices. A draining group never counts as available, which bounds how many drain at once.

With a surge there are up to `max_surge` more groups while old ones are being replaced, draining ones included. `plan` detects a
surge that does not fit into the cluster and asks for a rollout without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DrainGroup, KeepGroup
from phalanx_operator.decide.state.groups import Desired, free_names, in_order_of_deletion, live, outdated, staying
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, Purpose

Leaving = tuple[ObservedGroup, str, Purpose]
"""A group to remove now, why, and the purpose of its drain."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Groups to keep after all, to drain, to delete and to create, in this order."""

    keep: tuple[KeepGroup, ...]
    drain: tuple[DrainGroup, ...]
    delete: tuple[DeleteGroup, ...]
    create: tuple[CreateGroup, ...]

    @property
    def actions(self) -> tuple[KeepGroup | DrainGroup | DeleteGroup | CreateGroup, ...]:
        """All actions in order."""
        return (*self.keep, *self.drain, *self.delete, *self.create)


def next_step(desired: Desired, groups: tuple[ObservedGroup, ...]) -> RolloutStep | None:
    """Returns the next step; None when there is only waiting to do, or nothing."""
    here = live(groups)
    old = [] if desired.paused else outdated(groups, desired)
    broken = [] if desired.stuck else [group for group in old if not group.ready]
    stays = [group for group in staying(groups) if group not in broken]
    above = _above(desired, stays, len(old) - len(broken) + _num_slow(desired, stays))
    wanted = desired.replicas + above
    surplus = len(stays) - wanted
    keep = tuple(_kept(desired, here, -surplus))
    kept = {action.uid for action in keep}
    if surplus > 0:
        why = f"{len(stays)} groups, {wanted} wanted"
        victims = in_order_of_deletion(stays, desired.revision)[:surplus]
        leaving: list[Leaving] = [(group, why, "surplus") for group in victims]
        successor = ""
    else:
        leaving = _replaced(desired, stays, len(kept), 0 if above else desired.max_unavailable)
        successor = next(iter(free_names(desired, groups, 1)), "")
    drain = tuple(
        DrainGroup(name=g.name, uid=g.uid, why=why, successor=successor, purpose=purpose)
        for g, why, purpose in leaving
        if g.ready
    )
    delete = tuple(DeleteGroup(g.name, g.uid, f"revision {g.revision} is old, and the group is not ready") for g in broken)
    delete += tuple(DeleteGroup(g.name, g.uid, why) for g, why, _ in leaving if not g.ready)
    delete += tuple(DeleteGroup(g.name, g.uid, why) for g in here if g.uid not in kept and (why := _why_gone(g)))
    left = len(here) - len(delete)
    create = tuple(
        CreateGroup(name, f"{left} groups of {wanted}, revision {desired.revision}")
        for name in free_names(desired, groups, max(wanted - left, 0))
    )
    step = RolloutStep(keep, drain, delete, create)
    return step if step.actions else None


def _above(desired: Desired, stays: list[ObservedGroup], old: int) -> int:
    """Returns how many groups above `replicas` are wanted now, while `old` serving groups are being replaced.

    A held or paused rollout creates no more of them and keeps those of the newest revision.
    """
    if desired.held or desired.paused:
        new = sum(group.revision == desired.revision for group in stays)
        has_old = new < len(stays) and desired.replicas > 0
        return min(desired.max_surge, new, max(len(stays) - desired.replicas, 0)) if has_old else 0
    return min(desired.max_surge, old) if desired.replicas else 0


def _num_slow(desired: Desired, stays: list[ObservedGroup]) -> int:
    """Returns the number of stragglers of the newest revision; they leave only when a successor serves."""
    if desired.max_unavailable:
        return 0
    return sum(bool(group.slow) and group.ready and group.revision == desired.revision for group in stays)


def _kept(desired: Desired, here: list[ObservedGroup], missing: int) -> list[KeepGroup]:
    """Returns the draining groups that are wanted again."""
    leaving = [group for group in here if group.draining and not group.draining.is_final and not group.lost]
    going = [group for group in leaving if group.ready and group.revision == desired.revision]
    oldest_first = sorted(going, key=lambda group: (group.created, group.name))
    why = f"{desired.replicas} groups are wanted again"
    return [KeepGroup(group.name, group.uid, why) for group in oldest_first[: max(missing, 0)]]


def _why_gone(group: ObservedGroup) -> str:
    """Returns why a group that was given up is deleted now; empty while it drains or stays."""
    if group.lost:
        return group.lost
    if group.draining is None:
        return ""
    if not group.ready:
        return f"{group.draining.why}; it is no longer ready"
    return f"{group.draining.why}; {group.drained}" if group.drained else ""


def _replaced(desired: Desired, stays: list[ObservedGroup], kept: int, may_miss: int) -> list[Leaving]:
    """Returns the serving groups of an old revision and the stragglers that may leave now, with the reason."""
    if desired.held:
        return []
    old = [] if desired.paused else [group for group in outdated(stays, desired) if group.ready]
    leaving: list[Leaving] = [(g, f"revision {g.revision} is old, {desired.revision} is wanted", "revision") for g in old]
    leaving += [(g, g.slow, "straggler") for g in stays if g.slow and g.ready and g not in old]
    budget = may_miss - (desired.replicas - kept - sum(group.available for group in stays))
    return leaving[: max(budget, 0)]


def run_to_end(
    desired: Desired,
    groups: tuple[ObservedGroup, ...],
    settle: Callable[[tuple[ObservedGroup, ...]], tuple[ObservedGroup, ...]],
    max_steps: int = 10_000,
) -> list[tuple[RolloutStep | None, tuple[ObservedGroup, ...]]]:
    """Returns every step of a rollout with the groups after it, for tests. `settle` simulates the cluster between two steps.

    Ends when no step is left and `settle` changes nothing. Raises RuntimeError if that takes more than `max_steps`.
    """
    history: list[tuple[RolloutStep | None, tuple[ObservedGroup, ...]]] = []
    for moment in range(max_steps):
        step = next_step(desired, groups)
        after = carry_out(step, desired, groups, moment) if step else groups
        history.append((step, after))
        groups = settle(after)
        if step is None and groups == after:
            return history
    raise RuntimeError(f"no end after {max_steps} steps: {groups}")


def carry_out(step: RolloutStep, desired: Desired, groups: tuple[ObservedGroup, ...], moment: int) -> tuple[ObservedGroup, ...]:
    """Returns the groups right after a step: given-up groups drain or are deleted, new groups are not ready."""
    size = groups[0].size if groups else 1
    kept = {action.uid for action in step.keep}
    drained = {action.uid: DrainMark(f"{moment:06}", action.why, action.purpose) for action in step.drain}
    doomed = {action.uid for action in step.delete}
    left = tuple(
        replace(
            group,
            draining=None if group.uid in kept else drained.get(group.uid, group.draining),
            drained="" if group.uid in kept else group.drained,
            terminating=group.terminating or group.uid in doomed,
        )
        for group in groups
    )
    new = (
        ObservedGroup(
            name=made.name, uid=f"uid-{moment}-{made.name}", revision=desired.revision, created=f"{moment:06}", size=size
        )
        for made in step.create
    )
    return (*left, *new)
