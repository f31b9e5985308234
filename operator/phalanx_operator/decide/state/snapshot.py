"""Observed state of one service."""

import datetime
import functools
from collections.abc import Iterable, Mapping
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
    """Why it is not ready."""
    message: str = ""
    uid: str = ""
    ip: str = ""
    created: str = ""
    unready_since: str = ""
    ready_since: str = ""
    is_unreported: bool = False
    """Unready by the node controller alone: its kubelet has not reported it since its node fell silent."""
    restarts: int = 0
    """Restarts of the pod's containers."""
    last_termination: str = ""
    """Before the last restart."""
    has_failed: bool = False
    """A kubelet refused or evicted it, and its controller deletes it. The garbage collector gives no reason."""
    terminating: bool = False
    ends_at: str = ""
    """End of the grace period, if it is being deleted."""
    has_short_grace: bool = False
    """The grace period of the deletion is at most `FINAL_GRACE_S`."""
    is_marked_draining: bool = False
    """Has the drain annotation."""
    is_https: bool = False
    """Has the annotation of a router that serves HTTPS."""
    is_internal: bool = False
    """Has the annotation of a pod with a certificate for other pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSchemes:
    """How clients reach the routers. Some routers serve the other scheme while a change of `spec.router.tls` restarts them."""

    is_https: bool
    """Scheme of `status.url` and of the backend of an Ingress or HTTPRoute."""
    has_http: bool
    has_https: bool
    is_internal: bool = False
    """Routers have certificates for other pods: by `spec.security.tls`, or because a group still needs them."""
    publishes_unready: bool = False
    """Their Service keeps unready pods."""


def router_schemes(
    routers: Iterable[ObservedPod], *, wants_https: bool, groups: Iterable["ObservedGroup"] = (), wants_internal: bool = False
) -> RouterSchemes:
    """Returns the specified scheme once a ready router serves it; the other one as long as a ready router serves only that.

    Without a ready one, those count that were ready before their nodes fell silent.
    """
    routers = tuple(routers)
    ready = {pod.is_https for pod in routers if pod.ready} or {pod.is_https for pod in routers if pod.is_unreported}
    return RouterSchemes(
        is_https=wants_https if wants_https in ready or not ready else not wants_https,
        has_http=not wants_https or False in ready,
        has_https=wants_https or True in ready,
        is_internal=wants_internal or any(pod.is_internal for group in groups for pod in group.pods),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord:
    """Restarts of a group, stored as an annotation with these names."""

    at: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    """UIDs that the last restart deletes."""
    engine: str = ""
    """`pod UID/container restarts` of the leader with these deaths."""
    deaths: int = 0
    containers: int = 0
    """Counted container restarts."""
    since: str = ""
    """Start of the unready time that led to a restart."""
    excused: int = 0
    """Deaths of this leader pod that requests caused."""


@dataclass(frozen=True, slots=True)
class PodRefusal:
    """A pod that a kubelet refused or evicted, before its group was ready."""

    at: str
    """When it was observed."""
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node."""

    name: str
    ready: bool
    since: str = ""
    cordoned: bool = False


@dataclass(frozen=True, slots=True)
class NodeCensus:
    """All nodes of the cluster."""

    total: int = 0
    silent: tuple[ObservedNode, ...] = ()
    """Those that are not ready, by name."""


Record = TypeVar("Record")


def replace_fields(record: Record, **fields: Any) -> Record:
    """Returns the record with these fields; mostly the same object."""
    if all(getattr(record, name) == value for name, value in fields.items()):
        return record
    return replace(record, **fields)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Hold:
    """Why an operation that would end groups is held: its cause is more likely a common one, or a wrong clock."""

    reason: Reason
    why: str
    """Not what follows: that depends on partitions."""


Purpose = Literal["surplus", "revision", "straggler", "unreachable", "asked"]
"""Why a group drains. The last is the request of a user."""


