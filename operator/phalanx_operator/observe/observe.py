"""Builds a `Snapshot` from the informers' stores and the `ServiceCache`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import ValidationError

from phalanx_api import labels
from phalanx_api.schema import read
from phalanx_api.status import Status
from phalanx_operator.decide.groups import recovery
from phalanx_operator.decide.groups.drain import LAST_S
from phalanx_operator.decide.groups.recovery import RETRIED
from phalanx_operator.decide.state.snapshot import (
    DrainMark,
    ObservedDeployment,
    ObservedGroup,
    ObservedNode,
    ObservedPod,
    ObservedRouter,
    Purpose,
    ReplicasWriter,
    Restarts,
    Snapshot,
)
from phalanx_operator.kube.client import Json
from phalanx_operator.kube.store import Key, Store
from phalanx_operator.observe.pod_failure import last_end, trouble


@dataclass(frozen=True, slots=True)
class ObservedSet:
    """A StatefulSet that may be a group of a service."""

    owner_uid: str
    group: ObservedGroup


@dataclass(frozen=True, slots=True)
class ObservedName:
    """An object of which only the existence matters."""

    owner_uid: str
    name: str


def trim_pod(body: Mapping[str, Any]) -> ObservedPod:
    """Returns the relevant fields of a pod."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    leaving = "deletionTimestamp" in metadata
    ready = conditions.get("Ready", {}).get("status") == "True" and not leaving
    since = conditions.get("Ready", {}).get("lastTransitionTime") or ""
    reason, message = ("", "") if ready else trouble(status, conditions, leaving=leaving)
    index = _labels(metadata).get(labels.POD_INDEX, "0")
    return ObservedPod(
        name=metadata["name"],
        index=int(index) if index.isdecimal() else 0,
        owner_uid=owner_uid(metadata),
        component=_labels(metadata).get(labels.COMPONENT, ""),
        ready=ready,
        node=(body.get("spec") or {}).get("nodeName") or "",
        reason=reason,
        message=message[:300],
        uid=metadata.get("uid", ""),
        restarts=sum(one.get("restartCount", 0) for one in status.get("containerStatuses") or []),
        ended=last_end(status),
        ip=status.get("podIP") or "",
        leaving=leaving,
        created=metadata.get("creationTimestamp") or "",
        unready_since="" if ready else since,
        ready_since=since if ready else "",
        hurried=metadata.get("deletionGracePeriodSeconds", LAST_S + 1) <= LAST_S,
        marked=labels.DRAINING in _annotations(metadata),
    )


def trim_set(body: Mapping[str, Any]) -> ObservedSet:
    """Returns the relevant fields of a StatefulSet; `snapshot` adds its pods."""
    metadata = body["metadata"]
    group = ObservedGroup(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=_labels(metadata).get(labels.REVISION, ""),
        created=metadata["creationTimestamp"],
        size=body["spec"].get("replicas", 1),
        terminating="deletionTimestamp" in metadata,
        draining=draining_of(metadata),
        gang=_labels(metadata).get(labels.GANG, ""),
        restarts=recovery.read(_annotations(metadata).get(labels.RESTARTS)),
        retried=_annotations(metadata).get(RETRIED, ""),
    )
    return ObservedSet(owner_uid(metadata), group)


