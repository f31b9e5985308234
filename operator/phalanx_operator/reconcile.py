"""One look at one service: observe, decide, apply, one status write, then events and metrics."""

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx_api import inference_service as api
from phalanx_api.conditions import Condition, Reason, find_condition
from phalanx_api.inference_service import FieldError, InferenceService
from phalanx_api.status import Status
from phalanx_operator import observe
from phalanx_operator.apply import Hands
from phalanx_operator.decide import plan
from phalanx_operator.decide import status as decide_status
from phalanx_operator.decide.actions import CreateGroup, DeleteGroup
from phalanx_operator.decide.snapshot import Snapshot
from phalanx_operator.errors import Denied, Gone, KubeError, Rejected
from phalanx_operator.events import Note, Notes
from phalanx_operator.kube import SERVICES_OF_OURS, Json, KubeClient
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe import Children
from phalanx_operator.render import names
from phalanx_operator.render.revision import revision
from phalanx_operator.store import Key

log = logging.getLogger(__name__)
RESYNC_S = 600.0


def utc_now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Brings services to what their specs say."""

    client: KubeClient
    children: Children
    hands: Hands
    notes: Notes
    metrics: Metrics
    now: Callable[[], str] = utc_now

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the service should be looked at again, None when it is gone. Raises: a KubeError to try again later."""
        namespace, name = key
        try:
            body = await self.client.get(SERVICES_OF_OURS, namespace, name)
        except Gone:
            self.hands.forget(key)
            self.metrics.forget(key)
            return None
        if "deletionTimestamp" in body["metadata"]:
            return RESYNC_S  # what it owns goes with it
        self.children.prune(key)
        snapshot = observe.snapshot(body, self.children)
        parsed = api.parse(body)
        if isinstance(parsed, list):
            await self._write(snapshot, decide_status.refused(snapshot, Reason.SPEC_INVALID, parsed, self.now()), ())
            return RESYNC_S
        await self._follow(parsed, snapshot)
        return RESYNC_S

    async def _follow(self, service: InferenceService, snapshot: Snapshot) -> None:
        """Does what the spec asks for, and says in the status what then is."""
        current = revision(service)
        count = plan.wanted_replicas(service) + len(snapshot.groups)
        desired = plan.desired_groups(service, current, names.group_names(service.name, service.uid, current, count))
        todo = plan.decide(service, snapshot, desired, self.now())
        try:
            done = await self.hands.carry_out(todo.actions, service, snapshot, current)
        except (Rejected, Denied) as error:  # a webhook or a quota may refuse what the schema takes
            wrong = [FieldError("spec", str(error))]
            await self._write(snapshot, decide_status.refused(snapshot, Reason.REJECTED, wrong, self.now()), ())
            raise
        await self._write(snapshot, todo.status, done)

    async def _write(self, snapshot: Snapshot, status: Status, done: Sequence[CreateGroup | DeleteGroup]) -> None:
        """One status write, if the status says anything new; announces only after that."""
        key = (snapshot.namespace, snapshot.name)
        if status != snapshot.status:
            await self.client.apply(SERVICES_OF_OURS, _status_body(snapshot, status), subresource="status")
            self.metrics.status_writes.inc()
        self.metrics.show(key, status)
        for note in [*_group_notes(done), *_transitions(snapshot.status.conditions, status.conditions)]:
            try:
                await self.notes.post(snapshot, note)
            except KubeError as error:  # an event is a courtesy: its loss must not repeat the work
                log.warning("event not posted", extra={"service": "/".join(key), "why": str(error)})


def _status_body(snapshot: Snapshot, status: Status) -> Json:
    """What is applied to the status subresource. The UID makes sure that it is still the same service."""
    metadata = {"namespace": snapshot.namespace, "name": snapshot.name, "uid": snapshot.uid}
    written = status.model_dump(mode="json", by_alias=True)
    return {"apiVersion": f"{api.GROUP}/{api.VERSION}", "kind": api.KIND, "metadata": metadata, "status": written}


def _group_notes(done: Sequence[CreateGroup | DeleteGroup]) -> list[Note]:
    return [
        Note("Normal", "GroupCreated" if isinstance(action, CreateGroup) else "GroupDeleted", f"{action.name}: {action.why}")
        for action in done
    ]


def _transitions(before: Sequence[Condition], after: Sequence[Condition]) -> list[Note]:
    """One note when the service becomes ready, and one for each new reason why it is not."""
    old, new = find_condition(before, "Ready"), find_condition(after, "Ready")
    if new is None or (old and (old.status, old.reason) == (new.status, new.reason)):
        return []
    calm = new.status == "True" or new.reason in (Reason.GROUPS_NOT_READY, Reason.ROLLING_OUT, Reason.ROUTER_NOT_READY)
    return [Note("Normal" if calm else "Warning", new.reason, new.message)]