@dataclass(frozen=True, slots=True)
class DrainMark:
    """The drain annotation."""

    since: str
    why: str
    purpose: Purpose = "surplus"

    @property
    def is_final(self) -> bool:
        """Whether the group leaves even if wanted again."""
        return self.purpose in ("straggler", "asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssessment:
    """Conclusions of `plan.assess`. Empty reasons do not apply."""

    lost_reason: str = ""
    """Why a successor elsewhere replaces it."""
    drained_reason: str = ""
    """Why it may be deleted."""
    straggler_reason: str = ""
    """Why it is replaced although ready."""
    unreachable_reason: str = ""
    """Why it is replaced although routers report that it serves: its node is lost to the control plane."""
    is_below_min_ready: bool = False
    """Ready for less than `minReadySeconds`."""
    has_cordoned_node: bool = False
    has_unready_node: bool = False
    kv_tokens: int = 0
    """KV tokens of running requests."""
    restarts_to_store: RestartRecord | None = None
    recent_restarts: int = 0
    """Restarts within the restart window."""
    exceeds_restart_budget: bool = False
    alive_reason: str = ""
    """Why it is kept although its node is silent: routers report that it serves."""
    hold: Hold | None = None
    """Why it is neither replaced nor given up now."""
    kept_reason: str = ""
    """Why it is kept although its node is silent: the control plane is partitioned, or was until nodes returned just now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGroup:
    """A group: a StatefulSet and its pods."""

    name: str
    uid: str
    revision: str
    created: str
    """Creation time as a sortable string."""
    size: int
    terminating: bool = False
    pods: tuple[ObservedPod, ...] = ()
    draining: DrainMark | None = None
    incomplete_since: str = ""
    """Since when pods have been missing."""
    unready_since: str = ""
    """Since when it has not been ready, whichever pods it had: as observed, so not before a start of the operator."""
    refusals: tuple[PodRefusal, ...] = ()
    """Since it was ready, as observed, so not before a start of the operator. At least `REFUSAL_S` between two."""
    gang: str = ""
    """Kind of the gang scheduler that places the group."""
    restarts: RestartRecord = RestartRecord()
    """Restart record as stored on the StatefulSet."""
    rejection: str = ""
    """Why the API server rejects its pods."""
    retried_at: str = ""
    """Last retry of rejected pods."""
    assessment: GroupAssessment = GroupAssessment()

    @property
    def serving(self) -> bool:
        """Ready and not draining."""
        return self.ready and self.draining is None

    @property
    def available(self) -> bool:
        """Ready for `minReadySeconds`, or on a silent node while routers report that it serves."""
        return bool(self.assessment.alive_reason) or (self.ready and not self.assessment.is_below_min_ready)

    @property
    def leader(self) -> ObservedPod | None:
        """Pod 0, if it exists."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def ready(self) -> bool:
        """All pods are ready, and there are some."""
        return not self.terminating and self.ready_pods == self.size > 0

    @property
    def alive(self) -> bool:
        """Ready, or on a silent node while routers report that it serves."""
        return self.ready or bool(self.assessment.alive_reason)

    @property
    def is_spared(self) -> bool:
        """Alive, or on a silent node while the control plane is partitioned: that it is unready is no reason to delete it."""
        return self.alive or bool(self.assessment.kept_reason)

    @property
    def ready_pods(self) -> int:
        """Number of ready pods."""
        return sum(pod.ready for pod in self.pods)


def with_assessment(group: ObservedGroup, **fields: Any) -> ObservedGroup:
    """Returns the group with these fields of its assessment."""
    return replace_fields(group, assessment=replace_fields(group.assessment, **fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRouter:
    """The router Deployment."""

    replicas: int
    updated: int
    ready: int
    is_current: bool
    """The newest spec is observed."""
    uid: str = ""
    rejection: str = ""
    """Why its pods are rejected."""
    rejected_since: str = ""
    retried_at: str = ""

    @property
    def is_settled(self) -> bool:
        """All routers run the newest spec and are ready."""
        return self.is_current and self.updated == self.ready == self.replicas


@dataclass(frozen=True, slots=True)
class ObservedDeployment:
    """A Deployment that may be a service's router."""

    owner_uid: str
    name: str
    router: ObservedRouter


@dataclass(frozen=True, slots=True)
class ReplicasWriter:
    """The last writer of `spec.replicas`."""

    manager: str
    at: str


@dataclass(frozen=True, slots=True)
class ObservedCertificate:
    """The certificate of `spec.router.tls`."""

    reason: Reason
    """`VALID`, or why routers cannot use it."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All observations about one service."""

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
    """Of its pods."""
    census: NodeCensus = NodeCensus()
    clock_reason: str = ""
    """Why times are not comparable: the clock of the API server or of the operator has just changed."""
    router: ObservedRouter | None = None
    router_pods: tuple[ObservedPod, ...] = ()
    certificate: ObservedCertificate | None = None
    """Null without `spec.router.tls`, or if it could not be read."""

    @property
    def kept_reason(self) -> str:
        """Why only a command, or a lower count of another client, deletes groups: a partition. Empty before `plan.assess`."""
        return next((group.assessment.kept_reason for group in self.groups if group.assessment.kept_reason), "")


def override_condition(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    is_true: bool,
    reason: Reason,
    message: str,
    snapshot: Snapshot,
    now: str,
) -> tuple[Condition, ...]:
    """Overrides a condition of this reconcile: `lastTransitionTime` comes from the stored status."""
    former = find_condition(snapshot.status.conditions, kind)
    if former:
        replaced = find_condition(conditions, kind)
        conditions = tuple(former if c is replaced else c for c in conditions) if replaced else (*conditions, former)
    return set_condition(conditions, kind, is_true, reason=reason, message=message, generation=snapshot.generation, now=now)


@functools.lru_cache(maxsize=1024)
def parse_time(text: str) -> datetime.datetime | None:
    """Returns the time, if it is valid RFC 3339 with a time zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def age_s(since: str, now: str) -> float | None:
    """Returns the seconds between two times, if both are valid."""
    first, last = parse_time(since), parse_time(now)
    return (last - first).total_seconds() if first and last else None
