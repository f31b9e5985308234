"""Kubernetes events on a service, shown by `kubectl describe`. Posted on transitions only."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx_api import labels
from phalanx_api.spec import inference_service as api
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.kube.client import EVENTS, KubeClient

LONGEST_NOTE = 1000


@dataclass(frozen=True, slots=True)
class EventNote:
    """One event. `kind` is Warning where action may be needed."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


def utc_now() -> datetime.datetime:
    """Returns the current time in UTC."""
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class EventRecorder:
    """Posts events as this operator."""

    client: KubeClient
    identity: str
    now: Callable[[], datetime.datetime] = utc_now

    async def post(self, snapshot: Snapshot, note: EventNote) -> None:
        """Posts one event. Raises KubeError."""
        at = self.now()
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": "Event",
            "metadata": {"name": f"{snapshot.name}.{int(at.timestamp() * 1e6):x}", "namespace": snapshot.namespace},
            "eventTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": note.kind,
            "reason": note.reason,
            "note": note.message[:LONGEST_NOTE],
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
