"""One group after another: what keeps two half groups from holding devices that neither can use, where no scheduler does.

`loop.placement_queue` keeps the order. A group that had its turn and does not find nodes for all of its pods within
`timeoutSeconds`, or lacks a pod for so long because a quota refuses it, is given up: it gives its devices and the turn back.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.groups.progress import waiting_s
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True)
class PlacementTurn:
    """Whether a service may make a group now: `why` not, empty if it may, and when to look again. `told`: it waits for long.

    is_stuck: it waits for no group that goes or is placed, so what there is of groups is all that there will be for now.
    in_line: it waits for another service, and is called when that one is done.
    """

    why: str = ""
    left_s: float = 0.0
    told: bool = False
    is_stuck: bool = False
    in_line: bool = False


FREE = PlacementTurn()


def unplaced(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """The groups of several pods of which not all have nodes, where no scheduler places them together."""
    return [
        group
        for group in live(groups)
        if group.gang == "Fallback" and (len(group.pods) < group.size or any(not pod.node for pod in group.pods))
    ]


def given_up(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> dict[str, str]:
    """Groups that waited for too long, by UID, and why they give their devices back."""
    found = {}
    for group in unplaced(groups):
        age = waiting_s(group, now)
        if age is not None and age >= timeout_s:
            placed, missing = sum(bool(pod.node) for pod in group.pods), group.size - len(group.pods)
            refused = f", {missing} could not be made: kubectl describe statefulset {group.name}" if missing > 0 else ""
            words = next((f": {pod.message}" for pod in group.pods if not pod.node and pod.message), "")
            found[group.uid] = f"{placed} of its {group.size} pods found room within {timeout_s:.0f} s{refused}{words}"
    return found


def left_s(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> float | None:
    """Seconds until the next of them waited for too long; None when none waits."""
    ages = [age for group in unplaced(groups) if (age := waiting_s(group, now)) is not None]
    return max(timeout_s - max(ages), 0.0) if ages else None
