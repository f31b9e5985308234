"""Executes the actions of a plan; each is idempotent. Existing groups are never rendered again."""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.apply.quota import QuotaBackoff
from phalanx_operator.apply.shared_objects import SharedObjects
from phalanx_operator.decide.conditions.status import is_quota_error
from phalanx_operator.decide.groups.drain import FINAL_GRACE_S
from phalanx_operator.decide.groups.recovery import RETRIED_ANNOTATION, format_record
from phalanx_operator.decide.state.actions import (
    Action,
    CreateGroup,
    DeleteGroup,
    DeletePod,
    DrainGroup,
    GroupAction,
    InitReplicas,
    KeepGang,
    KeepGroup,
    KeepRevision,
    KeepSharedObjects,
    MarkLeader,
    RecordRestarts,
    RestartGroup,
    RetryPods,
    RetryRouters,
    SetReplicas,
)
from phalanx_operator.decide.state.snapshot import DrainMark, Snapshot
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    Conflict,
    Gone,
    Json,
    KubeClient,
    KubeError,
    Rejected,
    Resource,
)
from phalanx_operator.kube.store import Key, read_version
from phalanx_operator.logs import audit
from phalanx_operator.observe.api_discovery import POD_GROUPS
from phalanx_operator.observe.observe import Annotation, Children, Creation, read_set
from phalanx_operator.render import gangs, pods
from phalanx_operator.render import objects as names
from phalanx_operator.render.gangs import Gang
from phalanx_operator.render.network import DEFAULT_PEERS, PeerNamespaces
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild

log = logging.getLogger(__name__)
GANG_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Inputs and results of an execution."""

    service: InferenceService
    snapshot: Snapshot
    revision: str
    gang: Gang
    """Of new groups, as `revision`."""
    now: str
    done: list[GroupAction | SetReplicas] = field(default_factory=list)
    """Actions that changed groups or `spec.replicas`."""
    shared_errors: list[KubeError] = field(default_factory=list)
    """Of shared objects that groups do without."""

    @property
    def key(self) -> Key:
        """The service's key."""
        return self.service.namespace, self.service.name


@dataclass(frozen=True, slots=True)
class _GangAttempt:
    at_s: float
    error: str


