"""Reports a reconcile: a status write, metrics and events."""

import datetime
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx_api import labels
from phalanx_api.conditions import Condition, ConditionType, Reason, find_condition
from phalanx_api.spec import inference_service as api
from phalanx_api.status import Status
from phalanx_operator.decide import pacing, plan
from phalanx_operator.decide.scaling.autoscaler import ScalingResult
from phalanx_operator.decide.state.actions import (
    CreateGroup,
    DeleteGroup,
    DrainGroup,
    GroupAction,
    KeepGroup,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.kube.client import EVENTS, INFERENCE_SERVICES, Json, KubeClient, KubeError
from phalanx_operator.kube.store import Key
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.scaling_history import ScalingHistory

log = logging.getLogger(__name__)
MAX_NOTE_BYTES = 1024
"""Of events.k8s.io, in UTF-8."""


@dataclass(frozen=True, slots=True)
class EventNote:
    """One event."""

    kind: Literal["Normal", "Warning"]
    """Warning if action may be needed."""
    reason: str
    message: str


def utc_now() -> datetime.datetime:
    """Returns the time in UTC."""
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class EventRecorder:
    """Posts Kubernetes events on services."""

    client: KubeClient
    identity: str
    now: Callable[[], datetime.datetime] = utc_now

    async def post(self, snapshot: Snapshot, note: EventNote) -> None:
        """Posts an event. Raises KubeError."""
        at = self.now()
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": "Event",
            "metadata": {"name": f"{snapshot.name}.{int(at.timestamp() * 1e6):x}", "namespace": snapshot.namespace},
            "eventTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": note.kind,
            "reason": note.reason,
            "note": note.message.encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
            "action": "Reconcile",
            "reportingController": f"{labels.DOMAIN}/operator",
            "reportingInstance": self.identity,
            "regarding": {
                "apiVersion": f"{api.GROUP}/{api.VERSION}",
                "kind": api.KIND,
                "name": snapshot.name,
                "namespace": snapshot.namespace,
                "uid": snapshot.uid,
            },
        }
        await self.client.create(EVENTS, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReporter:
    """Writes statuses, posts events and updates metrics."""

    client: KubeClient
    services: ServiceCache
    events: EventRecorder
    metrics: Metrics
    history: ScalingHistory | None = None
    clock: Callable[[], float] = time.monotonic
    write_interval_s: float = pacing.WRITE_INTERVAL_S
    written_s: dict[Key, float] = field(default_factory=dict)

    async def report(self, snapshot: Snapshot, status: Status, done: Sequence[GroupAction | SetReplicas]) -> float:
        """Writes a changed status, then announces. Returns the seconds until a deferred write, else until a resync."""
        try:
            due_in_s = await self._write(snapshot, status)
        except KubeError:
            await self.announce(snapshot, done)
            raise
        self.metrics.show((snapshot.namespace, snapshot.name), status)
        await self.announce(snapshot, done, _transition_notes(snapshot.status.conditions, status.conditions))
        return due_in_s

    async def announce(
        self, snapshot: Snapshot, done: Sequence[GroupAction | SetReplicas], transitions: Sequence[EventNote] = ()
    ) -> None:
        """Counts executed actions, and posts events of them and of transitions."""
        for action in done:
            self.metrics.actions.labels(type(action).__name__).inc()
        for note in [*_action_notes(done), *transitions]:
            try:
                await self.events.post(snapshot, note)
            except KubeError as error:  # a lost event must not repeat the work
                log.warning("event not posted", extra={"service": f"{snapshot.namespace}/{snapshot.name}", "why": str(error)})

    async def _write(self, snapshot: Snapshot, status: Status) -> float:
        """Returns as `report`."""
        key = snapshot.namespace, snapshot.name
        if status == snapshot.status:
            return plan.RESYNC_S
        defer_s = self.write_interval_s - (self.clock() - self.written_s.get(key, float("-inf")))
        if defer_s > 0 and pacing.can_defer_write(snapshot.status, status):
            return defer_s
        body = _status_body(snapshot, status)
        self.services.store_write(await self.client.apply(INFERENCE_SERVICES, body, subresource="status"))
        self.metrics.status_writes.inc()
        self.written_s[key] = self.clock()
        return plan.RESYNC_S

    def show_scaling(self, key: Key, scaling: ScalingResult | None) -> None:
        """Updates the autoscaler's metrics and history."""
        decision = scaling.decision if scaling else None
        self.metrics.show_scaling(key, decision)
        if self.history is not None and decision is not None:
            self.history.add(key, decision, self.clock())
        elif self.history is not None:
            self.history.forget(key)

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self.metrics.forget(key)
        if self.history is not None:
            self.history.forget(key)
        self.written_s.pop(key, None)


def _status_body(snapshot: Snapshot, status: Status) -> Json:
    """The UID makes it fail for another service of this name."""
    metadata = {"namespace": snapshot.namespace, "name": snapshot.name, "uid": snapshot.uid}
    values = status.model_dump(mode="json", by_alias=True, exclude_none=True)  # the API server rejects null
    return {"apiVersion": f"{api.GROUP}/{api.VERSION}", "kind": api.KIND, "metadata": metadata, "status": values}


_ACTION_REASONS: dict[type[GroupAction | SetReplicas], str] = {
    CreateGroup: "GroupCreated",
    DrainGroup: "GroupDraining",
    KeepGroup: "GroupKept",
    DeleteGroup: "GroupDeleted",
    RestartGroup: "GroupRestarted",
    SetReplicas: "Scaled",
}


def _action_notes(done: Sequence[GroupAction | SetReplicas]) -> list[EventNote]:
    """Returns an event per kind of action."""
    messages: dict[str, list[str]] = {}
    for action in done:
        target = f"to {action.replicas}" if isinstance(action, SetReplicas) else action.name
        messages.setdefault(_ACTION_REASONS[type(action)], []).append(f"{target}: {action.why}")
    return [EventNote("Normal", reason, part) for reason, lines in messages.items() for part in _join_lines(lines)]


def _join_lines(lines: Sequence[str]) -> list[str]:
    parts = [""]
    for line in lines:
        longer = f"{parts[-1]}; {line}" if parts[-1] else line
        parts = [*parts[:-1], longer] if len(longer.encode()) <= MAX_NOTE_BYTES or not parts[-1] else [*parts, line]
    return parts


_HOLDS: Mapping[ConditionType, EventNote] = {
    "ControlPlanePartitioned": EventNote("Normal", "PartitionEnded", "groups may be deleted and replaced again"),
    "DisruptionsHeld": EventNote("Normal", "DisruptionsResumed", "groups may be replaced again"),
}
"""Conditions that hold disruptions back, and the event of their end."""


def _hold_notes(before: Sequence[Condition], after: Sequence[Condition]) -> list[EventNote]:
    """Returns the events of holds that begin or end."""
    notes = []
    for kind, end in _HOLDS.items():
        old, new = (find_condition(conditions, kind) for conditions in (before, after))
        if new and (old is None or old.reason != new.reason):
            notes.append(EventNote("Warning", new.reason, new.message))
        elif old and not new:
            notes.append(end)
    return notes


_TRANSIENT = (
    Reason.GROUPS_NOT_READY,
    Reason.ROLLING_OUT,
    Reason.ROUTER_NOT_READY,
    Reason.ROUTERS_SILENT,
    Reason.DISABLED,
)
"""Reasons for `False` that end by themselves."""
_ROLLOUT_PROBLEMS = (Reason.SURGE_UNSCHEDULABLE, Reason.PROGRESS_DEADLINE_EXCEEDED)


def _transition_notes(before: Sequence[Condition], after: Sequence[Condition]) -> list[EventNote]:
    """Returns events for new reasons of unfulfilled conditions, and when the service becomes ready.

    `True` is reported only after `False`, and `Progressing` only for `_ROLLOUT_PROBLEMS`.
    """
    notes = _hold_notes(before, after)
    for kind in (
        "Ready",
        "Progressing",
        "ModelCached",
        "ScalingActive",
        "Balanced",
        "Compatible",
        "Speculating",
        "DevicesHealthy",
        "AdaptersReady",
        "CertificateValid",
    ):
        old, new = find_condition(before, kind), find_condition(after, kind)
        if new is None or (old and (old.status, old.reason) == (new.status, new.reason)):
            continue
        if kind == "Progressing":
            notes += [EventNote("Warning", new.reason, new.message)] if new.reason in _ROLLOUT_PROBLEMS else []
            continue
        if kind != "Ready" and new.status == "True" and (old is None or old.status != "False"):
            continue
        if new.status == "Unknown" and (kind in ("ModelCached", "Speculating") or (kind == "Balanced" and old is None)):
            continue
        is_normal = new.status == "True" or new.reason in _TRANSIENT
        notes.append(EventNote("Normal" if is_normal else "Warning", new.reason, new.message))
    return notes
