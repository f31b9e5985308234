"""Keeps the objects that all groups of a service share.

equal inputs, nothing due                            nothing is rendered
applied by another process, objects exist            a full pass within `STARTUP_S`
otherwise                                            everything is rendered, differences are applied
"""

import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx_api import labels
from phalanx_api.conditions import find_condition
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_api.spec.router import Expose
from phalanx_operator.apply.certificates import ServiceCertificates
from phalanx_operator.apply.owned import REAPPLY_S, OwnedObjects, check_owner
from phalanx_operator.apply.service_tokens import ServiceTokens, SharedPages
from phalanx_operator.decide.state.actions import KeepSharedObjects
from phalanx_operator.decide.state.snapshot import RouterSchemes, Snapshot, router_schemes
from phalanx_operator.kube.client import CONFIG_MAPS, SECRETS, Denied, Gone, Json, KubeClient, KubeError, Rejected
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.observe import Children, owner_uid
from phalanx_operator.render import monitoring, network, router, services
from phalanx_operator.render import objects as names
from phalanx_operator.render import revision as revisions
from phalanx_operator.render.network import PeerNamespaces
from phalanx_operator.render.objects import Images, Owning

log = logging.getLogger(__name__)
MONITOR_RETRY_S = 60.0
REJECTED_RETRY_S = 60.0
"""Between attempts to create a rejected Ingress or HTTPRoute, or to change routers as rejected."""
PUBLISHED_S = 30.0
"""Time for which the Service keeps unready routers after one is ready again, or none answers: neither may last."""
STARTUP_S = 60.0
"""Longest random delay of a new operator's first pass."""


@dataclass(frozen=True, slots=True)
class ExposureFailure:
    """An Ingress or HTTPRoute that could not be created."""

    expose: Expose
    retry_at_s: float
    error: str


@dataclass(frozen=True, slots=True)
class _RouterFailure:
    """A change of the routers' Deployment that the API server rejects."""

    body: Json
    retry_at_s: float
    error: str


@dataclass(frozen=True, slots=True)
class _Inputs:
    action: KeepSharedObjects
    is_scaled: bool
    """Another client changed `replicas` of the routers."""
    existing: frozenset[tuple[str, str]]
    """Kind and name of watched objects."""
    schemes: RouterSchemes


@dataclass(frozen=True, slots=True)
class _Pass:
    """A complete pass."""

    spec: Spec
    inputs: _Inputs
    until_s: float


@dataclass(frozen=True, slots=True)
class _Postponement:
    """Postponed first pass."""

    until_s: float
    watched: frozenset[tuple[str, str]]
    """Objects that must exist."""


