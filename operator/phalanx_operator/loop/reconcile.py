"""Reconciles one service: observe, decide, execute, report."""

import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from phalanx_api import labels
from phalanx_api.conditions import Reason
from phalanx_api.explain.explain import explain
from phalanx_api.spec.inference_service import FieldError, InferenceService, Spec
from phalanx_api.status import Status
from phalanx_api.summary import RouterSummary
from phalanx_operator.apply.executor import ActionExecutor, Execution
from phalanx_operator.apply.shared_objects import REJECTED_RETRY_S
from phalanx_operator.decide import plan
from phalanx_operator.decide.conditions import status as decide_status
from phalanx_operator.decide.conditions import traffic
from phalanx_operator.decide.groups import rollback
from phalanx_operator.decide.groups.drain import groups_to_evacuate, groups_without_successor, is_awaited
from phalanx_operator.decide.groups.lost_nodes import is_leaving, is_on_silent_node
from phalanx_operator.decide.groups.rollback import EffectiveService
from phalanx_operator.decide.plan import RESYNC_S, PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import DeleteGroup, Plan
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import DesiredGroups
from phalanx_operator.decide.state.policy import PolicyInputs, PublishedPolicy
from phalanx_operator.decide.state.snapshot import ObservedPod, Snapshot, parse_time, replace_fields
from phalanx_operator.kube.client import Denied, Gone, KubeClient, KubeError, Rejected
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import Placement, PlacementGate
from phalanx_operator.loop.reporting import StatusReporter
from phalanx_operator.observe.certificate import RouterCertificates
from phalanx_operator.observe.observe import Children, take_snapshot
from phalanx_operator.observe.pod_failure import PodRejections
from phalanx_operator.observe.service_cache import ManifestCache, ServiceCache
from phalanx_operator.render import objects as names
from phalanx_operator.routers import Routers, RouterTarget, address_of

REPORT_FAILURE_S = 10.0
"""Time for which reconciles fail before the status reports it. Most failures are conflicts or a busy API server."""
AGAIN_S = 0.05
"""Time until a reconcile that continues this one. Not 0, which would repeat without a pause if the write has no effect."""


def rfc3339_now() -> str:
    """Returns the time in RFC 3339."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Clocks:
    """The API server's time, and a monotonic clock in seconds."""

    now: Callable[[], str] = rfc3339_now
    monotonic: Callable[[], float] = time.monotonic
    step_reason: Callable[[], str] = str
    """Why times of objects are not comparable with `now`; empty if they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that a reconcile observes."""

    children: Children
    rejections: PodRejections
    routers: Routers
    certificates: RouterCertificates
    services: ServiceCache = field(default_factory=ServiceCache)
    manifests: ManifestCache = field(default_factory=ManifestCache)

    def forget(self, key: Key) -> None:
        """Drops what belongs to a deleted service, without the cached body, which may be that of the next one."""
        self.children.forget(key)
        self.rejections.forget(key)
        self.routers.forget(key)
        self.certificates.forget(key)
        self.manifests.forget(key)


