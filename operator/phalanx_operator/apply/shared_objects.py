"""Creates and keeps the objects that all groups of a service share; `owned` limits calls. The token is created once.

    spec and inputs unchanged since the last complete pass, nothing due  ->  nothing is rendered
    another operator process kept this spec, and its objects exist       ->  a full pass within about START_S
    otherwise                                                            ->  everything is rendered, differences are applied

The second line postpones work after a restart or an upgrade of the operator: groups come first, shared objects rarely changed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api.conditions import find_condition
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_api.spec.router import Expose
from phalanx_operator.apply.owned import APPLY_AGAIN_S, Owned
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.kube.client import CONFIG_MAPS, Denied, Gone, Json, KubeClient, KubeError, Rejected
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.observe import Children, owner_uid
from phalanx_operator.render import monitoring, network, router, services
from phalanx_operator.render import network as exposed
from phalanx_operator.render import objects as names
from phalanx_operator.render import revision as former
from phalanx_operator.render import services as disruption
from phalanx_operator.render.network import Neighbours
from phalanx_operator.render.objects import Images

log = logging.getLogger(__name__)
MONITOR_AGAIN_S = 60.0
EXPOSE_AGAIN_S = 60.0
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Unexposed:
    """An Ingress or HTTPRoute that could not be created."""

    wanted: Expose
    until_s: float
    """Time of the next attempt."""
    why: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """All inputs of `keep` except the spec."""

    groups: int
    is_blind: bool
    is_scaled: bool
    present: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A complete pass over this spec object: nothing is due before `until_s`."""

    spec: Spec
    wanted: _Wanted
    until_s: float


@dataclass(frozen=True, slots=True)
class _Begin:
    """Postponed work on a service whose objects another process created."""

    until_s: float
    watched: frozenset[tuple[str, str]]
    """Kind and name of the objects that an informer watches."""