class SharedObjects:
    """Keeps the shared objects of all services."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        images: Images,
        *,
        peers: PeerNamespaces,
        watches_nodes: bool,
        draw_token: Callable[[], str],
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._client = client
        self._children = children
        self._images = images
        self._peers = peers
        self._watches_nodes = watches_nodes
        self._clock = clock
        self._draw = draw
        self._owned = OwnedObjects(client, clock)
        self._shared_pages = SharedPages(client, clock)
        self._certificates = ServiceCertificates(client, clock)
        self._tokens = ServiceTokens(client, clock, draw_token)
        self._monitoring_retry_s: dict[str, float] = {}
        self._exposure_failures: dict[Key, ExposureFailure] = {}
        self._router_failures: dict[Key, _RouterFailure] = {}
        self._passes: dict[Key, _Pass] = {}
        self._published_until_s: dict[Key, float] = {}  # of services whose unready routers are in their Service
        self._postponements: dict[Key, _Postponement] = {}

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._owned.forget(key)
        self._shared_pages.forget(key)
        self._certificates.forget(key)
        self._tokens.forget(key)
        self._exposure_failures.pop(key, None)
        self._router_failures.pop(key, None)
        self._passes.pop(key, None)
        self._postponements.pop(key, None)
        self._published_until_s.pop(key, None)

    async def keep(self, service: InferenceService, snapshot: Snapshot, action: KeepSharedObjects, now: str) -> list[KubeError]:
        """Applies all shared objects. Returns the error that ended it early, if groups start without the objects that are left.

        Raises KubeError without the Secrets of groups, or if the service is new: its groups wait for all objects.
        """
        key, deployment = (service.namespace, service.name), snapshot.router
        is_scaled = deployment is not None and deployment.replicas != service.spec.router.replicas
        schemes = router_schemes(
            snapshot.router_pods,
            wants_https=service.spec.router.tls is not None,
            groups=snapshot.groups,
            wants_internal=service.spec.security.tls == "Internal",
        )
        schemes = replace(schemes, publishes_unready=self._publishes_unready(key, action))
        inputs = _Inputs(action, is_scaled, frozenset(self._children.shared_objects(key, service.uid)), schemes)
        if self._is_postponed(service, snapshot, inputs):
            return []
        former = self._passes.pop(key, None)
        if not (former and former.spec is service.spec and former.inputs == inputs and self._clock() < former.until_s):
            is_new = snapshot.status.observed_generation == 0
            self._owned.set_new(key, is_new=is_new)
            token = ""
            try:
                token = await self._keep_secrets(service, inputs, datetime.datetime.fromisoformat(now), is_new=is_new)
                is_complete = await self._keep_all(service, inputs, token, is_new=is_new)
            except KubeError as error:
                # the last of the watched objects is applied after the network policies
                if self._watched(service) <= inputs.existing and (token or await self._has_secrets(service, inputs)):
                    return [error]
                raise
            former = _Pass(service.spec, inputs, self._due_at_s(key)) if is_complete else None
        if former:
            self._passes[key] = former
        return []

    def _publishes_unready(self, key: Key, action: KeepSharedObjects) -> bool:
        now_s = self._clock()
        if action.publishes_unready:
            self._published_until_s[key] = now_s + PUBLISHED_S
        return now_s < self._published_until_s.get(key, now_s)

    async def renew_certificates(self, service: Owning, now: str) -> None:
        """Renews the certificates of a service whose spec is invalid. Raises KubeError."""
        await self._certificates.renew(service, datetime.datetime.fromisoformat(now))

    def due_in_s(self, key: Key) -> float | None:
        """Returns the seconds until the postponed pass, or until a token or the removal of unready routers is due."""
        due_s = [self._tokens.due_at_s(key)]
        due_s += [self._postponements[key].until_s] if key in self._postponements else []
        due_s += [self._published_until_s[key]] if key in self._published_until_s else []
        return min((at_s - self._clock() for at_s in due_s if at_s > self._clock()), default=None)

    def _is_postponed(self, service: InferenceService, snapshot: Snapshot, inputs: _Inputs) -> bool:
        """Returns whether the first pass may wait: watched objects exist, the status reports this spec without `Stalled`, and
        the Service need not publish unready routers."""
        key = (service.namespace, service.name)
        if key not in self._postponements:
            self._postponements[key] = _Postponement(self._clock() + self._draw() * STARTUP_S, self._watched(service))
        is_observed = snapshot.status.observed_generation == snapshot.generation and not inputs.is_scaled
        is_urgent = inputs.action.publishes_unready or find_condition(snapshot.status.conditions, "Stalled") is not None
        if not is_observed or is_urgent or not self._postponements[key].watched <= inputs.existing:
            self._postponements[key] = _Postponement(0.0, frozenset())
        return self._postponements[key].until_s > self._clock()

    def _watched(self, service: InferenceService) -> frozenset[tuple[str, str]]:
        bodies = [
            services.groups_service(service),
            *router.router_objects(service, self._images, watches_nodes=self._watches_nodes),
        ]
        return frozenset((body["kind"], body["metadata"]["name"]) for body in bodies if body["kind"] in ("Deployment", "Service"))

    async def _keep_secrets(self, service: InferenceService, inputs: _Inputs, now: datetime.datetime, *, is_new: bool) -> str:
        """Returns the token. No group starts without these Secrets."""
        token = await self._tokens.keep(service, now, is_new=is_new)
        if inputs.schemes.is_internal:
            await self._certificates.keep(service, now)
        else:
            self._certificates.forget((service.namespace, service.name))
        return token

    async def _has_secrets(self, service: InferenceService, inputs: _Inputs) -> bool:
        """Returns whether new groups start with the Secrets as they are: they exist, and are the service's."""
        wanted = [names.token_secret(service.name)]
        wanted += [names.role_certificate(service.name, labels.GROUP_ROLE)] if inputs.schemes.is_internal else []
        try:
            for name in wanted:
                stored = await self._client.get(SECRETS, service.namespace, name, metadata_only=True)
                check_owner(service, stored["metadata"], f"Secret {name}")
        except KubeError:
            return False
        return True

    async def _keep_all(self, service: InferenceService, inputs: _Inputs, token: str, *, is_new: bool) -> bool:
        """Returns whether the pass is complete; reverted changes need a confirming one."""
        is_complete = not inputs.is_scaled
        await self._shared_pages.keep(service, token, is_new=is_new)
        for body in network.policies(service, self._peers):
            await self._set(service, body, is_wanted=service.spec.network_policy.enabled)
        for body in [
            services.groups_service(service, is_internal=inputs.schemes.is_internal),
            *router.router_objects(service, self._images, inputs.schemes, watches_nodes=self._watches_nodes),
        ]:
            is_watched = body["kind"] in ("Deployment", "Service")
            is_missing = is_watched and (body["kind"], body["metadata"]["name"]) not in inputs.existing
            is_complete = is_complete and not is_missing
            if body["kind"] == "Deployment" and not is_missing:
                await self._keep_routers(service, body, inputs)
            else:
                await self._owned.keep(service, body, is_missing=is_missing)
        await self._set(service, services.group_budget(service), is_wanted=inputs.action.groups > 1)
        for body in monitoring.objects(service):
            await self._keep_monitoring(service, body)
        return await self._keep_exposure(service, inputs.schemes) and is_complete

    async def _keep_routers(self, service: InferenceService, body: Json, inputs: _Inputs) -> None:
        """Changes existing routers. A rejection stops nothing: the former routers run on, and groups need no new ones."""
        key = (service.namespace, service.name)
        failed = self._router_failures.get(key)
        if failed and failed.body == body and self._clock() < failed.retry_at_s:
            return
        self._router_failures.pop(key, None)
        if inputs.action.keeps_routers:
            return
        try:
            await self._owned.keep(service, body, is_missing=inputs.is_scaled)
        except (Rejected, Denied) as error:
            log.warning("routers not changed", extra={"service": "/".join(key), "why": str(error)})
            self._router_failures[key] = _RouterFailure(body, self._clock() + REJECTED_RETRY_S, str(error))

    async def _set(self, service: InferenceService, body: Json, *, is_wanted: bool) -> None:
        await (self._owned.keep(service, body) if is_wanted else self._owned.delete(service, body))

    def _due_at_s(self, key: Key) -> float:
        retries = [at_s for at_s in self._monitoring_retry_s.values() if at_s > self._clock()]
        retries += [self._exposure_failures[key].retry_at_s] if key in self._exposure_failures else []
        retries += [self._router_failures[key].retry_at_s] if key in self._router_failures else []
        certificates_s = self._certificates.due_at_s(key)
        retries += [certificates_s] if certificates_s is not None else []
        return min([self._owned.due_at_s(key), self._tokens.due_at_s(key), *retries])

    async def keep_revision(self, service: InferenceService, revision: str) -> None:
        """Stores this revision. A rejection is logged."""
        body = revisions.revision_record(service, revision)
        try:
            await self._owned.keep(service, body)
        except (Rejected, Denied) as error:
            log.warning("revision not kept", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._owned.skip(service, body, is_wanted=True)

    async def recall_revision(self, service: InferenceService, revision: str) -> InferenceService | None:
        """Returns the service with the stored spec of a revision, if it is readable."""
        try:
            record = await self._client.get(CONFIG_MAPS, service.namespace, names.revision_record(service.name))
            return revisions.recall(service, record, revision) if owner_uid(record["metadata"]) == service.uid else None
        except (Gone, ValueError):
            return None

    async def _keep_monitoring(self, service: InferenceService, body: Json) -> None:
        """Errors stop nothing."""
        if self._clock() < self._monitoring_retry_s.get(body["kind"], 0.0):
            return
        is_wanted = service.spec.monitoring.service_monitor == "Auto"
        try:
            await self._set(service, body, is_wanted=is_wanted)
        except Gone:
            self._monitoring_retry_s[body["kind"]] = self._clock() + REAPPLY_S
        except (Rejected, Denied) as error:
            log.warning("not monitored", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._owned.skip(service, body, is_wanted=is_wanted)
        except KubeError as error:  # mostly a slow webhook
            log.warning("not monitored yet", extra={"service": f"{service.namespace}/{service.name}", "why": str(error)})
            self._monitoring_retry_s[body["kind"]] = self._clock() + MONITOR_RETRY_S

    async def _keep_exposure(self, service: InferenceService, schemes: RouterSchemes) -> bool:
        """Returns whether nothing is left to do. Errors stop nothing."""
        key, expose = (service.namespace, service.name), service.spec.router.expose
        failed = self._exposure_failures.get(key)
        if failed and failed.expose == expose and self._clock() < failed.retry_at_s:
            return True
        failure, is_complete = "", True
        for body, is_wanted in network.exposures(service, schemes):
            kind = body["kind"]
            try:
                await self._set(service, body, is_wanted=is_wanted)
            except KubeError as error:
                if is_wanted:
                    failure = f"the cluster serves no {kind} of {body['apiVersion']}" if isinstance(error, Gone) else str(error)
                elif isinstance(error, Denied):  # so the operator did not create it
                    self._owned.skip(service, body, is_wanted=False)
                else:
                    is_complete = False
                    log.warning("not deleted", extra={"service": "/".join(key), "kind": kind, "why": str(error)})
        self._exposure_failures.pop(key, None)
        if failure:
            log.warning("not exposed", extra={"service": "/".join(key), "why": failure})
            self._exposure_failures[key] = ExposureFailure(expose, self._clock() + REJECTED_RETRY_S, failure)
        return is_complete

    def router_error(self, key: Key) -> str:
        """Returns the fields and errors with which routers do not run, or are not exposed, as specified."""
        errors = [f"spec.router: {self._router_failures[key].error}"] if key in self._router_failures else []
        errors += [f"spec.router.expose: {self._exposure_failures[key].error}"] if key in self._exposure_failures else []
        return "; ".join(errors)
