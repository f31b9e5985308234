"""Makes what all groups of a service share, and keeps it so: applied at most once in ten minutes while nothing changes and no
Deployment or Service is missing. The token is made once, and never written again.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api.inference_service import InferenceService
from phalanx_api.router import Expose
from phalanx_operator.decide.snapshot import Snapshot
from phalanx_operator.errors import Conflict, Denied, Gone, KubeError, Rejected, Retry
from phalanx_operator.kube import CONFIG_MAPS, SECRETS, Json, KubeClient, resource_of
from phalanx_operator.observe import Children, owner_uid
from phalanx_operator.render import disruption, exposed, former, monitoring, names, network, router, services
from phalanx_operator.render.network import Neighbours
from phalanx_operator.render.objects import Images
from phalanx_operator.store import Key

log = logging.getLogger(__name__)
APPLY_AGAIN_S = 600.0
MONITOR_AGAIN_S = 60.0
EXPOSE_AGAIN_S = 60.0
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Unexposed:
    """An Ingress or HTTPRoute that could not be made: what was wanted, when it is tried again, and why it was not."""

    wanted: Expose
    until_s: float
    why: str


class Shared:
    """Remembers what was applied, so that a quiet service costs no calls."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        neighbours: Neighbours,
        draw_token: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._neighbours = neighbours
        self._draw_token = draw_token
        self._clock = clock
        self._unknown_until: dict[str, float] = {}
        self._unexposed: dict[Key, Unexposed] = {}
        self._applied: dict[Key, dict[tuple[str, str, str], tuple[str, float]]] = {}

    def forget(self, key: Key) -> None:
        """Keep nothing of a service that is gone."""
        self._applied.pop(key, None)
        self._unexposed.pop(key, None)

    async def keep(self, service: InferenceService, snapshot: Snapshot, groups: int, *, is_blind: bool = False) -> None:
        """Makes it all, and undoes it when somebody else scaled the routers; `is_blind`: routers that are there stay as they are.

        Raises: a KubeError at the first call that fails.
        """
        scaled = snapshot.router is not None and snapshot.router.wanted != service.spec.router.replicas
        present = self._children.present((service.namespace, service.name), service.uid)
        await self._keep_token(service)
        for body in network.policies(service, self._neighbours):
            is_wanted = service.spec.network_policy.enabled
            await (self._keep(service, body, is_missing=False) if is_wanted else self._drop(service, body))
        for body in [services.groups_service(service), *router.router_objects(service, self._images)]:
            is_watched = body["kind"] in ("Deployment", "Service")
            is_missing = is_watched and (body["kind"], body["metadata"]["name"]) not in present
            is_door = body["kind"] == "Deployment"
            if not (is_blind and is_door and not is_missing):
                await self._keep(service, body, is_missing or (scaled and is_door))
        budget = disruption.group_budget(service)
        await (self._keep(service, budget, is_missing=False) if groups > 1 else self._drop(service, budget))
        for body in monitoring.objects(service):
            await self._keep_monitor(service, body)
        await self._keep_exposed(service)

    async def keep_revision(self, service: InferenceService, revision: str) -> None:
        """Keeps what this revision is. Raises: a KubeError, but none when the API server refuses it or the name is taken: only
        going back rests on it, and tells that there is no record."""
        body = former.record(service, revision)
        try:
            await self._keep(service, body, is_missing=False)
        except (Rejected, Denied) as error:
            log.warning("revision not kept", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._remember(service, body, _digest(body))

    async def recall(self, service: InferenceService, revision: str) -> InferenceService | None:
        """The service as it was in a former revision; None when that is not kept, or not understood. Raises: a KubeError."""
        try:
            found = await self._client.get(CONFIG_MAPS, service.namespace, names.former(service.name))
            return former.recalled(service, found, revision) if owner_uid(found["metadata"]) == service.uid else None
        except (Gone, ValueError):
            return None

    async def _keep(self, service: InferenceService, body: Json, is_missing: bool) -> None:
        if self._is_due(service, body, _digest(body), is_missing):
            await self._refuse_strangers(service, body)
            await self._client.apply(resource_of(body), body)
            self._remember(service, body, _digest(body))

    async def _keep_monitor(self, service: InferenceService, body: Json) -> None:
        """Makes what Prometheus's operator reads, where the cluster knows it. Without it the service serves all the same, so
        nothing that goes wrong here stops what comes after it."""
        if self._clock() < self._unknown_until.get(body["kind"], 0.0):
            return
        is_wanted = service.spec.monitoring.service_monitor == "Auto"
        try:
            await (self._keep(service, body, is_missing=False) if is_wanted else self._drop(service, body))
        except Gone:
            self._unknown_until[body["kind"]] = self._clock() + APPLY_AGAIN_S
        except (Rejected, Denied) as error:
            log.warning("not monitored", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._remember(service, body, _digest(body) if is_wanted else _ABSENT)
        except KubeError as error:  # mostly its webhook, which is as slow for the next service
            log.warning("not monitored yet", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._unknown_until[body["kind"]] = self._clock() + MONITOR_AGAIN_S

    async def _keep_exposed(self, service: InferenceService) -> None:
        """Makes what brings clients from outside, where the spec asks for it, and takes away what it asks for no more.

        The service serves in the cluster without it, so nothing that goes wrong here stops what comes after it: the status tells.
        """
        key, wanted = (service.namespace, service.name), service.spec.router.expose
        failed = self._unexposed.get(key)
        if failed and failed.wanted == wanted and self._clock() < failed.until_s:
            return
        why = ""
        for body, is_wanted in exposed.objects(service):
            try:
                await (self._keep(service, body, is_missing=False) if is_wanted else self._drop(service, body))
            except KubeError as error:
                if is_wanted:
                    why = (
                        f"the cluster serves no {body['kind']} of {body['apiVersion']}" if isinstance(error, Gone) else str(error)
                    )
                elif isinstance(error, Denied):  # who has no right to it has made none
                    self._remember(service, body, _ABSENT)
                else:
                    log.warning("not taken away", extra={"service": "/".join(key), "kind": body["kind"], "why": str(error)})
        self._unexposed.pop(key, None)
        if why:
            log.warning("not exposed", extra={"service": "/".join(key), "why": why})
            self._unexposed[key] = Unexposed(wanted, self._clock() + EXPOSE_AGAIN_S, why)

    def unexposed(self, key: Key) -> str:
        """Why clients from outside cannot come in as the spec asks; empty when they can, or need not."""
        return self._unexposed[key].why if key in self._unexposed else ""

    async def _drop(self, service: InferenceService, body: Json) -> None:
        """Deletes the object if it is there and ours."""
        if not self._is_due(service, body, _ABSENT, is_missing=False):
            return
        resource, name = resource_of(body), body["metadata"]["name"]
        try:
            there = await self._client.get(resource, service.namespace, name, metadata_only=True)
            if owner_uid(there["metadata"]) == service.uid:
                await self._client.delete(resource, service.namespace, name, there["metadata"]["uid"])
        except (Gone, Conflict):
            pass  # it is not there
        self._remember(service, body, _ABSENT)

    async def _keep_token(self, service: InferenceService) -> None:
        """Makes the token's Secret if there is none."""
        without_token = services.token_secret(service, "")
        if not self._is_due(service, without_token, _digest(without_token), is_missing=False):
            return
        if not await self._refuse_strangers(service, without_token):
            await self._client.create(SECRETS, services.token_secret(service, self._draw_token()))
            log.info("token made", extra={"service": f"{service.namespace}/{service.name}", "why": "the service had none"})
        self._remember(service, without_token, _digest(without_token))

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

    def _is_due(self, service: InferenceService, body: Json, digest: str, is_missing: bool) -> bool:
        key, what = _identity(service, body)
        former, at = self._applied.get(key, {}).get(what, ("", 0.0))
        return is_missing or former != digest or self._clock() - at > APPLY_AGAIN_S

    def _remember(self, service: InferenceService, body: Json, digest: str) -> None:
        key, what = _identity(service, body)
        self._applied.setdefault(key, {})[what] = (digest, self._clock())


def _identity(service: InferenceService, body: Json) -> tuple[Key, tuple[str, str, str]]:
    return (service.namespace, service.name), (service.uid, body["kind"], body["metadata"]["name"])


def _digest(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
