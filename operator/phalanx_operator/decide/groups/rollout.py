"""Computes which groups to create, drain and delete: the next step towards `replicas` groups of the newest revision.

    lost                      delete
    too many stay             drain the surplus in order of deletion, within `max_unavailable`; unready groups are deleted at once
    too few stay              keep draining groups of the newest revision
    drained, or not spared    delete; spared: ready, or on a silent node while routers report that it serves, or in a partition
    too few exist             create
    old revision, unready     delete, which costs no availability; not with a `stuck_reason`
    old revision, ready       drain as many as `max_unavailable` allows, or as are ready above `replicas` (surge)
    unreachable               drain once a successor serves, which takes a surge; after groups of an old revision
    stragglers                drain as groups of an old revision, after the unreachable ones
    a partition               delete only groups that users ask to drain, and those above the user's count and its surge

A draining group keeps its devices and never counts as available, which bounds how many drain at once. The step that deletes it
creates its successor. A surge adds up to `max_surge` groups, draining ones included, while old ones are replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DrainGroup, KeepGroup
from phalanx_operator.decide.state.groups import (
    DesiredGroups,
    deletion_order,
    free_names,
    live_groups,
    outdated_groups,
    staying_groups,
)
from phalanx_operator.decide.state.snapshot import ObservedGroup, Purpose

Removal = tuple[ObservedGroup, str, Purpose]
"""A group to remove, why, and the purpose."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Actions of one step, in order."""

    keep: tuple[KeepGroup, ...]
    drain: tuple[DrainGroup, ...]
    delete: tuple[DeleteGroup, ...]
    create: tuple[CreateGroup, ...]

    @property
    def actions(self) -> tuple[KeepGroup | DrainGroup | DeleteGroup | CreateGroup, ...]:
        """All actions in order."""
        return (*self.keep, *self.drain, *self.delete, *self.create)


def next_step(desired: DesiredGroups, groups: tuple[ObservedGroup, ...]) -> RolloutStep:
    """Returns the next step; empty if nothing is to do."""
    live = live_groups(groups)
    old = [] if desired.paused else outdated_groups(groups, desired)
    broken = [] if desired.stuck_reason else [group for group in old if not group.is_spared]
    staying = [group for group in staying_groups(groups) if group not in broken]
    surge = _surge(desired, staying, len(old) - len(broken) + _num_surged(desired, staying))
    target = desired.replicas + surge
    surplus = len(staying) - max(target, desired.num_kept)
    keep = tuple(_groups_to_keep(desired, live, len(staying), target))
    kept = {action.uid for action in keep}
    if surplus > 0:
        why = f"{len(staying)} groups, {len(staying) - surplus} wanted"
        removals: list[Removal] = [(group, why, "surplus") for group in _surplus_groups(desired, staying, surplus)]
        successor = ""
    else:
        removals = _replacements(desired, staying, surge)
        successor = next(iter(free_names(desired, groups, 1)), "")
    drain = tuple(
        DrainGroup(name=g.name, uid=g.uid, why=why, successor=successor, purpose=purpose)
        for g, why, purpose in removals
        if g.is_spared
    )
    delete = tuple(DeleteGroup(g.name, g.uid, f"revision {g.revision} is old, and the group is not ready") for g in broken)
    delete += tuple(DeleteGroup(g.name, g.uid, why) for g, why, _ in removals if not g.is_spared)
    delete += tuple(DeleteGroup(g.name, g.uid, why) for g in live if g.uid not in kept and (why := _deletion_reason(g)))
    delete = _commanded(delete, live, desired) if desired.kept_reason else delete
    left = len(live) - len(delete)
    create = tuple(
        CreateGroup(name, f"{left} groups of {target}, revision {desired.revision}")
        for name in free_names(desired, groups, max(target - left, 0))
    )
    return RolloutStep(keep, drain, delete, create)


def _surplus_groups(desired: DesiredGroups, staying: list[ObservedGroup], surplus: int) -> list[ObservedGroup]:
    """Returns the surplus groups that may leave now: `replicas - max_unavailable` available groups stay."""
    victims = deletion_order(staying, desired.revision)[:surplus]
    budget = disruption_budget(staying, desired.replicas - desired.max_unavailable)
    needed = [group for group in victims if group.available][budget:]
    return [group for group in victims if group not in needed]


