"""Admits group creation one by one without a gang scheduler: two incomplete groups would block each other.

`loop.placement_queue` keeps the order. A group without nodes or pods after `timeoutSeconds` is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.groups.progress import unplaced_s
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTurn:
    """Whether a service may create a group now."""

    why: str = ""
    """Empty if it may."""
    retry_s: float = 0.0
    is_reported: bool = False
    """A condition shows `why`."""
    is_stuck: bool = False
    """No group of the service is being placed or deleted."""
    is_queued: bool = False
    """Another service's turn comes first."""


FREE = PlacementTurn()


def unplaced_groups(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns `Fallback` groups with missing or unplaced pods."""
    return [
        group
        for group in live_groups(groups)
        if group.gang == "Fallback" and (len(group.pods) < group.size or any(not pod.node for pod in group.pods))
    ]


def placement_failures(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> dict[str, str]:
    """Returns why groups exceeded the timeout, by UID."""
    failures = {}
    for group in unplaced_groups(groups):
        age = unplaced_s(group, now)
        if age is not None and age >= timeout_s:
            placed, missing = sum(bool(pod.node) for pod in group.pods), group.size - len(group.pods)
            rejected = f", {missing} could not be created: kubectl describe statefulset {group.name}" if missing > 0 else ""
            message = next((f": {pod.message}" for pod in group.pods if not pod.node and pod.message), "")
            failures[group.uid] = f"{placed} of its {group.size} pods got nodes within {timeout_s:.0f} s{rejected}{message}"
    return failures


def due_in_s(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> float | None:
    """Returns the seconds until the next group exceeds the timeout."""
    ages = [age for group in unplaced_groups(groups) if (age := unplaced_s(group, now)) is not None]
    return max(timeout_s - max(ages), 0.0) if ages else None