@dataclass(slots=True)
class ServiceState:
    """State of a service between reconciles."""

    uid: str
    autoscaler: AutoscalerState = field(default_factory=AutoscalerState)
    policy: PublishedPolicy = field(default_factory=PublishedPolicy)
    status: Status = field(default_factory=Status)
    """The latest one that was reported."""
    failing_since_s: float | None = None
    """Since when each reconcile fails, other than by a rejection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """Decision about a valid service."""

    service: InferenceService
    inputs: PlanInputs
    placement: Placement
    desired: DesiredGroups
    plan: Plan
    autoscaler: AutoscalerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Reconciles services with their specs."""

    client: KubeClient
    sources: Sources
    placement: PlacementGate
    executor: ActionExecutor
    reporter: StatusReporter
    clocks: Clocks = Clocks()
    states: dict[Key, ServiceState] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """Returns the seconds until the next reconcile of an existing service. Raises KubeError."""
        try:
            return await self._reconcile(key)
        except KubeError:
            self.sources.services.expire(key)
            raise

    async def _reconcile(self, key: Key) -> float | None:
        try:
            body = await self.sources.services.get(self.client, key)
        except Gone:
            self.sources.services.forget(key)
            self._forget(key)
            return None
        if key in self.states and self.states[key].uid != body["metadata"]["uid"]:  # deleted and created again since
            self._forget(key)
        if "deletionTimestamp" in body["metadata"]:
            self.placement.forget(key)
            return RESYNC_S  # garbage collection deletes its objects
        now = self.clocks.now()
        self.sources.children.prune(key, now)
        self.sources.children.track(key, now)
        snapshot = replace(take_snapshot(body, self.sources.children), clock_reason=self.clocks.step_reason())
        service = self.sources.manifests.parse(body)
        if isinstance(service, list):
            self.placement.forget(key)
            status = decide_status.rejected_status(snapshot, Reason.SPEC_INVALID, service, now)
            due_s = await self.reporter.report(snapshot, status, ())
            await self.executor.renew_certificates(names.Owner(*key, body["metadata"]["uid"]), now)
            return due_s
        decision = await self._decide(key, service, snapshot, now)
        if decision.inputs.rollback not in (None, decision.inputs.snapshot.status.rollback):
            return await self._record_rollback(decision.inputs)
        return await self._execute(key, decision, now)

    def _forget(self, key: Key) -> None:
        self.sources.forget(key)
        self.placement.forget(key)
        self.executor.forget(key)
        self.reporter.forget(key)
        self.states.pop(key, None)

    async def _decide(self, key: Key, newest: InferenceService, snapshot: Snapshot, now: str) -> _Decision:
        fleet = self.sources.routers.fleet(key, _targets(snapshot, now))
        snapshot = await self._assess(key, newest, snapshot, fleet, now)
        effective = await self._effective_service(newest, snapshot, now)
        service, revision = effective.service, effective.revision
        free = names.group_names(service.name, service.uid, revision, plan.max_groups(service, snapshot))
        state = self.states.setdefault(key, ServiceState(snapshot.uid))
        autoscaler_state, scaling = autoscaler.autoscale(
            service, snapshot, fleet=fleet, state=state.autoscaler, now=now, now_s=self.clocks.monotonic()
        )
        placement = await self.placement.placement(key, service, snapshot)
        inputs = PlanInputs(
            snapshot=snapshot,
            fleet=fleet,
            scaling=scaling,
            gang_kind=placement.gang_kind,
            turn=placement.turn,
            gang_error=self.executor.gang_error(key),
            rollback=effective.rollback,
            rollback_blocked=effective.blocked_reason,
        )
        desired = plan.desired_groups(service, revision, free, inputs, now)
        return _Decision(
            service=service,
            inputs=inputs,
            placement=placement,
            desired=desired,
            plan=plan.decide(service, inputs, desired, now),
            autoscaler=autoscaler_state,
        )

    async def _assess(self, key: Key, service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> Snapshot:
        snapshot = plan.assess(service, snapshot, fleet, now)
        rejections = await self.sources.rejections.read(key, snapshot.groups, now)
        groups = tuple(replace_fields(group, rejection=rejections.get(group.uid, "")) for group in snapshot.groups)
        return replace(snapshot, groups=groups, certificate=await self.sources.certificates.read(service, now))

    async def _effective_service(self, newest: InferenceService, snapshot: Snapshot, now: str) -> EffectiveService:
        """An active rollback is not decided again."""
        revision = self.sources.manifests.revision(newest)
        due = rollback.due_rollback(snapshot, revision, newest.spec, now)
        former = await self.executor.recall_revision(newest, due.to) if due else None
        return rollback.effective_service(newest, revision, snapshot, due, former)

    async def _record_rollback(self, inputs: PlanInputs) -> float:
        """Writes only that a rollback starts; the next reconcile acts, after the least interval between two.

        Its actions delete the groups that show that the revision failed.
        """
        status = inputs.snapshot.status.model_copy(update={"rollback": inputs.rollback})
        await self.reporter.report(inputs.snapshot, status, ())
        return AGAIN_S

    async def _execute(self, key: Key, decision: _Decision, now: str) -> float:
        """Returns the seconds until the next reconcile."""
        service, snapshot, todo = decision.service, decision.inputs.snapshot, decision.plan
        self.placement.apply(key, service, decision.placement.gang, todo)
        self.reporter.metrics.show_wanted(key, decision.desired.replicas)
        execution = Execution(
            service=service, snapshot=snapshot, revision=decision.desired.revision, gang=decision.placement.gang, now=now
        )
        try:
            await self.executor.execute(todo.actions, execution)
        except (Rejected, Denied) as error:  # mostly by a webhook or a quota
            self.placement.release_rejected(key, service, todo, execution.done)
            self._publish_policy(key, decision, groups_to_evacuate(snapshot.groups, ()))
            self.states[key].autoscaler = decision.autoscaler
            await self._report_rejection(key, decision, execution, error)
            raise
        except KubeError as error:
            self._publish_policy(key, decision, groups_to_evacuate(snapshot.groups, ()))
            await self._report_failure(key, decision, execution, error)
            raise
        self._publish_policy(key, decision, todo.evacuate)
        self.states[key].autoscaler = decision.autoscaler
        self.reporter.show_scaling(key, decision.inputs.scaling)
        error_text, status = self.executor.router_error(key), todo.status
        failure = next(iter(execution.shared_errors), None)
        if failure and not isinstance(failure, Rejected | Denied):
            await self._report_failure(key, decision, execution, failure)
            raise failure
        if failure:
            status = traffic.with_rejection(status, f"spec: {failure}", snapshot, now)
        self.states[key].failing_since_s = None
        status = traffic.with_router_error(status, error_text, snapshot, now)
        self.states[key].status = status
        write_in_s = await self.reporter.report(snapshot, status, execution.done)
        if failure:
            raise failure
        retry_in_s = REJECTED_RETRY_S if error_text else RESYNC_S
        due_s = self.executor.due_in_s(key)
        due_in_s = RESYNC_S if due_s is None else max(due_s, AGAIN_S)
        return min(todo.requeue_s, write_in_s, retry_in_s, due_in_s)

    async def _report_failure(self, key: Key, decision: _Decision, execution: Execution, error: KubeError) -> None:
        """Announces what was done, and reports the status once reconciles have failed for `REPORT_FAILURE_S`: a webhook may be
        down for hours, while groups change."""
        snapshot, state, now_s = execution.snapshot, self.states[key], self.clocks.monotonic()
        if state.failing_since_s is None:
            state.failing_since_s = now_s
        if now_s - state.failing_since_s < REPORT_FAILURE_S:
            return await self.reporter.announce(snapshot, execution.done)
        status = decide_status.with_failed_call(decision.plan.status, str(error), snapshot, self.clocks.now())
        state.status = _with_recovery(status, decision, execution)
        with suppress(KubeError):  # the first error is raised
            await self.reporter.report(snapshot, state.status, execution.done)

    async def _report_rejection(self, key: Key, decision: _Decision, execution: Execution, error: KubeError) -> None:
        """Executes the remaining independent actions first."""
        snapshot, message = execution.snapshot, str(error)
        reason = Reason.QUOTA_EXCEEDED if decide_status.is_quota_error(message) else Reason.REJECTED
        status = decide_status.rejected_status(
            snapshot,
            reason,
            [FieldError("spec", message)],
            self.clocks.now(),
            fleet=decision.inputs.fleet,
            replicas=decision.desired.replicas,
            keeps_holds=True,
        )
        status = self.states[key].status = _with_recovery(status, decision, execution)
        remaining = [action for action in decision.plan.actions if action not in execution.done]
        try:
            await self.executor.execute(plan.independent_actions(remaining, snapshot), execution)
        finally:
            await self.reporter.report(snapshot, status, execution.done)

    def _publish_policy(self, key: Key, decision: _Decision, evacuate: Sequence[str]) -> None:
        service, groups = decision.service, decision.inputs.snapshot.groups
        now = self.clocks.now()
        targets = _targets(decision.inputs.snapshot, now)
        replicas, revision = plan.wanted_replicas(service), self.sources.manifests.revision(service)
        inputs = PolicyInputs(
            routers=sum(target.is_ready for target in targets) or len(targets),
            revision=revision,
            evacuate=tuple(evacuate),
            without_successor=tuple(groups_without_successor(groups, evacuate, revision, replicas)),
            is_awaited=is_awaited(groups, evacuate, replicas, now),
            wants_groups=replicas > 0,
            reported_number=decision.inputs.fleet.policy_number,
        )
        at, state = parse_time(now), self.states[key]
        state.policy = state.policy.update(service.spec, inputs, at.timestamp() if at else 0.0)
        lines = partial(explanation, spec=service.spec, state=state) if service.spec.router.console else None
        self.sources.routers.publish(key, targets, state.policy.policy, decision.plan.poll_s, lines)


def _with_recovery(status: Status, decision: _Decision, execution: Execution) -> Status:
    """Returns the status of an incomplete execution with the plan's recovery, if it has given up a group."""
    spent = {group.uid for group in execution.snapshot.groups if group.assessment.exceeds_restart_budget}
    has_given_up = any(isinstance(action, DeleteGroup) and action.uid in spent for action in execution.done)
    return status.model_copy(update={"recovery": decision.plan.status.recovery}) if has_given_up else status


def explanation(summaries: Sequence[RouterSummary], spec: Spec, state: ServiceState) -> list[str]:
    """Returns lines for the console."""
    found = explain(summaries, spec, state.status)
    return [*f"{found.state}.".splitlines(), *found.numbered]


def _target(snapshot: Snapshot, pod: ObservedPod, *, is_leaving: bool) -> RouterTarget:
    if not pod.is_internal:
        return RouterTarget(pod.uid, address_of(pod.ip), pod.is_https, is_ready=pod.ready, is_leaving=is_leaving)
    peer = labels.peer_name(labels.ROUTER_ROLE, snapshot.name, snapshot.namespace)
    address = address_of(pod.ip, labels.INTERNAL_PORT)
    return RouterTarget(pod.uid, address, peer_name=peer, is_ready=pod.ready, is_leaving=is_leaving)


def _targets(snapshot: Snapshot, now: str) -> list[RouterTarget]:
    """Returns ready routers, those on silent nodes, which may still run, and those that are being deleted, which may still have
    streams and hold requests."""
    targets: list[RouterTarget] = []
    for pod in snapshot.router_pods:
        is_silent = pod.is_unreported or is_on_silent_node(pod, snapshot.nodes, now)
        if pod.ip and (pod.ready or pod.terminating or is_silent):
            targets.append(_target(snapshot, pod, is_leaving=is_leaving(pod, snapshot.nodes, now)))
    return targets