def _commanded(delete: Sequence[DeleteGroup], live: list[ObservedGroup], desired: DesiredGroups) -> tuple[DeleteGroup, ...]:
    """Returns the deletions of groups that users asked to drain, and as many others as leave `num_kept` groups."""
    asked = {group.uid for group in live if group.draining and group.draining.purpose == "asked"}
    others = [action for action in delete if action.uid not in asked]
    num_left = len(live) - (len(delete) - len(others))
    allowed = asked | {action.uid for action in others[: max(num_left - desired.num_kept, 0)]}
    return tuple(action for action in delete if action.uid in allowed)


def _surge(desired: DesiredGroups, staying: list[ObservedGroup], num_replaced: int) -> int:
    """Returns the groups above `replicas`. A held rollout creates no more; a paused one only for groups of its revision."""
    if not desired.replicas:
        return 0
    wanted = min(desired.max_surge, num_replaced)
    if not (desired.hold_reason or desired.paused):
        return wanted
    new = sum(group.revision == desired.revision for group in staying)
    is_replacing = num_replaced > 0 or new < len(staying)
    present = min(desired.max_surge, new, max(len(staying) - desired.replicas, 0)) if is_replacing else 0
    return present if desired.hold_reason else max(present, wanted)


def _num_surged(desired: DesiredGroups, staying: list[ObservedGroup]) -> int:
    """Returns the groups of the newest revision that leave only once a successor serves."""
    return sum(
        (bool(group.assessment.unreachable_reason) and not desired.no_surge_reason)
        or (bool(group.assessment.straggler_reason) and group.ready and not desired.max_unavailable)
        for group in staying
        if group.revision == desired.revision
    )


def _groups_to_keep(desired: DesiredGroups, live: list[ObservedGroup], num_staying: int, target: int) -> list[KeepGroup]:
    """Returns draining groups that are wanted again; in a partition, old ones too, as no successor follows them.

    An unreachable one is kept only up to `replicas`: it cannot be the surge that replaces another.
    """
    draining = [group for group in live if group.draining and not group.draining.is_final and not group.assessment.lost_reason]
    usable = [group for group in draining if group.alive and (group.revision == desired.revision or desired.kept_reason)]
    usable.sort(key=lambda group: (bool(group.assessment.unreachable_reason), group.created, group.name))
    limits = [desired.replicas if group.assessment.unreachable_reason else target for group in usable]
    why = f"{desired.replicas} groups are wanted again"
    return [
        KeepGroup(group.name, group.uid, why)
        for number, (group, limit) in enumerate(zip(usable, limits, strict=True), num_staying + 1)
        if number <= limit
    ]


def _deletion_reason(group: ObservedGroup) -> str:
    if group.assessment.lost_reason:
        return group.assessment.lost_reason
    if group.draining is None:
        return ""
    if not group.is_spared:
        return f"{group.draining.why}; it is no longer ready"
    return f"{group.draining.why}; {group.assessment.drained_reason}" if group.assessment.drained_reason else ""


def _replacements(desired: DesiredGroups, staying: list[ObservedGroup], surge: int) -> list[Removal]:
    """Returns the groups to replace now. At least `replicas - max_unavailable` stay available; with a surge, `replicas`.

    A group whose drain this step ends is not available yet: routers choose it once they have read that.
    """
    if desired.hold_reason:
        return []
    old = [] if desired.paused else [group for group in outdated_groups(staying, desired) if group.alive]
    current = [group for group in staying if group not in old]
    newest = [group for group in staying if group.revision == desired.revision]
    unreachable = [group for group in newest if surge and group.assessment.unreachable_reason]
    slow = [group for group in current if group.assessment.straggler_reason and group.ready]
    removals: list[Removal] = [(g, f"revision {g.revision} is old, {desired.revision} is wanted", "revision") for g in old]
    removals += [(g, f"{g.assessment.unreachable_reason}, and its successor serves", "unreachable") for g in unreachable]
    removals += [(g, g.assessment.straggler_reason, "straggler") for g in slow]
    max_unavailable = 0 if surge else desired.max_unavailable
    return removals[: disruption_budget(staying, desired.replicas - max_unavailable)]


def disruption_budget(staying: Sequence[ObservedGroup], min_available: int) -> int:
    """Returns how many groups may leave, for all causes together, while `min_available` stay available."""
    return max(sum(group.available for group in staying) - min_available, 0)
