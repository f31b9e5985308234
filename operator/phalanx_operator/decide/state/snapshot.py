"""Observed state of one service at one moment, as frozen records."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from phalanx_api.conditions import Condition, ConditionType, Reason, find_condition, set_condition
from phalanx_api.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of a group or a router."""

    name: str
    index: int
    owner_uid: str
    component: str = ""
    ready: bool = False
    node: str = ""
    reason: str = ""
    """Why it is not ready, in the words of Kubernetes, if known."""
    message: str = ""
    uid: str = ""
    ip: str = ""
    created: str = ""
    unready_since: str = ""
    """Since when it is not ready, by the kubelet; empty before its first report."""
    ready_since: str = ""
    """Since when it is ready, likewise."""
    restarts: int = 0
    ended: str = ""
    """Restarts of its containers, and how the last one ended before."""
    leaving: bool = False
    """It is being deleted: evicted, or with its group."""
    hurried: bool = False
    """Its grace period is already short."""
    marked: bool = False
    """Its annotation shows routers that the group drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Record of a group's restarts, stored as annotation."""

    at: tuple[str, ...] = ()
    """Times of the restarts."""
    pods: tuple[str, ...] = ()
    """UIDs of the pods deleted for the last one."""
    engine: str = ""
    """The leader start whose deaths are counted."""
    deaths: int = 0
    containers: int = 0
    """Counted container restarts."""
    since: str = ""
    """When the group was last ready, or created, before its pods were deleted; empty once it is ready again."""
    excused: int = 0
    """Deaths of the leader's pod that requests caused."""


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node: whether it is ready, since when, and whether it accepts new pods."""

    name: str
    ready: bool
    since: str = ""
    cordoned: bool = False


Record = TypeVar("Record")


def changed(record: Record, **fields: Any) -> Record:
    """Returns the record with these fields; the same object if they are equal, as for most groups in most reconciles."""
    if all(getattr(record, name) == value for name, value in fields.items()):
        return record
    return replace(record, **fields)  # type: ignore[type-var]


Purpose = Literal["surplus", "revision", "straggler", "asked"]
"""Purpose of a drain: surplus groups, an old revision, a straggler, or a person's request by annotation."""


@dataclass(frozen=True, slots=True)
class DrainMark:
    """The drain annotation of a group: since when, why and for which purpose."""

    since: str
    why: str
    purpose: Purpose = "surplus"

    @property
    def is_final(self) -> bool:
        """Whether the group is deleted even if as many groups are wanted again."""
        return self.purpose in ("straggler", "asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGroup:
    """A group, which is a StatefulSet."""

    name: str
    uid: str
    revision: str
    created: str
    """Creation time, sortable."""
    size: int
    terminating: bool = False
    pods: tuple[ObservedPod, ...] = ()
    """Existing pods."""
    draining: DrainMark | None = None
    drained: str = ""
    """Why a draining group may be deleted: it has no streams, or its timeout is over."""
    lost: str = ""
    """Why it is given up for a group elsewhere."""
    slow: str = ""
    """Why it is to be replaced although it serves."""
    young: bool = False
    """It has been ready for less than `rollout.minReadySeconds`."""
    cordoned: bool = False
    """One of its nodes accepts no new pods."""
    silent: bool = False
    """One of its nodes is not ready."""
    short_since: str = ""
    """Since when this operator observed missing pods; empty if complete."""
    tokens: int = 0
    """Tokens in its KV pages."""
    gang: str = ""
    """Kind of its gang."""
    restarts: Restarts = Restarts()
    """The stored record."""
    noted: Restarts | None = None
    """The record to store."""
    recent_restarts: int = 0
    """Restarts in the window."""
    spent: bool = False
    """The restarts exceed the budget."""
    refused: str = ""
    """Why the API server rejects its pods."""
    retried: str = ""
    """When rejected pods were last retried."""

    @property
    def serving(self) -> bool:
        """Whether it is ready and stays."""
        return self.ready and self.draining is None

    @property
    def available(self) -> bool:
        """Whether it has been ready for `minReadySeconds`."""
        return self.ready and not self.young

    @property
    def leader(self) -> ObservedPod | None:
        """Its leader pod, if it exists."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def ready(self) -> bool:
        """Whether all its pods exist and are ready."""
        return not self.terminating and self.ready_pods == self.size

    @property
    def ready_pods(self) -> int:
        """Number of ready pods."""
        return sum(pod.ready for pod in self.pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRouter:
    """The router Deployment."""

    wanted: int
    updated: int
    ready: int
    current: bool
    """Its controller has observed the newest spec."""
    uid: str = ""
    refused: str = ""
    """Why its pods are rejected, as its controller reports."""
    refused_since: str = ""
    retried: str = ""
    """When rejected pods were last retried."""

    @property
    def settled(self) -> bool:
        """Whether all routers run the newest spec and are ready."""
        return self.current and self.updated == self.ready == self.wanted


@dataclass(frozen=True, slots=True)
class ObservedDeployment:
    """A Deployment that may be a service's router."""

    owner_uid: str
    name: str
    router: ObservedRouter


@dataclass(frozen=True, slots=True)
class ReplicasWriter:
    """The last writer of `spec.replicas` by managedFields, and the time."""

    manager: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All observations that decisions about one service use."""

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


# Conditions that another function of this reconcile has set already.


def override_condition(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    is_true: bool,
    reason: Reason,
    message: str,
    snapshot: Snapshot,
    now: str,
) -> tuple[Condition, ...]:
    """Overrides a condition set earlier in this reconcile. `lastTransitionTime` comes from the stored status: the intermediate
    value was never written."""
    former = find_condition(snapshot.status.conditions, kind)
    if former:
        there = find_condition(conditions, kind)
        conditions = tuple(former if one is there else one for one in conditions) if there else (*conditions, former)
    return set_condition(conditions, kind, is_true, reason=reason, message=message, generation=snapshot.generation, now=now)


# Times in Kubernetes' format, as seconds.


def parsed(text: str) -> datetime.datetime | None:
    """Returns the time; None for text without a valid time or time zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def age_s(since: str, now: str) -> float | None:
    """Returns the seconds from `since` to `now`; None if either is invalid."""
    first, last = parsed(since), parsed(now)
    return (last - first).total_seconds() if first and last else None
