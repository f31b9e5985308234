"""Carries out the actions of a plan. Each may be repeated without harm.

Groups and the token are created, never applied: what exists stays as it was made, whatever this version would render. The
router, the Services and the rights are applied, at most once in ten minutes while nothing changes and no Deployment or
Service is missing.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence

from phalanx_api.inference_service import InferenceService
from phalanx_operator.decide.actions import Action, CreateGroup, DeleteGroup, InitReplicas, KeepChildren
from phalanx_operator.decide.snapshot import Snapshot
from phalanx_operator.errors import Conflict, Gone, Rejected, Retry
from phalanx_operator.kube import SECRETS, SERVICES_OF_OURS, STATEFUL_SETS, Json, KubeClient, resource_of
from phalanx_operator.observe import Children, owner_uid
from phalanx_operator.render import pods, router, services
from phalanx_operator.render.objects import Images
from phalanx_operator.store import Key

log = logging.getLogger(__name__)
APPLY_AGAIN_S = 600.0


class Hands:
    """What acts on the cluster for one operator. Remembers what it applied, so that a quiet service costs no calls."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        draw_token: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._draw_token = draw_token
        self._clock = clock
        self._applied: dict[Key, dict[tuple[str, str, str], tuple[str, float]]] = {}

    def forget(self, key: Key) -> None:
        """Keep nothing of a service that is gone."""
        self._applied.pop(key, None)
        self._children.doomed.pop(key, None)

    async def carry_out(
        self, actions: Sequence[Action], service: InferenceService, snapshot: Snapshot, revision: str
    ) -> list[CreateGroup | DeleteGroup]:
        """The group actions that changed something. Raises: a KubeError at the first that fails; the rest is left for later."""
        done: list[CreateGroup | DeleteGroup] = []
        await self._try_successor(actions, service, revision)
        for action in actions:
            match action:
                case InitReplicas():
                    await self._init_replicas(action, snapshot)
                case KeepChildren():
                    await self._keep_children(service, snapshot)
                case CreateGroup() if await self._create_group(action, service, revision):
                    done.append(action)
                case DeleteGroup() if await self._delete_group(action, service):
                    done.append(action)
        return done

    async def _init_replicas(self, action: InitReplicas, snapshot: Snapshot) -> None:
        """Writes `spec.replicas`, unless somebody wrote anything meanwhile (Conflict)."""
        patch = {"metadata": {"resourceVersion": snapshot.resource_version}, "spec": {"replicas": action.replicas}}
        await self._client.merge(SERVICES_OF_OURS, snapshot.namespace, snapshot.name, patch)

    async def _try_successor(self, actions: Sequence[Action], service: InferenceService, revision: str) -> None:
        """Asks the API server whether it would take the successor of a group, before that group is given up. Raises: Rejected."""
        successor = next((action for action in actions if isinstance(action, CreateGroup)), None)
        if successor and any(isinstance(action, DeleteGroup) for action in actions):
            body = pods.group(service, successor.name, revision, self._images)
            try:
                await self._client.create(STATEFUL_SETS, body, dry_run=True)
            except Conflict:
                pass  # it is there already, so it was taken

    async def _create_group(self, action: CreateGroup, service: InferenceService, revision: str) -> bool:
        body = pods.group(service, action.name, revision, self._images)
        try:
            await self._client.create(STATEFUL_SETS, body)
        except Conflict:
            return False  # made before, and the informer has not told yet
        log.info("group created", extra=_fields(service, action.name, action.why))
        return True

    async def _delete_group(self, action: DeleteGroup, service: InferenceService) -> bool:
        key = (service.namespace, service.name)
        try:
            await self._client.delete(STATEFUL_SETS, service.namespace, action.name, action.uid)
        except (Gone, Conflict):
            self._children.doom(key, action.uid)  # gone before, or another one by now: this one is no more
            return False
        self._children.doom(key, action.uid)
        log.info("group deleted", extra=_fields(service, action.name, action.why))
        return True

    async def _keep_children(self, service: InferenceService, snapshot: Snapshot) -> None:
        """Makes what all groups share, and undoes it when somebody else scaled the routers."""
        scaled = snapshot.router is not None and snapshot.router.wanted != service.spec.router.replicas
        present = self._children.present((service.namespace, service.name), service.uid)
        shared = [services.groups_service(service), *router.router_objects(service, self._images)]
        await self._keep_token(service)
        for body in shared:
            is_watched = body["kind"] in ("Deployment", "Service")
            is_missing = is_watched and (body["kind"], body["metadata"]["name"]) not in present
            if self._is_due(service, body, is_missing or (scaled and body["kind"] == "Deployment")):
                await self._refuse_strangers(service, body)
                await self._client.apply(resource_of(body), body)
                self._remember(service, body)

    async def _keep_token(self, service: InferenceService) -> None:
        """Makes the token's Secret if there is none. It is never read."""
        without_token = services.token_secret(service, "")
        if not self._is_due(service, without_token, is_missing=False):
            return
        if not await self._refuse_strangers(service, without_token):
            await self._client.create(SECRETS, services.token_secret(service, self._draw_token()))
            log.info("token made", extra=_fields(service, "", "the service had none"))
        self._remember(service, without_token)

    async def _refuse_strangers(self, service: InferenceService, body: Json) -> bool:
        """Whether the object is there and ours.

        Raises: Retry while it is one of a former service of this name, which is still being cleared away; Rejected when it is
        somebody else's.
        """
        metadata = body["metadata"]
        try:
            there = await self._client.get(resource_of(body), service.namespace, metadata["name"], metadata_only=True)
        except Gone:
            return False
        owner = owner_uid(there["metadata"])
        if owner == service.uid and "deletionTimestamp" not in there["metadata"]:
            return True
        what = f"{body['kind']} {metadata['name']}"
        mine = any(o.get("name") == service.name for o in there["metadata"].get("ownerReferences") or [])
        if mine:
            raise Retry(f"{what} of a former service of this name is still being deleted")
        raise Rejected(f"metadata.name: {what} exists and is not the operator's; delete it or take another name")

    def _is_due(self, service: InferenceService, body: Json, is_missing: bool) -> bool:
        key, what = _identity(service, body)
        digest, at = self._applied.get(key, {}).get(what, ("", 0.0))
        return is_missing or digest != _digest(body) or self._clock() - at > APPLY_AGAIN_S

    def _remember(self, service: InferenceService, body: Json) -> None:
        key, what = _identity(service, body)
        self._applied.setdefault(key, {})[what] = (_digest(body), self._clock())


def _identity(service: InferenceService, body: Json) -> tuple[Key, tuple[str, str, str]]:
    return (service.namespace, service.name), (service.uid, body["kind"], body["metadata"]["name"])


def _digest(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fields(service: InferenceService, group: str, why: str) -> dict[str, str]:
    return {"service": f"{service.namespace}/{service.name}", "group": group, "why": why}
