"""What the operator may do to a service. Every action says why; the log, the event and the failing test print the same words."""

from dataclasses import dataclass

from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Purpose, Restarts


@dataclass(frozen=True, slots=True)
class InitReplicas:
    """Write `spec.replicas` once, because the manifest left it out."""

    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepChildren:
    """Make what all groups share: the token, the Services, the router and its rights. Does nothing where they already are so.

    `groups`: how many are wanted, for with one there is no disruption budget. is_blind: nobody knows what groups that run were
    made of, so routers, which serve under the names of that, stay as they are.
    """

    groups: int
    why: str
    is_blind: bool = False


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Make a group, away from these nodes if it can be. An existing group of that name is left as it is."""

    name: str
    why: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainGroup:
    """Note on a group, if it is still the one with this UID, that it is being emptied before it goes.

    `successor`: a name that a group in its place could take; empty when it is to have none.
    """

    name: str
    uid: str
    why: str
    successor: str = ""
    purpose: Purpose = "surplus"


@dataclass(frozen=True, slots=True)
class KeepGroup:
    """Take that note off again: the group is wanted after all."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class MarkLeader:
    """Tell routers that watch, by an annotation of a group's leader pod, whether the group is being emptied."""

    group: str
    pod: str
    uid: str
    draining: bool
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod with less grace than it has: none at all where its kubelet is not there to end it."""

    name: str
    uid: str
    grace_s: int
    why: str


@dataclass(frozen=True, slots=True)
class RestartGroup:
    """Delete all pods of a group, each only if it is still the one with its UID; note that before, with its UID and the group's.

    `pods`: names and UIDs.
    """

    name: str
    uid: str
    pods: tuple[tuple[str, str], ...]
    note: Restarts
    why: str


@dataclass(frozen=True, slots=True)
class NoteRestarts:
    """Note on a group what became of it."""

    name: str
    uid: str
    note: Restarts


@dataclass(frozen=True, slots=True)
class KeepGang:
    """Make what places the pods of a group together, where it is missing."""

    name: str
    uid: str
    kind: str
    pods: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepRevision:
    """Keep what this revision is, so that a rollout may go back to it."""

    revision: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryPods:
    """Make the controller of StatefulSets try again now to make the pods of a group, if it is still the one with this UID."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryRouters:
    """Make the controllers of the router Deployment try again now to make its pods, if it is still the one with this UID."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a group, if it is still the one with this UID."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Write the scale subresource, unless anybody wrote the service meanwhile."""

    replicas: int
    why: str


GroupAction = CreateGroup | DrainGroup | KeepGroup | DeleteGroup | RestartGroup
OfPods = MarkLeader | DeletePod | RetryPods | RetryRouters
Action = InitReplicas | SetReplicas | KeepChildren | GroupAction | OfPods | NoteRestarts | KeepGang | KeepRevision


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order, and what the status then says.

    empty: groups that routers are to take streams off. again_s: seconds until something may be due that wakes nobody.
    hear_s: routers are to say what they see at least this often. in_line: it waits for groups of another service to be placed.
    """

    actions: tuple[Action, ...]
    status: Status
    hear_s: float
    empty: tuple[str, ...] = ()
    again_s: float = 600.0
    in_line: bool = False
