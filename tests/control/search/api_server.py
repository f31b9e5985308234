"""`FakeKube` with the semantics of a real API server: versions, generations, deletion, owners, watches, and faults of calls.

    put               a change gets the next resourceVersion, one of `spec` the next generation; an equal object is not written
    delete            a StatefulSet until its pods are gone (foreground), a placed pod until its kubelet or grace 0 removes it
    collect           deletes objects without an existing owner, and owners that waited for their dependents
    log               events of each kind in order, from which each operator's watch reads at its own pace
    faults            a call of an operator fails before the write, after it (the answer is lost), or is rejected
    interrupts        others act just before a call, in the middle of a reconcile

Server-side apply takes ownership of its fields by force, as the operator's does, so it conflicts only by preconditions; fields
that a manager applied before and no longer does are removed, those of others stay.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from phalanx_api import labels
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    NODES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Conflict,
    Gone,
    Json,
    KubeError,
    Rejected,
    Resource,
    Retry,
)
from phalanx_operator.kube.store import Key, service_key
from tests.control.fake_kube import FakeKube, ObjectKey

T = TypeVar("T")
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEFAULT_GRACE_S = 30
WATCHED = (INFERENCE_SERVICES, STATEFUL_SETS, PODS, DEPLOYMENTS, SERVICES, NODES)
_WATCHED = {resource.plural for resource in WATCHED}
_FOREGROUND = {"statefulsets", "inferenceservices"}
FaultKind = Literal["before", "after", "rejected", "conflict"]


@lru_cache(maxsize=4096)
def stamp(t: float) -> str:
    """Returns the time `t` seconds after `START` in RFC 3339."""
    return (START + timedelta(seconds=t)).strftime("%Y-%m-%dT%H:%M:%SZ")


def copied(body: Json) -> Json:
    """Returns a deep copy of JSON."""
    copy: Json = msgspec.msgpack.decode(msgspec.msgpack.encode(body))
    return copy


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch. `line` is as the server sends it."""

    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    namespace: str
    name: str
    line: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """A call of an operator that changes objects. `error`: as the operator sees it; `is_done`: whether the write happened."""

    at: float
    writer: str
    verb: str
    plural: str
    name: str
    error: str
    is_done: bool
    service: Key
    """Of the object, by its label."""


@dataclass(slots=True)
class CallFaults:
    """Of the next reconcile of one operator: the fault of its n-th write, from 1; others that act before its n-th call."""

    writes: dict[int, FaultKind] = field(default_factory=dict)
    reads_fail: int = 0
    """Number of the read that fails, from 1; 0: no read does."""
    interrupts: dict[int, Callable[[], None]] = field(default_factory=dict)
    every: FaultKind | None = None
    """Of each call: a partition. `after`: only the answers are lost."""


