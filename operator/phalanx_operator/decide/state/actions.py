"""Actions on a service. Logs and events print `why`."""

from dataclasses import dataclass

from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Purpose, RestartRecord


@dataclass(frozen=True, slots=True)
class InitReplicas:
    """Writes `spec.replicas` if the manifest has no value."""

    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepSharedObjects:
    """Applies the objects that all groups share."""

    groups: int
    """Wanted; a single group has no disruption budget."""
    why: str
    keeps_routers: bool = False
    """The running spec is unknown."""
    publishes_unready: bool = False
    """Routers answer, but none is ready for the control plane: their Service keeps them."""


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Creates a group unless it exists."""

    name: str
    why: str
    avoid_nodes: tuple[str, ...] = ()
    """Nodes with lower preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainGroup:
    """Sets the drain annotation."""

    name: str
    uid: str
    why: str
    successor: str = ""
    """Name of the group that replaces it."""
    purpose: Purpose = "surplus"


@dataclass(frozen=True, slots=True)
class KeepGroup:
    """Removes the drain annotation."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLeader:
    """Copies the drain annotation to the leader pod, for routers."""

    group: str
    pod: str
    uid: str
    draining: bool
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Deletes a pod with a shorter grace period."""

    name: str
    uid: str
    grace_s: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartGroup:
    """Records the restart, then deletes all pods."""

    name: str
    uid: str
    pods: tuple[tuple[str, str], ...]
    """Names and UIDs of the pods to delete."""
    record: RestartRecord
    why: str


@dataclass(frozen=True, slots=True)
class RecordRestarts:
    """Stores the restart record of a group."""

    name: str
    uid: str
    record: RestartRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepGang:
    """Creates the group's gang object if it is missing."""

    name: str
    uid: str
    kind: str
    pods: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepRevision:
    """Stores the spec of this revision for a rollback."""

    revision: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryPods:
    """Makes the controller retry rejected pods of a group."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class RetryRouters:
    """Makes the controller retry rejected router pods."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Deletes a group."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Writes the scale subresource unless the service changed."""

    replicas: int
    why: str


GroupAction = CreateGroup | DrainGroup | KeepGroup | DeleteGroup | RestartGroup
PodAction = MarkLeader | DeletePod | RetryPods | RetryRouters
Action = InitReplicas | SetReplicas | KeepSharedObjects | GroupAction | PodAction | RecordRestarts | KeepGang | KeepRevision


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions in order, and the resulting status."""

    actions: tuple[Action, ...]
    status: Status
    poll_s: float
    """Longest poll of routers."""
    evacuate: tuple[str, ...] = ()
    """Groups to evacuate."""
    requeue_s: float = 600.0
    is_queued: bool = False
    """It waits for another service's group."""
