"""Builds a `Snapshot` from the informers' stores and pending writes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, get_args

from pydantic import ValidationError

from phalanx_api import labels
from phalanx_api.schema import parse_record
from phalanx_api.status import Status
from phalanx_operator.decide.groups import recovery
from phalanx_operator.decide.groups.drain import FINAL_GRACE_S
from phalanx_operator.decide.groups.recovery import RETRIED_ANNOTATION
from phalanx_operator.decide.state.snapshot import (
    DrainMark,
    NodeCensus,
    ObservedDeployment,
    ObservedGroup,
    ObservedNode,
    ObservedPod,
    ObservedRouter,
    PodRefusal,
    Purpose,
    ReplicasWriter,
    RestartRecord,
    Snapshot,
    age_s,
)
from phalanx_operator.kube.client import Json
from phalanx_operator.kube.store import Key, Store
from phalanx_operator.observe.pod_failure import last_termination, pod_failure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObservedSet:
    """A StatefulSet that may be a group."""

    owner_uid: str
    group: ObservedGroup


@dataclass(frozen=True, slots=True)
class ObservedName:
    """An object that only has to exist."""

    owner_uid: str
    name: str


def read_pod(body: Mapping[str, Any]) -> ObservedPod:
    """Returns the record of a pod."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    terminating = "deletionTimestamp" in metadata
    ready = conditions.get("Ready", {}).get("status") == "True" and not terminating
    since = conditions.get("Ready", {}).get("lastTransitionTime") or ""
    reason, message = ("", "") if ready else pod_failure(body, conditions, terminating=terminating)
    index, node = _labels(metadata).get(labels.POD_INDEX, "0"), (body.get("spec") or {}).get("nodeName") or ""
    return ObservedPod(
        name=metadata["name"],
        index=int(index) if index.isdecimal() else 0,
        owner_uid=owner_uid(metadata),
        component=_labels(metadata).get(labels.COMPONENT, ""),
        ready=ready,
        node=node,
        reason=reason,
        message=message[:300],
        uid=metadata.get("uid", ""),
        restarts=sum(c.get("restartCount", 0) for c in status.get("containerStatuses") or []),
        last_termination=last_termination(status),
        ip=status.get("podIP") or "",
        has_failed=status.get("phase") == "Failed" and bool(status.get("reason") and node) and not terminating,
        terminating=terminating,
        ends_at=metadata.get("deletionTimestamp") or "",
        created=metadata.get("creationTimestamp") or "",
        unready_since="" if ready else since,
        ready_since=since if ready else "",
        is_unreported=not (ready or terminating) and _is_unreported(conditions),
        has_short_grace=metadata.get("deletionGracePeriodSeconds", FINAL_GRACE_S + 1) <= FINAL_GRACE_S,
        is_marked_draining=labels.DRAINING in _annotations(metadata),
        is_https=_annotations(metadata).get(labels.SCHEME) == "https",
        is_internal=_annotations(metadata).get(labels.INTERNAL_TLS) == "true",
    )


def _is_unreported(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether the node controller reported a pod as unready: it changes the status of `Ready` alone, a kubelet gives a
    reason."""
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    return ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"


def read_set(body: Mapping[str, Any]) -> ObservedSet:
    """Returns the record of a StatefulSet, without pods."""
    metadata = body["metadata"]
    group = ObservedGroup(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=_labels(metadata).get(labels.REVISION, ""),
        created=metadata["creationTimestamp"],
        size=body["spec"].get("replicas", 1),
        terminating="deletionTimestamp" in metadata,
        draining=parse_drain_mark(metadata),
        gang=_labels(metadata).get(labels.GANG, ""),
        restarts=recovery.parse_record(_annotations(metadata).get(labels.RESTARTS)),
        retried_at=_annotations(metadata).get(RETRIED_ANNOTATION, ""),
    )
    return ObservedSet(owner_uid(metadata), group)


def read_deployment(body: Mapping[str, Any]) -> ObservedDeployment:
    """Returns the record of a Deployment."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    failure = conditions.get("ReplicaFailure", {})
    router = ObservedRouter(
        replicas=body["spec"].get("replicas", 1),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        is_current=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        uid=metadata.get("uid", ""),
        rejection=(failure.get("message") or "").rpartition("is forbidden: ")[2],  # without the pod's name, which changes
        rejected_since=failure.get("lastTransitionTime") or "",
        retried_at=_annotations(metadata).get(RETRIED_ANNOTATION, ""),
    )
    return ObservedDeployment(owner_uid(metadata), metadata["name"], router)


def read_node(body: Mapping[str, Any]) -> ObservedNode:
    """Returns the record of a node."""
    conditions = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or []}
    ready = conditions.get("Ready", {})
    cordoned = bool((body.get("spec") or {}).get("unschedulable"))
    return ObservedNode(body["metadata"]["name"], ready.get("status") == "True", ready.get("lastTransitionTime") or "", cordoned)