class ActionExecutor:
    """Executes actions. `draw` returns random numbers from 0 to 1."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        draw_token: Callable[[], str],
        *,
        peers: PeerNamespaces = DEFAULT_PEERS,
        private_sources: tuple[str, ...] = (),
        watches_nodes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._draw_token = draw_token
        self._private_sources = private_sources
        self._watches_nodes = watches_nodes
        self._clock = clock
        self._gang_attempts: dict[Key, dict[str, _GangAttempt]] = {}
        self._quota = QuotaBackoff(clock)
        self._shared = SharedObjects(
            client, children, images, peers=peers, watches_nodes=watches_nodes, draw_token=draw_token, clock=clock, draw=draw
        )

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._shared.forget(key)
        self._gang_attempts.pop(key, None)
        self._quota.forget(key)

    async def renew_certificates(self, service: names.Owning, now: str) -> None:
        """Renews the certificates of a service whose spec is invalid. Raises KubeError."""
        await self._shared.renew_certificates(service, now)

    async def execute(self, actions: Sequence[Action], execution: Execution) -> None:
        """Executes the actions in order. Raises the first KubeError."""
        build = GroupBuild(
            revision=execution.revision,
            images=self._images,
            gang=execution.gang,
            private_sources=self._private_sources,
            watches_nodes=self._watches_nodes,
        )
        run = _Run(execution, build, actions)
        if not any(isinstance(action, CreateGroup) for action in actions):
            self._quota.forget(execution.key)  # no longer wanted
        await self._dry_run_successor(run)
        for action in actions:
            if not isinstance(action, GroupAction | SetReplicas):
                await self._execute_other(action, execution)
            elif await self._change_groups(action, run):
                execution.done.append(action)
                _audit(action, execution.service)

    async def _change_groups(self, action: GroupAction | SetReplicas, run: "_Run") -> bool:
        """Returns whether the action changed anything."""
        execution = run.execution
        match action:
            case CreateGroup():
                return await self._create_group(action, run)
            case DrainGroup() | KeepGroup():
                return await self._annotate_drain(action, execution)
            case DeleteGroup():
                return await self._delete_group(action, execution)
            case RestartGroup():
                return await self._restart(action, execution)
            case SetReplicas():
                await self._write_replicas(action.replicas, execution.snapshot, "scale")
                log.info("scaled", extra=_fields(execution.service, "", action.why) | {"groups": str(action.replicas)})
                return True

    async def _execute_other(self, action: Action, execution: Execution) -> None:
        service = execution.service
        match action:
            case InitReplicas():
                await self._write_replicas(action.replicas, execution.snapshot, None)
            case KeepSharedObjects():
                execution.shared_errors.extend(await self._shared.keep(service, execution.snapshot, action, execution.now))
            case KeepRevision():
                await self._shared.keep_revision(service, action.revision)
            case RecordRestarts():
                await self._record_restarts(action, service)
            case KeepGang():
                await self._keep_gang(gangs.gang_of_kind(action.kind), service, action.name, action.uid, action.pods)
            case MarkLeader():
                await self._annotate(
                    PODS, service, action.pod, action.uid, {labels.DRAINING: execution.now if action.draining else None}
                )
            case DeletePod():
                await self._delete_pod(action, service)
            case RetryPods() | RetryRouters():
                await self._retry(action, execution)

    async def recall_revision(self, service: InferenceService, revision: str) -> InferenceService | None:
        """Returns the service with the stored spec of a revision, if there is one."""
        return await self._shared.recall_revision(service, revision)

    def due_in_s(self, key: Key) -> float | None:
        """Returns the seconds until postponed work is due."""
        due_s = (self._shared.due_in_s(key), self._quota.due_in_s(key))
        return min((left_s for left_s in due_s if left_s is not None), default=None)

    def router_error(self, key: Key) -> str:
        """Returns why routers do not run, or are not exposed, as specified."""
        return self._shared.router_error(key)

    def gang_error(self, key: Key) -> str:
        """Returns why a PodGroup could not be created."""
        return next((attempt.error for attempt in self._gang_attempts.get(key, {}).values() if attempt.error), "")

    async def _write_replicas(self, replicas: int, snapshot: Snapshot, subresource: str | None) -> None:
        """Raises Conflict if the service changed since the snapshot."""
        patch = {"metadata": {"resourceVersion": snapshot.resource_version}, "spec": {"replicas": replicas}}
        await self._client.merge(INFERENCE_SERVICES, snapshot.namespace, snapshot.name, patch, subresource=subresource)

    async def _dry_run_successor(self, run: "_Run") -> None:
        """Dry-runs the successor before a group is given up. Raises Rejected.

        Quotas are ignored: the deletion makes room.
        """
        removal = next((action for action in run.actions if isinstance(action, DeleteGroup | DrainGroup)), None)
        created = next((action.name for action in run.actions if isinstance(action, CreateGroup)), "")
        name = created or (removal.successor if isinstance(removal, DrainGroup) else "")
        if removal and name:
            try:
                await self._client.create(STATEFUL_SETS, pods.group(run.execution.service, name, run.build), dry_run=True)
            except Conflict:
                pass  # exists, so the API server accepted it
            except Rejected as error:
                if not is_quota_error(str(error)):
                    raise

    async def _create_group(self, action: CreateGroup, run: "_Run") -> bool:
        service, snapshot, key = run.execution.service, run.execution.snapshot, run.execution.key
        if not self._quota.is_due(snapshot):
            return False
        build = replace(run.build, avoid_nodes=action.avoid_nodes, key=self._draw_token())
        body = pods.group(service, action.name, build)
        try:
            created = await self._client.create(STATEFUL_SETS, body)
        except Conflict:
            if not await self._uid(STATEFUL_SETS, service, action.name):
                raise  # a quota answers so if another object changes it at the same time
            self._quota.forget(key)
            return False  # created before, not observed yet
        except Rejected as error:
            if not (is_quota_error(str(error)) and self._quota.postpone(snapshot, run.actions)):
                raise
            log.info("group creation postponed", extra=_fields(service, action.name, str(error)))
            return False
        self._quota.forget(key)
        pending, uid = self._children.pending_writes(key), created["metadata"]["uid"]
        pending.created[uid] = Creation(read_set(body | created), run.execution.now)
        log.info("group created", extra=_fields(service, action.name, action.why))
        await self._keep_gang(build.gang, service, action.name, uid, service.shape.pods)
        return True

    async def _uid(self, resource: Resource, service: InferenceService, name: str) -> str:
        """Returns the UID of the object with this name, if there is one."""
        try:
            existing = await self._client.get(resource, service.namespace, name, metadata_only=True)
        except Gone:
            return ""
        return str(existing["metadata"]["uid"])

    async def _keep_gang(self, gang: Gang, service: InferenceService, group: str, uid: str, pods: int) -> None:
        """Tries once per `GANG_RETRY_S`. Errors are kept for `gang_error`."""
        key = (service.namespace, service.name)
        attempts = self._gang_attempts.setdefault(key, {})
        if uid in attempts and self._clock() - attempts[uid].at_s < GANG_RETRY_S:
            return
        failure = ""
        for body in gang.objects(service, group, uid, pods):
            try:
                await self._client.create(POD_GROUPS[body["apiVersion"]], body)
            except Conflict:
                pass  # exists
            except KubeError as error:
                failure = f"{body['kind']} {group}: {error}"
                log.warning("gang object not created", extra=_fields(service, group, failure))
        existing = {s.group.uid for s in self._children.sets.of_service(key)} | {uid}
        kept = {other: attempt for other, attempt in attempts.items() if other in existing}
        self._gang_attempts[key] = kept | {uid: _GangAttempt(self._clock(), failure)}

    async def _restart(self, action: RestartGroup, execution: Execution) -> bool:
        service = execution.service
        if not await self._record_restarts(RecordRestarts(action.name, action.uid, action.record), service):
            return False
        for pod, uid in action.pods:
            try:
                await self._client.delete(PODS, service.namespace, pod, uid, grace_s=FINAL_GRACE_S)
            except (Gone, Conflict):
                pass  # a pod of this name is a new one
        log.warning("group restarted", extra=_fields(service, action.name, action.why))
        return True

    async def _record_restarts(self, action: RecordRestarts, service: InferenceService) -> bool:
        annotations = {labels.RESTARTS: format_record(action.record)}
        written = await self._annotate(STATEFUL_SETS, service, action.name, action.uid, annotations)
        if written is None:
            return False
        restarts = self._children.pending_writes((service.namespace, service.name)).restarts
        restarts[action.uid] = Annotation(action.record, read_version(written))
        return True

    async def _annotate_drain(self, action: DrainGroup | KeepGroup, execution: Execution) -> bool:
        service = execution.service
        mark = DrainMark(execution.now, action.why, action.purpose) if isinstance(action, DrainGroup) else None
        annotations = {labels.DRAINING: f"{mark.since} {mark.purpose} {mark.why}" if mark else None}
        written = await self._annotate(STATEFUL_SETS, service, action.name, action.uid, annotations)
        if written is None:
            return False
        self._children.pending_writes(execution.key).drain_marks[action.uid] = Annotation(mark, read_version(written))
        log.info("group drain started" if mark else "group drain cancelled", extra=_fields(service, action.name, action.why))
        return True

    async def _annotate(
        self, resource: Resource, service: InferenceService, name: str, uid: str, annotations: Json
    ) -> Json | None:
        """Returns the new metadata of the object with this UID; null if it is gone. Null removes an annotation."""
        patch = {"metadata": {"uid": uid, "annotations": annotations}}
        try:
            written = await self._client.merge(resource, service.namespace, name, patch)
        except Gone:
            return None
        except Conflict:
            if await self._uid(resource, service, name) == uid:
                raise  # other clients wrote at the same time: it is still there
            return None  # replaced
        metadata: Json = written["metadata"]
        return metadata

    async def _retry(self, action: RetryPods | RetryRouters, execution: Execution) -> None:
        service = execution.service
        if isinstance(action, RetryPods):
            resource, name = STATEFUL_SETS, action.name
        else:
            resource, name = DEPLOYMENTS, names.router(service.name)
        if await self._annotate(resource, service, name, action.uid, {RETRIED_ANNOTATION: execution.now}):
            log.info("pods recreated", extra=_fields(service, name, action.why))

    async def _delete_pod(self, action: DeletePod, service: InferenceService) -> None:
        try:
            await self._client.delete(PODS, service.namespace, action.name, action.uid, grace_s=action.grace_s)
        except (Gone, Conflict):
            return
        fields = {"pod": action.name, "grace_s": str(action.grace_s)}
        log.info("pod deleted", extra=_fields(service, "", action.why) | fields)
        audit("delete", f"pods/{action.name}", f"{service.namespace}/{service.name}", action.why)

    async def _delete_group(self, action: DeleteGroup, execution: Execution) -> bool:
        service, was_deleted = execution.service, True
        try:
            await self._client.delete(STATEFUL_SETS, service.namespace, action.name, action.uid)
        except Gone:
            was_deleted = False  # deleted before
        except Conflict:
            if await self._uid(STATEFUL_SETS, service, action.name) == action.uid:
                raise  # not deleted: it would count as deleted for ever
            was_deleted = False  # replaced
        self._children.pending_writes(execution.key).deleted.add(action.uid)
        if was_deleted:
            log.info("group deleted", extra=_fields(service, action.name, action.why))
        return was_deleted


@dataclass(frozen=True, slots=True)
class _Run:
    execution: Execution
    build: GroupBuild
    actions: Sequence[Action]


_VERBS: Mapping[type[GroupAction | SetReplicas], str] = {
    CreateGroup: "create",
    DrainGroup: "drain",
    KeepGroup: "undrain",
    DeleteGroup: "delete",
    RestartGroup: "restart",
    SetReplicas: "scale",
}


def _audit(action: GroupAction | SetReplicas, service: InferenceService) -> None:
    object = f"replicas/{action.replicas}" if isinstance(action, SetReplicas) else f"groups/{action.name}"
    audit(_VERBS[type(action)], object, f"{service.namespace}/{service.name}", action.why)


def _fields(service: InferenceService, group: str, why: str) -> dict[str, str]:
    return {"service": f"{service.namespace}/{service.name}", "group": group, "why": why}
