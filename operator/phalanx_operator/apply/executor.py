"""Executes the actions of a plan. Each action is idempotent.

Groups are created, annotated and deleted; the StatefulSet of an existing group is never rendered again. `shared_objects` keeps
the objects that all groups of a service use.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.apply.shared_objects import Shared
from phalanx_operator.decide.groups.drain import LAST_S
from phalanx_operator.decide.groups.recovery import RETRIED, written
from phalanx_operator.decide.state.actions import (
    Action,
    CreateGroup,
    DeleteGroup,
    DeletePod,
    DrainGroup,
    GroupAction,
    InitReplicas,
    KeepChildren,
    KeepGang,
    KeepGroup,
    KeepRevision,
    MarkLeader,
    NoteRestarts,
    RestartGroup,
    RetryPods,
    RetryRouters,
    SetReplicas,
)
from phalanx_operator.decide.state.snapshot import DrainMark, Snapshot
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    PODS,
    SERVICES_OF_OURS,
    STATEFUL_SETS,
    Conflict,
    Gone,
    KubeClient,
    KubeError,
    Rejected,
)
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.api_discovery import POD_GROUPS
from phalanx_operator.observe.observe import Children
from phalanx_operator.render import gangs, pods
from phalanx_operator.render import objects as names
from phalanx_operator.render.gangs import Gang
from phalanx_operator.render.network import Neighbours
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild

log = logging.getLogger(__name__)
GANG_AGAIN_S = 60.0


class ActionExecutor:
    """Executes actions on the cluster for one operator."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        draw_token: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        neighbours: Neighbours | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._draw_key = draw_token
        self._clock = clock
        self._gangs: dict[Key, dict[str, tuple[float, str]]] = {}
        self._shared = Shared(
            client, children, images=images, neighbours=neighbours or Neighbours(), draw_token=draw_token, clock=clock, draw=draw
        )

    def forget(self, key: Key) -> None:
        """Drops all state of a deleted service."""
        self._shared.forget(key)
        self._children.doomed.pop(key, None)
        self._children.notes.pop(key, None)
        self._children.counts.pop(key, None)
        self._children.short.pop(key, None)
        self._gangs.pop(key, None)

    async def carry_out(
        self,
        actions: Sequence[Action],
        service: InferenceService,
        snapshot: Snapshot,
        revision: str,
        gang: Gang,
        now: str,
        done: list[GroupAction | SetReplicas],
    ) -> None:
        """Appends to `done` each action that changed groups or their number. New groups have `revision` and are placed by `gang`.

        Raises KubeError at the first call that fails; the other actions stay undone.
        """
        making = GroupBuild(revision=revision, images=self._images, gang=gang)
        await self._try_successor(actions, service, making)
        is_going = any(group.terminating for group in snapshot.groups) or any(isinstance(one, DeleteGroup) for one in actions)
        for action in actions:
            match action:
                case InitReplicas():
                    await self._write_replicas(action.replicas, snapshot, None)
                case SetReplicas():
                    await self._write_replicas(action.replicas, snapshot, "scale")
                    done.append(action)
                    log.info("scaled", extra=_fields(service, "", action.why) | {"groups": str(action.replicas)})
                case KeepChildren():
                    await self._shared.keep(service, snapshot, action.groups, is_blind=action.is_blind)
                case KeepRevision():
                    await self._shared.keep_revision(service, action.revision)
                case CreateGroup() if await self._create_group(action, service, replace(making, avoid=action.avoid), is_going):
                    done.append(action)
                case DrainGroup() | KeepGroup() if await self._note(action, service, now):
                    done.append(action)
                case DeleteGroup() if await self._delete_group(action, service):
                    done.append(action)
                case RestartGroup():
                    await self._restart(action, service)
                    done.append(action)
                case NoteRestarts():
                    await self._note_restarts(action, service)
                case KeepGang():
                    await self._keep_gang(gangs.of_kind(action.kind), service, action.name, action.uid, action.pods)
                case MarkLeader():
                    await self._mark(action, service, now)
                case DeletePod():
                    await self._end_pod(action, service)
                case RetryPods() | RetryRouters():
                    await self._retry(action, service, now)

    async def recall(self, service: InferenceService, revision: str) -> InferenceService | None:
        """Returns the service with the spec of an earlier revision; None if there is no record. Raises KubeError."""
        return await self._shared.recall(service, revision)

    async def _write_replicas(self, replicas: int, snapshot: Snapshot, subresource: str | None) -> None:
        """Writes `spec.replicas`. Raises Conflict if the object changed since the snapshot."""
        patch = {"metadata": {"resourceVersion": snapshot.resource_version}, "spec": {"replicas": replicas}}
        await self._client.merge(SERVICES_OF_OURS, snapshot.namespace, snapshot.name, patch, subresource=subresource)

    async def _try_successor(self, actions: Sequence[Action], service: InferenceService, making: GroupBuild) -> None:
        """Dry-runs the successor of a group before the group is deleted for it. Raises Rejected.

        A quota that counts StatefulSets is ignored: the deletion makes room.
        """
        given_up = next((action for action in actions if isinstance(action, DeleteGroup | DrainGroup)), None)
        created = next((action.name for action in actions if isinstance(action, CreateGroup)), "")
        name = created or (given_up.successor if isinstance(given_up, DrainGroup) else "")
        if given_up and name:
            body = pods.group(service, name, making)
            try:
                await self._client.create(STATEFUL_SETS, body, dry_run=True)
            except Conflict:
                pass  # exists, so the API server accepted it
            except Rejected as error:
                if "exceeded quota" not in str(error):
                    raise

    async def _create_group(self, action: CreateGroup, service: InferenceService, making: GroupBuild, is_going: bool) -> bool:
        """Returns whether the group was created now. `is_going`: another group of the service is being deleted and may block
        it."""
        body = pods.group(service, action.name, replace(making, key=self._draw_key()))
        try:
            made = await self._client.create(STATEFUL_SETS, body)
        except Conflict:
            return False  # created before; the informer has not received it yet
        except Rejected as error:
            if not (is_going and "exceeded quota" in str(error)):
                raise
            log.info("group creation postponed", extra=_fields(service, action.name, str(error)))
            return False
        log.info("group created", extra=_fields(service, action.name, action.why))
        await self._keep_gang(making.gang, service, action.name, made["metadata"]["uid"], service.shape.pods)
        return True

    def left_s(self, key: Key) -> float | None:
        """Returns the seconds until postponed work on shared objects is due; None if nothing is postponed."""
        return self._shared.left_s(key)

    def unexposed(self, key: Key) -> str:
        """Returns why the routers are not exposed as the spec asks; empty if they are or need not be."""
        return self._shared.unexposed(key)

    def ungated(self, key: Key) -> str:
        """Returns why the last attempt to create a group's PodGroup failed; empty if it succeeded."""
        return next((why for _, why in self._gangs.get(key, {}).values() if why), "")

    async def _keep_gang(self, gang: Gang, service: InferenceService, group: str, uid: str, pods: int) -> None:
        """Creates the object that makes a scheduler place a group's pods together, at most once per minute.

        A rejection is remembered and reported; the group waits, and all other work continues.
        """
        tried = self._gangs.setdefault((service.namespace, service.name), {})
        if uid in tried and self._clock() - tried[uid][0] < GANG_AGAIN_S:
            return
        why = ""
        for body in gang.objects(service, group, uid, pods):
            try:
                await self._client.create(POD_GROUPS[body["apiVersion"]], body)
            except Conflict:
                pass  # exists
            except KubeError as error:
                why = f"{body['kind']} {group}: {error}"
                log.warning("gang object not created", extra=_fields(service, group, why))
        tried[uid] = (self._clock(), why)
        known = {there.group.uid for there in self._children.sets.of((service.namespace, service.name))}
        for gone in [one for one in tried if one not in known and one != uid]:
            del tried[gone]

    async def _restart(self, action: RestartGroup, service: InferenceService) -> None:
        """Deletes the pods after the restart is recorded on the group."""
        noted = await self._note_restarts(NoteRestarts(action.name, action.uid, action.note), service)
        if not noted:
            return
        for pod, uid in action.pods:
            try:
                await self._client.delete(PODS, service.namespace, pod, uid, grace_s=LAST_S)
            except (Gone, Conflict):
                pass  # deleted before: a pod of this name now is a new one
        log.warning("group restarted", extra=_fields(service, action.name, action.why))

    async def _note_restarts(self, action: NoteRestarts, service: InferenceService) -> bool:
        """Returns whether the group still exists and carries the annotation."""
        patch = {"metadata": {"uid": action.uid, "annotations": {labels.RESTARTS: written(action.note)}}}
        try:
            await self._client.merge(STATEFUL_SETS, service.namespace, action.name, patch)
        except (Gone, Conflict):
            return False
        self._children.restarted((service.namespace, service.name), action.uid, action.note)
        return True

    async def _note(self, action: DrainGroup | KeepGroup, service: InferenceService, now: str) -> bool:
        """Sets or removes the drain annotation of a group, and remembers it until the informer reports it."""
        draining = DrainMark(now, action.why, action.purpose) if isinstance(action, DrainGroup) else None
        note = f"{draining.since} {draining.purpose} {draining.why}" if draining else None
        patch = {"metadata": {"uid": action.uid, "annotations": {labels.DRAINING: note}}}
        try:
            await self._client.merge(STATEFUL_SETS, service.namespace, action.name, patch)
        except (Gone, Conflict):
            return False  # deleted, or replaced by another object of this name
        self._children.note((service.namespace, service.name), action.uid, draining)
        log.info("group drain started" if draining else "group drain cancelled", extra=_fields(service, action.name, action.why))
        return True

    async def _mark(self, action: MarkLeader, service: InferenceService, now: str) -> None:
        patch = {"metadata": {"uid": action.uid, "annotations": {labels.DRAINING: now if action.draining else None}}}
        try:
            await self._client.merge(PODS, service.namespace, action.pod, patch)
        except (Gone, Conflict):
            pass  # its successor is labelled when it appears

    async def _retry(self, action: RetryPods | RetryRouters, service: InferenceService, now: str) -> None:
        kind, name = (STATEFUL_SETS, action.name) if isinstance(action, RetryPods) else (DEPLOYMENTS, names.router(service.name))
        patch = {"metadata": {"uid": action.uid, "annotations": {RETRIED: now}}}
        try:
            await self._client.merge(kind, service.namespace, name, patch)
        except (Gone, Conflict):
            return  # deleted, or replaced by another object of this name
        log.info("pods recreated", extra=_fields(service, name, action.why))

    async def _end_pod(self, action: DeletePod, service: InferenceService) -> None:
        try:
            await self._client.delete(PODS, service.namespace, action.name, action.uid, grace_s=action.grace_s)
        except (Gone, Conflict):
            return
        fields = {"pod": action.name, "grace_s": str(action.grace_s)}
        log.info("pod deleted", extra=_fields(service, "", action.why) | fields)

    async def _delete_group(self, action: DeleteGroup, service: InferenceService) -> bool:
        key = (service.namespace, service.name)
        try:
            await self._client.delete(STATEFUL_SETS, service.namespace, action.name, action.uid)
        except (Gone, Conflict):
            self._children.doom(key, action.uid)  # deleted before, or replaced: this object no longer exists
            return False
        self._children.doom(key, action.uid)
        log.info("group deleted", extra=_fields(service, action.name, action.why))
        return True


def _fields(service: InferenceService, group: str, why: str) -> dict[str, str]:
    return {"service": f"{service.namespace}/{service.name}", "group": group, "why": why}
