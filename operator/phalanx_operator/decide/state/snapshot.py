"""What the operator knows of one service at one moment, as frozen records."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from phalanx_api.conditions import Condition, ConditionType, Reason, find_condition, set_condition
from phalanx_api.status import Status


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod of a group or a router. `reason` says why it is not ready, in the words of Kubernetes, if it says so."""

    name: str
    index: int
    owner_uid: str
    component: str = ""
    ready: bool = False
    node: str = ""
    reason: str = ""
    message: str = ""
    uid: str = ""
    ip: str = ""
    created: str = ""
    unready_since: str = ""
    """Since when it is not ready, as the kubelet noted it; empty while it has not said."""
    ready_since: str = ""
    """Since when it is, likewise."""
    restarts: int = 0
    ended: str = ""
    """How often its containers were started again, and how the last one ended before."""
    leaving: bool = False
    """It is being deleted: somebody evicted it, or its group goes."""
    hurried: bool = False
    """Its grace is short already."""
    marked: bool = False
    """Routers that watch are told that its group is being emptied."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """What is noted on a group of its restarts: when they were, and the UIDs of the pods that were deleted for the last one.

    engine: which start of the leader `deaths` are counted of. excused: deaths that are taken back, for a request is to blame, of
    the leader's pod. containers: starts of containers that were counted. since: when the
    group was ready last, or made, before pods were deleted for not being ready; empty once it is ready again.
    """

    at: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    engine: str = ""
    deaths: int = 0
    containers: int = 0
    since: str = ""
    excused: int = 0


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node: whether the control plane hears it, since when that is so, and whether it takes new pods."""

    name: str
    ready: bool
    since: str = ""
    cordoned: bool = False


Record = TypeVar("Record")


def changed(record: Record, **fields: Any) -> Record:
    """The dataclass record with these fields, itself where it has them already: most looks change nothing of most groups."""
    if all(getattr(record, name) == value for name, value in fields.items()):
        return record
    return replace(record, **fields)  # type: ignore[type-var]


Purpose = Literal["surplus", "revision", "straggler", "asked"]
"""What a group is emptied for: there are too many, its revision is old, it is far slower than its equals, a person
asked for it by the annotation."""


@dataclass(frozen=True, slots=True)
class DrainMark:
    """A group is being emptied before it goes: since when, what for, and why."""

    since: str
    why: str
    purpose: Purpose = "surplus"

    @property
    def is_final(self) -> bool:
        """Whether it goes even if as many groups are wanted again."""
        return self.purpose in ("straggler", "asked")


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """A group, which is a StatefulSet. `created` is its creation time, sortable. `pods` are those that exist.

    lost: why it is given up for one elsewhere, if so. silent: a node of it is not heard. cordoned: one takes no new pods.
    young: it is ready, but not for `rollout.minReadySeconds` yet.
    short_since: since when this operator has seen pods of it missing; empty while none is. tokens: in its KV pages.
    drained: why it may go now, although it was being emptied: it holds no stream, or its time is over. slow: why it should be
    replaced although it serves. gang: who places its pods together.
    refused: why pods of it cannot be made, if the API server said so; retried: when that was last tried again.
    restarts: what is noted on it; noted: what should be; recent_restarts: how many of them count. spent: these are too many.
    """

    name: str
    uid: str
    revision: str
    created: str
    size: int
    terminating: bool = False
    pods: tuple[ObservedPod, ...] = ()
    draining: DrainMark | None = None
    drained: str = ""
    lost: str = ""
    slow: str = ""
    young: bool = False
    cordoned: bool = False
    silent: bool = False
    short_since: str = ""
    tokens: int = 0
    gang: str = ""
    restarts: Restarts = Restarts()
    noted: Restarts | None = None
    recent_restarts: int = 0
    spent: bool = False
    refused: str = ""
    retried: str = ""

    @property
    def serving(self) -> bool:
        """Whether it is ready and stays."""
        return self.ready and self.draining is None

    @property
    def available(self) -> bool:
        """Whether it has been ready for long enough to count on."""
        return self.ready and not self.young

    @property
    def leader(self) -> ObservedPod | None:
        """Its leader pod, if it exists."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def ready(self) -> bool:
        """Whether every pod that the group should have is there and ready."""
        return not self.terminating and self.ready_pods == self.size

    @property
    def ready_pods(self) -> int:
        """How many of its pods are ready."""
        return sum(pod.ready for pod in self.pods)


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """The router Deployment. `current` is false while its controller has not seen the newest spec.

    refused: why pods of it cannot be made, as its controller says, and since when; retried: when that was last tried again.
    """

    wanted: int
    updated: int
    ready: int
    current: bool
    uid: str = ""
    refused: str = ""
    refused_since: str = ""
    retried: str = ""

    @property
    def settled(self) -> bool:
        """Whether all routers run the newest spec and answer."""
        return self.current and self.updated == self.ready == self.wanted


@dataclass(frozen=True, slots=True)
class ObservedDeployment:
    """A Deployment that may be a router of ours."""

    owner_uid: str
    name: str
    router: ObservedRouter


@dataclass(frozen=True, slots=True)
class ReplicasWriter:
    """Who wrote `spec.replicas` last, as the API server noted it, and when."""

    manager: str
    at: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that decisions about one service rest on."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    has_replicas: bool
    status: Status
    groups: tuple[ObservedGroup, ...] = ()
    replicas_writer: ReplicasWriter | None = None
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)
    router: ObservedRouter | None = None
    router_pods: tuple[ObservedPod, ...] = ()


# Conditions that were set already in a look, set again by what weighs more.


def override_condition(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    is_true: bool,
    reason: Reason,
    message: str,
    snapshot: Snapshot,
    now: str,
) -> tuple[Condition, ...]:
    """The conditions with this one set, since when it was so at the last look: what was set meanwhile of it nobody saw."""
    former = find_condition(snapshot.status.conditions, kind)
    if former:
        there = find_condition(conditions, kind)
        conditions = tuple(former if one is there else one for one in conditions) if there else (*conditions, former)
    return set_condition(conditions, kind, is_true, reason=reason, message=message, generation=snapshot.generation, now=now)


# Times as Kubernetes writes them, as seconds.


def parsed(text: str) -> datetime.datetime | None:
    """The moment that a text names; None when it names none, or no zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def age_s(since: str, now: str) -> float | None:
    """Seconds from one time to another; None when either cannot be read."""
    first, last = parsed(since), parsed(now)
    return (last - first).total_seconds() if first and last else None