class ApiServer(FakeKube):
    """The server. `clock` returns seconds since `START`; `writer` is the operator whose reconcile runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.log: dict[str, list[WatchEvent]] = {plural: [] for plural in _WATCHED}
        self.writer = ""
        self.faults = CallFaults()
        self.written: list[Written] = []
        self.notes: list[tuple[float, str, str]] = []
        """Time, reason and text of each Kubernetes event of an operator."""
        self.on_write: Callable[[Written], None] = self.written.append
        self._calls = 0
        self._reads = 0
        self._current: tuple[str, str, str, Key] = ("", "", "", ("", ""))
        self._own: dict[tuple[ObjectKey, str], Json] = {}
        """What each field manager applied last."""
        self._indexed_at = self._collected_at = -1
        self._kinds: dict[str, dict[str, Json]] = {}

    def begin(self, writer: str, faults: CallFaults) -> tuple[str, CallFaults, int, int]:
        """Starts a reconcile of this operator. Returns what `end` restores, as reconciles may be nested."""
        former = (self.writer, self.faults, self._calls, self._reads)
        self.writer, self.faults, self._calls, self._reads = writer, faults, 0, 0
        return former

    def end(self, former: tuple[str, CallFaults, int, int]) -> None:
        """Ends it."""
        self.writer, self.faults, self._calls, self._reads = former

    # Objects.

    @property
    def version(self) -> int:
        """Changes with every object."""
        return self._count

    def of_kind(self, resource: Resource) -> dict[str, Json]:
        """Returns the objects of one kind by name. A later change makes another mapping."""
        if self._indexed_at != self._count:
            self._indexed_at, self._kinds = self._count, {}
        if resource.plural not in self._kinds:
            self._kinds[resource.plural] = super().of_kind(resource)
        return self._kinds[resource.plural]

    def put(self, resource: Resource, body: Json) -> Json:
        """Stores an object as `store`. Returns a copy."""
        return copied(self.store(resource, body))

    def store(self, resource: Resource, body: Json) -> Json:
        """Returns the stored object itself: callers must not change it. An equal one keeps its version."""
        metadata = body["metadata"]
        key = (resource.plural, metadata.get("namespace", ""), metadata["name"])
        former = self.objects.get(key)
        generation = 1 if former is None else former["metadata"]["generation"] + (former.get("spec") != body.get("spec"))
        old = former["metadata"] if former else {}
        kept = {name: old[name] for name in ("uid", "creationTimestamp", "resourceVersion") if name in old}
        defaults = {"uid": f"uid-{self._count + 1}", "creationTimestamp": stamp(self.clock()), "namespace": ""}
        body = body | {"metadata": defaults | metadata | kept | {"generation": generation}}
        if body != former:
            body = copied(body)
        if former is not None and body == former:
            return former
        self._count += 1
        body["metadata"]["resourceVersion"] = str(self._count)
        self.objects[key] = body
        self._publish("ADDED" if former is None else "MODIFIED", key, body)
        return body

    def edit(self, resource: Resource, namespace: str, name: str, **fields: Json) -> None:
        """Merges fields into an existing object; None removes one."""
        body = self.objects[resource.plural, namespace, name]
        changed = {
            part: {k: v for k, v in (body.get(part, {}) | value).items() if v is not None} for part, value in fields.items()
        }
        self.store(resource, body | changed)

    def remove(self, key: ObjectKey) -> None:
        """Removes an object at once."""
        body = self.objects.pop(key)
        self._count += 1
        body = body | {"metadata": body["metadata"] | {"resourceVersion": str(self._count)}}
        self._publish("DELETED", key, body)

    def terminate(self, key: ObjectKey, grace_s: int | None = None) -> None:
        """Starts the deletion of an object; one that nothing holds is removed."""
        plural, body = key[0], self.objects[key]
        metadata, spec = body["metadata"], body.get("spec") or {}
        if plural == "pods" and spec.get("nodeName") and grace_s != 0:
            grace = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S) if grace_s is None else grace_s
            grace = min(grace, metadata.get("deletionGracePeriodSeconds", grace))
            changes = {"deletionTimestamp": stamp(self.clock() + grace), "deletionGracePeriodSeconds": grace}
            self._edit_metadata(key, metadata | changes)
        elif plural in _FOREGROUND and grace_s is None:
            finalizers = sorted({*metadata.get("finalizers", ()), "foregroundDeletion"})
            since = metadata.get("deletionTimestamp", stamp(self.clock()))
            self._edit_metadata(key, metadata | {"deletionTimestamp": since, "finalizers": finalizers})
        elif metadata.get("finalizers"):
            self._edit_metadata(key, {"deletionTimestamp": stamp(self.clock())} | metadata)
        else:
            self.remove(key)

    def collect(self) -> None:
        """Runs the garbage collector once."""
        if self._collected_at == self._count:
            return
        before = self._count
        uids = {body["metadata"]["uid"] for body in self.objects.values()}
        deleting = {b["metadata"]["uid"] for k, b in self.objects.items() if _is_foreground(k, b)}
        for key, body in list(self.objects.items()):
            owners = {owner["uid"] for owner in body["metadata"].get("ownerReferences") or []}
            if owners and key in self.objects and "deletionTimestamp" not in body["metadata"]:
                if not owners & uids or owners & deleting:
                    self.terminate(key, None if key[0] == "pods" or owners & deleting else 1)
        owned = {o["uid"] for body in self.objects.values() for o in body["metadata"].get("ownerReferences") or []}
        for key, body in list(self.objects.items()):
            if _is_foreground(key, body) and body["metadata"]["uid"] not in owned:
                self.remove(key)
        self._collected_at = self._count if self._count == before else -1

    def _edit_metadata(self, key: ObjectKey, metadata: Json) -> None:
        body = self.objects[key]
        if metadata != body["metadata"]:
            self._count += 1
            body = copied(body | {"metadata": metadata | {"resourceVersion": str(self._count)}})
            self.objects[key] = body
            self._publish("MODIFIED", key, body)

    def _publish(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], key: ObjectKey, body: Json) -> None:
        if key[0] in _WATCHED:
            line = msgspec.json.encode({"type": kind, "object": body})
            self.log[key[0]].append(WatchEvent(kind, key[1], key[2], line))

    def overridden(self, manager: str = labels.MANAGER) -> list[str]:
        """Returns the fields that a manager applied and another client changed."""
        own = [(key, body) for (key, writer), body in self._own.items() if writer == manager and key in self.objects]
        return [f"{key[0]} {key[2]} {path}" for key, body in own for path in _differing(self.objects[key], body)]

    def _applied(self, key: ObjectKey, former: Json, body: Json, manager: str) -> Json:
        own = self._own.get((key, manager), {}) if key in self.objects else {}
        metadata = {name: value for name, value in body["metadata"].items() if name not in ("uid", "resourceVersion")}
        self._own[key, manager] = body = copied(body | {"metadata": metadata})
        return _merged(former, body, own)

    # Calls of operators.

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        self._record("get", resource, name, write=False)
        return copied(self._find(resource, namespace, name))

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        if resource == EVENTS:
            self.notes.append((self.clock(), body["reason"], body["note"]))
            return {"metadata": body["metadata"]}
        if dry_run:
            return await super().create(resource, body, dry_run=True)
        return await self._answer(super().create(resource, body))

    async def apply(
        self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = labels.MANAGER
    ) -> Json:
        if subresource == "status":
            return await self._answer(self._apply_status(resource, body))
        return await self._answer(super().apply(resource, body, subresource=subresource, manager=manager))

    async def _apply_status(self, resource: Resource, body: Json) -> Json:
        metadata = body["metadata"]
        self._record("apply", resource, metadata["name"], "status")
        stored = self._find(resource, metadata["namespace"], metadata["name"])
        if metadata.get("uid", stored["metadata"]["uid"]) != stored["metadata"]["uid"]:
            raise Conflict("uid mismatch")
        return self.put(resource, stored | {"status": body["status"]})

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        return await self._answer(super().merge(resource, namespace, name, patch, subresource=subresource))

    async def replace(self, resource: Resource, body: Json) -> Json:
        return await self._answer(super().replace(resource, body))

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        await self._answer(self._delete(resource, (resource.plural, namespace, name), uid, grace_s))

    async def _delete(self, resource: Resource, key: ObjectKey, uid: str, grace_s: int | None) -> None:
        verb = "delete" if grace_s is None else "force-delete" if grace_s == 0 else "quick-delete"
        self._record(verb, resource, key[2])
        if key not in self.objects:
            raise Gone(f"no {resource.plural} {key[2]}")
        if self.objects[key]["metadata"]["uid"] != uid:
            raise Conflict("another object has this name")
        self.terminate(key, grace_s)

    async def _answer(self, call: Awaitable[T]) -> T:
        """Returns the answer of a write, or loses it."""
        fault: FaultKind | None = None
        try:
            answer = await call
            fault = self.faults.writes.pop(self._calls, None) or self.faults.every
            if fault == "after":
                raise Retry("the answer is lost")
        except KubeError as error:
            self._note(f"{type(error).__name__}: {error}", is_done=fault == "after")
            raise
        self._note("", is_done=True)
        return answer

    def _note(self, error: str, *, is_done: bool) -> None:
        verb, plural, name, service = self._current
        service = service if service[1] else self._service_of(plural, name)
        self.on_write(Written(self.clock(), self.writer, verb, plural, name, error, is_done, service))

    def _service_of(self, plural: str, name: str) -> Key:
        """Returns the service of an object; an empty name without one."""
        kind = plural.partition("/")[0]
        body = next((body for key, body in self.objects.items() if (key[0], key[2]) == (kind, name)), None)
        if body is None or kind == "inferenceservices":
            return ("", "") if body is None else (body["metadata"]["namespace"], name)
        return service_key(body["metadata"])

    def _record(self, verb: str, resource: Resource, name: str, subresource: str | None = None, *, write: bool = True) -> None:
        """Counts a call, and fails it."""
        plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
        interrupt = self.faults.interrupts.pop(self._calls + 1, None) if write else None
        if interrupt:
            interrupt()
        if write:
            self._calls += 1
            self._current = (verb, plural, name, self._service_of(plural, name))
            self.calls.append(f"{verb} {plural} {name}")
            self._fail_write()
            return
        self._reads += 1
        if self._reads == self.faults.reads_fail or self.faults.every:
            raise Retry("the API server is busy")

    def _fail_write(self) -> None:
        match self.faults.writes.get(self._calls, self.faults.every):
            case "before":
                raise Retry("no connection")
            case "conflict":
                raise Conflict("another writer was first")
            case "rejected":
                raise Rejected("a webhook rejects it")


def _is_foreground(key: ObjectKey, body: Json) -> bool:
    return key[0] in _FOREGROUND and "foregroundDeletion" in body["metadata"].get("finalizers", ())


def _merged(stored: Json, new: Json, own: Json) -> Json:
    """Returns an object after an apply. own: what the same manager applied before; it removes what is no longer in it."""
    fields = {name: value for name, value in stored.items() if name in new or name not in own}
    for name, value in new.items():
        former, before = fields.get(name), own.get(name)
        if isinstance(value, dict) and isinstance(former, dict):
            value = _merged(former, value, before if isinstance(before, dict) else {})
        fields[name] = value
    return fields


def _differing(stored: Json, applied: Json) -> Iterator[str]:
    """Yields the paths of applied fields that are stored with another value."""
    for name, value in applied.items():
        if isinstance(value, dict) and isinstance(stored.get(name), dict):
            yield from (f"{name}.{path}" for path in _differing(stored[name], value))
        elif stored.get(name) != value:
            yield name