class Shared:
    """Keeps the shared objects of all services of one operator."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        neighbours: Neighbours,
        draw_token: Callable[[], str],
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._neighbours = neighbours
        self._draw_token = draw_token
        self._clock = clock
        self._owned = Owned(client, clock)
        self._unknown_until: dict[str, float] = {}
        self._unexposed: dict[Key, Unexposed] = {}
        self._kept: dict[Key, _Kept] = {}
        self._draw = draw
        self._begins: dict[Key, _Begin] = {}

    def forget(self, key: Key) -> None:
        """Drops all state of a deleted service."""
        self._owned.forget(key)
        self._unexposed.pop(key, None)
        self._kept.pop(key, None)
        self._begins.pop(key, None)

    async def keep(self, service: InferenceService, snapshot: Snapshot, groups: int, *, is_blind: bool = False) -> None:
        """Applies all shared objects, and reverts foreign changes of the router count. `is_blind`: existing routers are left
        alone.

        Raises KubeError at the first call that fails.
        """
        key, door = (service.namespace, service.name), snapshot.router
        is_scaled = door is not None and door.wanted != service.spec.router.replicas
        wanted = _Wanted(groups, is_blind, is_scaled, frozenset(self._children.present(key, service.uid)))
        if self._waits(service, snapshot, wanted):
            return
        kept = self._kept.pop(key, None)
        if not (kept and kept.spec is service.spec and kept.wanted == wanted and self._clock() < kept.until_s):
            self._owned.expect(key, is_new=snapshot.status.observed_generation == 0)
            is_whole = await self._keep_all(service, wanted)
            kept = _Kept(service.spec, wanted, self._due_s(key)) if is_whole else None
        if kept:
            self._kept[key] = kept

    def left_s(self, key: Key) -> float | None:
        """Returns the seconds until postponed work is due; None if nothing is postponed."""
        left_s = self._begins[key].until_s - self._clock() if key in self._begins else 0.0
        return left_s if left_s > 0 else None

    def _waits(self, service: InferenceService, snapshot: Snapshot, wanted: _Wanted) -> bool:
        """Returns whether work may be postponed: all watched objects exist, and the status reports this spec as observed."""
        key = (service.namespace, service.name)
        if key not in self._begins:
            self._begins[key] = _Begin(self._clock() + self._draw() * START_S, self._watched(service))
        is_followed = snapshot.status.observed_generation == snapshot.generation and not wanted.is_scaled
        is_stalled = find_condition(snapshot.status.conditions, "Stalled") is not None
        if not is_followed or is_stalled or not self._begins[key].watched <= wanted.present:
            self._begins[key] = _Begin(0.0, frozenset())
        return self.left_s(key) is not None

    def _watched(self, service: InferenceService) -> frozenset[tuple[str, str]]:
        """Returns the objects that serving needs and whose deletion an informer reports."""
        bodies = [services.groups_service(service), *router.router_objects(service, self._images)]
        return frozenset((body["kind"], body["metadata"]["name"]) for body in bodies if body["kind"] in ("Deployment", "Service"))

    async def _keep_all(self, service: InferenceService, wanted: _Wanted) -> bool:
        """Returns whether the pass is complete; a reverted foreign change needs another pass that confirms it."""
        is_whole = not wanted.is_scaled
        await self._keep_token(service)
        for body in network.policies(service, self._neighbours):
            is_wanted = service.spec.network_policy.enabled
            await (self._owned.keep(service, body) if is_wanted else self._owned.drop(service, body))
        for body in [services.groups_service(service), *router.router_objects(service, self._images)]:
            is_watched = body["kind"] in ("Deployment", "Service")
            is_missing = is_watched and (body["kind"], body["metadata"]["name"]) not in wanted.present
            is_door = body["kind"] == "Deployment"
            is_whole = is_whole and not is_missing
            if not (wanted.is_blind and is_door and not is_missing):
                await self._owned.keep(service, body, is_missing=is_missing or (wanted.is_scaled and is_door))
        budget = disruption.group_budget(service)
        await (self._owned.keep(service, budget) if wanted.groups > 1 else self._owned.drop(service, budget))
        for body in monitoring.objects(service):
            await self._keep_monitor(service, body)
        return await self._keep_exposed(service) and is_whole

    def _due_s(self, key: Key) -> float:
        """Returns the time until which nothing is due if all inputs stay equal."""
        waiting = [at_s for at_s in self._unknown_until.values() if at_s > self._clock()]
        waiting += [self._unexposed[key].until_s] if key in self._unexposed else []
        return min([self._owned.due_s(key), *waiting])

    async def keep_revision(self, service: InferenceService, revision: str) -> None:
        """Stores the spec of this revision for a rollback. Raises KubeError, except when the API server rejects the record or its
        name is taken: a rollback then reports that there is no record."""
        body = former.record(service, revision)
        try:
            await self._owned.keep(service, body)
        except (Rejected, Denied) as error:
            log.warning("revision not kept", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._owned.leave(service, body, is_wanted=True)

    async def recall(self, service: InferenceService, revision: str) -> InferenceService | None:
        """Returns the service with the spec of an earlier revision; None if it is not stored or not readable. Raises
        KubeError."""
        try:
            found = await self._client.get(CONFIG_MAPS, service.namespace, names.former(service.name))
            return former.recalled(service, found, revision) if owner_uid(found["metadata"]) == service.uid else None
        except (Gone, ValueError):
            return None

    async def _keep_monitor(self, service: InferenceService, body: Json) -> None:
        """Makes what Prometheus's operator reads, where the cluster knows it. Without it the service serves all the same, so
        nothing that goes wrong here stops what comes after it."""
        if self._clock() < self._unknown_until.get(body["kind"], 0.0):
            return
        is_wanted = service.spec.monitoring.service_monitor == "Auto"
        try:
            await (self._owned.keep(service, body) if is_wanted else self._owned.drop(service, body))
        except Gone:
            self._unknown_until[body["kind"]] = self._clock() + APPLY_AGAIN_S
        except (Rejected, Denied) as error:
            log.warning("not monitored", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._owned.leave(service, body, is_wanted=is_wanted)
        except KubeError as error:  # mostly the webhook of the monitoring operator, which is slow for every service
            log.warning("not monitored yet", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._unknown_until[body["kind"]] = self._clock() + MONITOR_AGAIN_S

    async def _keep_exposed(self, service: InferenceService) -> bool:
        """Applies the Ingress or HTTPRoute that the spec asks for and deletes the others. Returns whether nothing is left to do.

        Failures are reported in the status and stop nothing: the service serves inside the cluster without it.
        """
        key, wanted = (service.namespace, service.name), service.spec.router.expose
        failed = self._unexposed.get(key)
        if failed and failed.wanted == wanted and self._clock() < failed.until_s:
            return True
        why, is_whole = "", True
        for body, is_wanted in exposed.objects(service):
            try:
                await (self._owned.keep(service, body) if is_wanted else self._owned.drop(service, body))
            except KubeError as error:
                if is_wanted:
                    why = (
                        f"the cluster serves no {body['kind']} of {body['apiVersion']}" if isinstance(error, Gone) else str(error)
                    )
                elif isinstance(error, Denied):  # who has no right to it has made none
                    self._owned.leave(service, body, is_wanted=False)
                else:
                    is_whole = False
                    log.warning("not deleted", extra={"service": "/".join(key), "kind": body["kind"], "why": str(error)})
        self._unexposed.pop(key, None)
        if why:
            log.warning("not exposed", extra={"service": "/".join(key), "why": why})
            self._unexposed[key] = Unexposed(wanted, self._clock() + EXPOSE_AGAIN_S, why)
        return is_whole

    def unexposed(self, key: Key) -> str:
        """Returns why the routers are not exposed as the spec asks; empty if they are or need not be."""
        return self._unexposed[key].why if key in self._unexposed else ""

    async def _keep_token(self, service: InferenceService) -> None:
        """Creates the token's Secret if it does not exist."""
        without_token = services.token_secret(service, "")
        if await self._owned.make_once(service, without_token, lambda: services.token_secret(service, self._draw_token())):
            log.info("token created", extra={"service": f"{service.namespace}/{service.name}", "why": "the service had no token"})
