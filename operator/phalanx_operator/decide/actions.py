"""What the operator may do to a service. Every action says why; the log, the event and the failing test print the same words."""

from dataclasses import dataclass

from phalanx_api.status import Status


@dataclass(frozen=True, slots=True)
class InitReplicas:
    """Write `spec.replicas` once, because the manifest left it out."""

    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepChildren:
    """Make what all groups share: the token, the Services, the router and its rights. Does nothing where they already are so."""

    why: str


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Make a group. An existing group of that name is left as it is."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a group, if it is still the one with this UID."""

    name: str
    uid: str
    why: str


Action = InitReplicas | KeepChildren | CreateGroup | DeleteGroup


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order, and what the status then says."""

    actions: tuple[Action, ...]
    status: Status