def parse_drain_mark(metadata: Mapping[str, Any]) -> DrainMark | None:
    """Returns the drain annotation `TIME [PURPOSE] REASON`, if there is one."""
    note = _annotations(metadata).get(labels.DRAINING)
    if note is None:
        return None
    since, _, rest = note.partition(" ")
    word, _, why = rest.partition(" ")
    purpose: Purpose | None = next((purpose for purpose in get_args(Purpose) if purpose == word), None)
    return DrainMark(since, why, purpose) if purpose else DrainMark(since, rest)


def read_name(body: Mapping[str, Any]) -> ObservedName:
    """Returns the record of any other object."""
    return ObservedName(owner_uid(body["metadata"]), body["metadata"]["name"])


def _labels(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    values: Mapping[str, str] = metadata.get("labels") or {}
    return values


def _annotations(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    values: Mapping[str, str] = metadata.get("annotations") or {}
    return values


def owner_uid(metadata: Mapping[str, Any]) -> str:
    """Returns the UID of the controlling owner; empty without one."""
    return next((str(o["uid"]) for o in metadata.get("ownerReferences") or [] if o.get("controller")), "")


LATE_S = 240.0
"""After this, a group that no informer reports is taken for deleted: its creation and deletion may be in one list. Longer than
a pass of the operator may take."""


@dataclass(frozen=True, slots=True)
class Creation:
    """A created group. `at`: start of the pass that created it."""

    observed: ObservedSet
    at: str


@dataclass(frozen=True, slots=True)
class Annotation(Generic[T]):
    """A written annotation, and the resource version that the write gave the group, if it is numeric."""

    value: T
    version: int | None = None

    def is_reported(self, observed: T, version: int | None) -> bool:
        """Returns whether an observed group has this write, or what another client wrote after it."""
        if self.version is None or version is None:
            return observed == self.value
        return version >= self.version


@dataclass(frozen=True, slots=True)
class PendingWrites:
    """Writes to groups that the informers have not reported yet, by UID."""

    created: dict[str, Creation] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    drain_marks: dict[str, Annotation[DrainMark | None]] = field(default_factory=dict)
    restarts: dict[str, Annotation[RestartRecord]] = field(default_factory=dict)

    def prune(self, groups: Mapping[str, ObservedGroup], sets: Store[ObservedSet], namespace: str, now: str) -> "PendingWrites":
        """Returns the writes that the informer has yet to report. groups: as it reports them, by UID."""
        created = {
            uid: creation
            for uid, creation in self.created.items()
            if uid not in groups and not sets.is_deleted(uid) and abs(age_s(creation.at, now) or 0) < LATE_S
        }
        versions = {uid: sets.version(namespace, group.name) for uid, group in groups.items()}
        groups = {uid: c.observed.group for uid, c in created.items()} | dict(groups)

        def is_late(uid: str, write: Annotation[T], read: Callable[[ObservedGroup], T]) -> bool:
            return uid in groups and not (uid in versions and write.is_reported(read(groups[uid]), versions[uid]))

        return PendingWrites(
            created,
            self.deleted & groups.keys(),
            {uid: m for uid, m in self.drain_marks.items() if is_late(uid, m, lambda group: group.draining)},
            {uid: r for uid, r in self.restarts.items() if is_late(uid, r, lambda group: group.restarts)},
        )

    def apply(self, group: ObservedGroup) -> ObservedGroup:
        """Returns the group after these writes."""
        return replace(
            group,
            terminating=group.terminating or group.uid in self.deleted,
            draining=self.drain_marks[group.uid].value if group.uid in self.drain_marks else group.draining,
            restarts=self.restarts[group.uid].value if group.uid in self.restarts else group.restarts,
        )

    def __bool__(self) -> bool:
        return bool(self.created or self.deleted or self.drain_marks or self.restarts)


REFUSAL_S = 30.0
"""Least time between two refusals that count: a controller creates the next pod at once."""
MAX_REFUSALS = 33
"""Of a group: one more than `maxGroupRestarts` may be."""


class PodStore(Store[ObservedPod]):
    """Remembers failed pods until they are taken: their controllers delete them before the next reconcile."""

    def __init__(self) -> None:
        super().__init__(read_pod)
        self._failed: dict[Key, dict[str, ObservedPod]] = {}

    def put(self, body: Mapping[str, Any]) -> Key | None:
        """See Store."""
        key = super().put(body)
        pod = self.find(body["metadata"].get("namespace", ""), body["metadata"]["name"])
        if key and pod and pod.has_failed:
            self._failed.setdefault(key, {})[pod.name] = pod
        return key

    def take_failed(self, key: Key) -> list[ObservedPod]:
        """Returns the last failed pod of each name since the last call."""
        return list(self._failed.pop(key, {}).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """Stores of child objects and nodes, with pending writes."""

    pods: PodStore = field(default_factory=PodStore)
    sets: Store[ObservedSet] = field(default_factory=lambda: Store(read_set))
    deployments: Store[ObservedDeployment] = field(default_factory=lambda: Store(read_deployment))
    services: Store[ObservedName] = field(default_factory=lambda: Store(read_name))
    nodes: Store[ObservedNode] = field(default_factory=lambda: Store(read_node))
    pending: dict[Key, PendingWrites] = field(default_factory=dict)
    incomplete: dict[Key, dict[str, str]] = field(default_factory=dict)
    """Since when groups lack pods, by UID."""
    unready: dict[Key, dict[str, str]] = field(default_factory=dict)
    """Since when groups lack ready pods, by UID."""
    refusals: dict[Key, dict[str, tuple[PodRefusal, ...]]] = field(default_factory=dict)
    """Of groups that lack ready pods, by UID."""

    def shared_objects(self, key: Key, uid: str) -> set[tuple[str, str]]:
        """Returns kind and name of watched objects that groups share."""
        deployments = {("Deployment", d.name) for d in self.deployments.of_service(key) if d.owner_uid == uid}
        return deployments | {("Service", s.name) for s in self.services.of_service(key) if s.owner_uid == uid}

    def pending_writes(self, key: Key) -> PendingWrites:
        """Returns the pending writes, to add to."""
        return self.pending.setdefault(key, PendingWrites())

    def track(self, key: Key, now: str) -> None:
        """Records since when groups lack pods, and ready ones, and which of their pods kubelets refused meanwhile."""
        was_unready = self.unready.get(key, {})
        failed = [pod for pod in self.pods.take_failed(key) if pod.owner_uid in was_unready]
        pods, groups = self.pods.of_service(key), [s.group for s in self.sets.of_service(key)]
        existing, ready = Counter(pod.owner_uid for pod in pods), Counter(pod.owner_uid for pod in pods if pod.ready)
        for times, num_pods in ((self.incomplete, existing), (self.unready, ready)):
            former = times.pop(key, {})
            if since := {g.uid: former.get(g.uid, now) for g in groups if num_pods[g.uid] < g.size}:
                times[key] = since
        self._track_refusals(key, failed, now)

    def _track_refusals(self, key: Key, failed: Iterable[ObservedPod], now: str) -> None:
        unready = self.unready.get(key, {})
        refusals = {uid: former for uid, former in self.refusals.pop(key, {}).items() if uid in unready}
        for pod in failed:
            earlier = refusals.get(pod.owner_uid, ())
            if pod.owner_uid in unready and (not earlier or (age_s(earlier[-1].at, now) or 0.0) >= REFUSAL_S):
                why = f"pod {pod.name} on node {pod.node}: {pod.reason}: {pod.message}"
                refusals[pod.owner_uid] = (*earlier, PodRefusal(now, pod.node, why))[-MAX_REFUSALS:]
        if refusals:
            self.refusals[key] = refusals

    def prune(self, key: Key, now: str) -> None:
        """Drops reported writes."""
        groups = {s.group.uid: s.group for s in self.sets.of_service(key)}
        if pending := self.pending.pop(key, PendingWrites()).prune(groups, self.sets, key[0], now):
            self.pending[key] = pending

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self.pending.pop(key, None)
        self.incomplete.pop(key, None)
        self.unready.pop(key, None)
        self.refusals.pop(key, None)
        self.pods.take_failed(key)


def take_snapshot(body: Json, children: Children) -> Snapshot:
    """Returns the snapshot, without children of an earlier service of this name."""
    metadata = body["metadata"]
    uid = metadata["uid"]
    key = (metadata["namespace"], metadata["name"])
    routers = [d.router for d in children.deployments.of_service(key) if d.owner_uid == uid]
    pods = children.pods.of_service(key)
    return Snapshot(
        namespace=key[0],
        name=key[1],
        uid=uid,
        generation=metadata.get("generation", 0),
        resource_version=metadata["resourceVersion"],
        has_replicas=(body.get("spec") or {}).get("replicas") is not None,
        status=_stored_status(body),
        groups=_groups(key, uid, children),
        replicas_writer=replicas_writer(metadata),
        nodes=_nodes(key, children),
        census=_census(children),
        router=routers[0] if routers else None,
        router_pods=tuple(sorted((pod for pod in pods if pod.component == "router"), key=lambda pod: pod.name)),
    )


def _groups(key: Key, uid: str, children: Children) -> tuple[ObservedGroup, ...]:
    by_owner: dict[str, list[ObservedPod]] = {}
    for pod in children.pods.of_service(key):
        by_owner.setdefault(pod.owner_uid, []).append(pod)
    pending, incomplete = children.pending.get(key, PendingWrites()), children.incomplete.get(key, {})
    unready, refusals = children.unready.get(key, {}), children.refusals.get(key, {})
    sets = {uid: c.observed for uid, c in pending.created.items()} | {s.group.uid: s for s in children.sets.of_service(key)}
    groups = [
        replace(
            pending.apply(s.group),
            incomplete_since=incomplete.get(s.group.uid, ""),
            unready_since=unready.get(s.group.uid, ""),
            refusals=refusals.get(s.group.uid, ()),
            pods=tuple(sorted(by_owner.get(s.group.uid, []), key=lambda pod: pod.index)),
        )
        for s in sets.values()
        if s.owner_uid == uid
    ]
    return tuple(sorted(groups, key=lambda group: group.name))


def _nodes(key: Key, children: Children) -> dict[str, ObservedNode]:
    names = {pod.node for pod in children.pods.of_service(key) if pod.node}
    nodes = ((name, children.nodes.find("", name)) for name in names)
    return {name: node for name, node in nodes if node is not None}


def _census(children: Children) -> NodeCensus:
    silent = [node for node in children.nodes.records() if not node.ready]
    return NodeCensus(len(children.nodes), tuple(sorted(silent, key=lambda node: node.name)))


def replicas_writer(metadata: Mapping[str, Any]) -> ReplicasWriter | None:
    """Returns the last writer of `spec.replicas`, from managedFields."""
    owners = [
        ReplicasWriter(str(entry.get("manager", "")), str(entry.get("time", "")))
        for entry in metadata.get("managedFields") or []
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max(owners, key=lambda owner: owner.at, default=None)


def _stored_status(body: Json) -> Status:
    """Empty if a later version wrote unreadable fields."""
    try:
        return parse_record(Status, body.get("status") or {})
    except ValidationError:
        return Status()
