"""Actions of the operator on a service. Each carries its reason, which the log, the event and a failing test print."""

from dataclasses import dataclass

from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Purpose, Restarts


@dataclass(frozen=True, slots=True)
class InitReplicas:
    """Write `spec.replicas` once, because the manifest has no value."""

    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepChildren:
    """Create and keep what all groups share: the token, the Services, the router and its role."""

    groups: int
    """Wanted groups; one group has no disruption budget."""
    why: str
    is_blind: bool = False
    """The spec of the running groups is unknown, so routers, which serve under its names, stay unchanged."""


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Create a group, preferably not on the nodes `avoid`. An existing group of that name is left unchanged."""

    name: str
    why: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainGroup:
    """Annotate a group with this UID as draining.

    `successor`: a name for a group in its place; empty for no successor.
    """

    name: str
    uid: str
    why: str
    successor: str = ""
    purpose: Purpose = "surplus"


@dataclass(frozen=True, slots=True)
class KeepGroup:
    """Remove the drain annotation: the group is wanted after all."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLeader:
    """Show the drain state on the leader pod, which routers watch."""

    group: str
    pod: str
    uid: str
    draining: bool
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod with a shorter grace period: 0 where no kubelet can end it."""

    name: str
    uid: str
    grace_s: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartGroup:
    """Delete all pods of a group, each by its UID, after recording the restart on the group.

    `pods`: names and UIDs.
    """

    name: str
    uid: str
    pods: tuple[tuple[str, str], ...]
    note: Restarts
    why: str


@dataclass(frozen=True, slots=True)
class NoteRestarts:
    """Record restarts on a group."""

    name: str
    uid: str
    note: Restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepGang:
    """Create the group's missing gang object."""

    name: str
    uid: str
    kind: str
    pods: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepRevision:
    """Store the spec of this revision for a rollback."""

    revision: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryPods:
    """Make the StatefulSet controller retry the pods of the group with this UID now."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryRouters:
    """Make the controllers of the router Deployment with this UID retry its pods now."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete the group with this UID."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Write the scale subresource, unless the service changed since the snapshot."""

    replicas: int
    why: str


GroupAction = CreateGroup | DrainGroup | KeepGroup | DeleteGroup | RestartGroup
OfPods = MarkLeader | DeletePod | RetryPods | RetryRouters
Action = InitReplicas | SetReplicas | KeepChildren | GroupAction | OfPods | NoteRestarts | KeepGang | KeepRevision


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions in order, and the resulting status."""

    actions: tuple[Action, ...]
    status: Status
    hear_s: float
    """Longest poll of routers."""
    empty: tuple[str, ...] = ()
    """Groups that routers must evacuate."""
    again_s: float = 600.0
    """Seconds until the next reconcile without a wake."""
    in_line: bool = False
    """It waits until groups of another service are placed."""