def trim_deployment(body: Mapping[str, Any]) -> ObservedDeployment:
    """Returns the relevant fields of a Deployment."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    refusal = conditions.get("ReplicaFailure", {})
    router = ObservedRouter(
        wanted=body["spec"].get("replicas", 1),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        current=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        uid=metadata.get("uid", ""),
        refused=(refusal.get("message") or "").rpartition("is forbidden: ")[2],  # without the pod's name, which changes
        refused_since=refusal.get("lastTransitionTime") or "",
        retried=_annotations(metadata).get(RETRIED, ""),
    )
    return ObservedDeployment(owner_uid(metadata), metadata["name"], router)


def trim_node(body: Mapping[str, Any]) -> ObservedNode:
    """Returns the relevant fields of a node."""
    conditions = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or []}
    ready = conditions.get("Ready", {})
    cordoned = bool((body.get("spec") or {}).get("unschedulable"))
    return ObservedNode(body["metadata"]["name"], ready.get("status") == "True", ready.get("lastTransitionTime") or "", cordoned)


def draining_of(metadata: Mapping[str, Any]) -> DrainMark | None:
    """Returns the drain annotation of a group, if it has one."""
    note = _annotations(metadata).get(labels.DRAINING)
    if note is None:
        return None
    since, _, rest = note.partition(" ")
    purpose, _, why = rest.partition(" ")
    known: Purpose | None = next((word for word in get_args(Purpose) if word == purpose), None)
    return DrainMark(since, why, known) if known else DrainMark(since, rest)


def trim_name(body: Mapping[str, Any]) -> ObservedName:
    """Returns the name and the owner."""
    return ObservedName(owner_uid(body["metadata"]), body["metadata"]["name"])


def _labels(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = metadata.get("labels") or {}
    return found


def _annotations(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = metadata.get("annotations") or {}
    return found


def owner_uid(metadata: Mapping[str, Any]) -> str:
    """Returns the UID of the controlling owner; empty without one."""
    return next((str(o["uid"]) for o in metadata.get("ownerReferences") or [] if o.get("controller")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """Stores of all child objects and of the nodes, with writes that the informers have not reported yet."""

    pods: Store[ObservedPod] = field(default_factory=lambda: Store(trim_pod))
    sets: Store[ObservedSet] = field(default_factory=lambda: Store(trim_set))
    deployments: Store[ObservedDeployment] = field(default_factory=lambda: Store(trim_deployment))
    services: Store[ObservedName] = field(default_factory=lambda: Store(trim_name))
    nodes: Store[ObservedNode] = field(default_factory=lambda: Store(trim_node))
    doomed: dict[Key, set[str]] = field(default_factory=dict)
    """UIDs of groups that the operator deleted, by service."""
    notes: dict[Key, dict[str, DrainMark | None]] = field(default_factory=dict)
    """Drain annotations that the operator wrote, by service and group UID."""
    counts: dict[Key, dict[str, Restarts]] = field(default_factory=dict)
    """Restart annotations that the operator wrote, by service and group UID."""
    short: dict[Key, dict[str, str]] = field(default_factory=dict)
    """Since when groups have fewer pods than they need."""

    def present(self, key: Key, uid: str) -> set[tuple[str, str]]:
        """Returns kind and name of the watched children that a service's groups share; a missing one is created again."""
        deployments = {("Deployment", d.name) for d in self.deployments.of(key) if d.owner_uid == uid}
        return deployments | {("Service", s.name) for s in self.services.of(key) if s.owner_uid == uid}

    def doom(self, key: Key, uid: str) -> None:
        """Marks this group as deleted."""
        self.doomed.setdefault(key, set()).add(uid)

    def note(self, key: Key, uid: str, draining: DrainMark | None) -> None:
        """Records the drain annotation of this group, or its removal."""
        self.notes.setdefault(key, {})[uid] = draining

    def restarted(self, key: Key, uid: str, note: Restarts) -> None:
        """Records the restart annotation of this group."""
        self.counts.setdefault(key, {})[uid] = note

    def count_pods(self, key: Key, now: str) -> None:
        """Records which groups lack pods and since when: no object of the cluster has that time."""
        num_pods = Counter(pod.owner_uid for pod in self.pods.of(key))
        groups = [s.group for s in self.sets.of(key)]
        before = self.short.pop(key, {})
        if short := {group.uid: before.get(group.uid, now) for group in groups if num_pods[group.uid] < group.size}:
            self.short[key] = short

    def prune(self, key: Key) -> None:
        """Drops deleted groups and recorded annotations that the store has received."""
        known = {s.group.uid: s.group.draining for s in self.sets.of(key)}
        late = {uid: note for uid, note in self.notes.pop(key, {}).items() if uid in known and known[uid] != note}
        if late:
            self.notes[key] = late
        noted = {s.group.uid: s.group.restarts for s in self.sets.of(key)}
        waiting = {uid: note for uid, note in self.counts.pop(key, {}).items() if uid in noted and noted[uid] != note}
        if waiting:
            self.counts[key] = waiting
        left = self.doomed.pop(key, set()) & {s.group.uid for s in self.sets.of(key)}
        if left:
            self.doomed[key] = left


def snapshot(body: Json, children: Children) -> Snapshot:
    """Returns the snapshot of a service. Children of an earlier service of the same name are excluded."""
    metadata = body["metadata"]
    uid = metadata["uid"]
    key = (metadata["namespace"], metadata["name"])
    routers = [d.router for d in children.deployments.of(key) if d.owner_uid == uid]
    return Snapshot(
        namespace=key[0],
        name=key[1],
        uid=uid,
        generation=metadata.get("generation", 0),
        resource_version=metadata["resourceVersion"],
        has_replicas=(body.get("spec") or {}).get("replicas") is not None,
        status=_former_status(body),
        groups=_groups(key, uid, children),
        replicas_writer=replicas_writer(metadata),
        nodes=_nodes_of(key, children),
        router=routers[0] if routers else None,
        router_pods=tuple(sorted((p for p in children.pods.of(key) if p.component == "router"), key=lambda pod: pod.name)),
    )


def _groups(key: Key, uid: str, children: Children) -> tuple[ObservedGroup, ...]:
    by_owner: dict[str, list[ObservedPod]] = {}
    for pod in children.pods.of(key):
        by_owner.setdefault(pod.owner_uid, []).append(pod)
    notes, counts = children.notes.get(key, {}), children.counts.get(key, {})
    groups = [
        replace(
            s.group,
            terminating=s.group.terminating or s.group.uid in children.doomed.get(key, ()),
            draining=notes.get(s.group.uid, s.group.draining),
            restarts=counts.get(s.group.uid, s.group.restarts),
            short_since=children.short.get(key, {}).get(s.group.uid, ""),
            pods=tuple(sorted(by_owner.get(s.group.uid, []), key=lambda pod: pod.index)),
        )
        for s in children.sets.of(key)
        if s.owner_uid == uid
    ]
    return tuple(sorted(groups, key=lambda group: group.name))


def _nodes_of(key: Key, children: Children) -> dict[str, ObservedNode]:
    """Returns the nodes of a service's pods."""
    wanted = {pod.node for pod in children.pods.of(key) if pod.node}
    found = ((name, children.nodes.find("", name)) for name in wanted)
    return {name: node for name, node in found if node is not None}


def replicas_writer(metadata: Mapping[str, Any]) -> ReplicasWriter | None:
    """Returns the last writer of `spec.replicas`, from managedFields."""
    owners = [
        ReplicasWriter(str(entry.get("manager", "")), str(entry.get("time", "")))
        for entry in metadata.get("managedFields") or []
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max(owners, key=lambda owner: owner.at, default=None)


def _former_status(body: Json) -> Status:
    """Returns the stored status; an empty one if a later operator version wrote fields that this one cannot read."""
    try:
        return read(Status, body.get("status") or {})
    except ValidationError:
        return Status()
