"""Admits group creation one by one where no gang scheduler places pods together, so two incomplete groups cannot block each
other.

`loop.placement_queue` keeps the order. A group that lacks nodes for some pods, or pods because of a quota, after `timeoutSeconds`
is given up and deleted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.groups.progress import waiting_s
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTurn:
    """Whether a service may create a group now."""

    why: str = ""
    """Why not; empty if it may."""
    left_s: float = 0.0
    """Seconds until the next check."""
    told: bool = False
    """The wait is long enough for a condition."""
    is_stuck: bool = False
    """No group of this service is being placed or deleted, so its groups stay as they are for now."""
    in_line: bool = False
    """It waits for another service, and is woken when that one is done."""


FREE = PlacementTurn()


def unplaced(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns the groups of several pods, placed without a gang scheduler, of which a pod has no node."""
    return [
        group
        for group in live(groups)
        if group.gang == "Fallback" and (len(group.pods) < group.size or any(not pod.node for pod in group.pods))
    ]


def given_up(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> dict[str, str]:
    """Returns the groups that waited too long, by UID, with the reason."""
    found = {}
    for group in unplaced(groups):
        age = waiting_s(group, now)
        if age is not None and age >= timeout_s:
            placed, missing = sum(bool(pod.node) for pod in group.pods), group.size - len(group.pods)
            refused = f", {missing} could not be created: kubectl describe statefulset {group.name}" if missing > 0 else ""
            words = next((f": {pod.message}" for pod in group.pods if not pod.node and pod.message), "")
            found[group.uid] = f"{placed} of its {group.size} pods got nodes within {timeout_s:.0f} s{refused}{words}"
    return found


def left_s(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> float | None:
    """Returns the seconds until the next group has waited too long; None if no group waits."""
    ages = [age for group in unplaced(groups) if (age := waiting_s(group, now)) is not None]
    return max(timeout_s - max(ages), 0.0) if ages else None
