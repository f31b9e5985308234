"""Reconciles one service: observe, plan, execute, one status write, then events and metrics."""

import datetime
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api.conditions import Condition, Reason, find_condition
from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import FieldError, InferenceService
from phalanx_api.status import RollbackStatus, Status
from phalanx_operator.apply.executor import ActionExecutor
from phalanx_operator.apply.shared_objects import EXPOSE_AGAIN_S
from phalanx_operator.decide import pacing, plan
from phalanx_operator.decide.conditions import status as decide_status
from phalanx_operator.decide.conditions import traffic
from phalanx_operator.decide.groups import admission, rollback
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.groups.drain import for_good, is_awaited, to_empty
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import (
    CreateGroup,
    DeleteGroup,
    DrainGroup,
    GroupAction,
    KeepGroup,
    Plan,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.decide.state.groups import staying
from phalanx_operator.decide.state.policy import PublishedPolicy
from phalanx_operator.decide.state.snapshot import Snapshot, changed, parsed
from phalanx_operator.kube.client import SERVICES_OF_OURS, Denied, Gone, Json, KubeClient, KubeError, Rejected
from phalanx_operator.kube.events import LONGEST_NOTE, EventNote, EventRecorder
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import Turns
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe import observe
from phalanx_operator.observe.api_discovery import ASK_AGAIN_S, RETRY_S, SchedulerDiscovery
from phalanx_operator.observe.observe import Children
from phalanx_operator.observe.pod_failure import ImageRefusals
from phalanx_operator.observe.service_cache import Manifests, ServiceCache
from phalanx_operator.render import gangs
from phalanx_operator.render import objects as names
from phalanx_operator.render.gangs import Gang
from phalanx_operator.routers import Routers, RouterTarget, address_of

log = logging.getLogger(__name__)
RESYNC_S = plan.RESYNC_S


def utc_now() -> str:
    """Returns the current time in RFC 3339, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Reconciles services with their specs."""

    client: KubeClient
    children: Children
    hands: ActionExecutor
    notes: EventRecorder
    metrics: Metrics
    routers: Routers
    offers: SchedulerDiscovery
    refusals: ImageRefusals
    manifests: Manifests = field(default_factory=Manifests)
    known: ServiceCache = field(default_factory=ServiceCache)
    now: Callable[[], str] = utc_now
    clock: Callable[[], float] = time.monotonic
    minds: dict[Key, AutoscalerState] = field(default_factory=dict)
    granted: dict[Key, PublishedPolicy] = field(default_factory=dict)
    turns: Turns = field(default_factory=lambda: Turns(random.random))
    wake: Callable[[Key], None] = lambda _: None
    pace_s: float = pacing.PACE_S
    written: dict[Key, float] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """Returns the seconds until the next reconcile, None if the service is deleted. Raises KubeError for a retry."""
        try:
            return await self._reconcile(key)
        except KubeError:
            self.known.doubt(key)
            raise

    async def _reconcile(self, key: Key) -> float | None:
        try:
            body = await self.known.get(self.client, key)
        except Gone:
            self._forget(key)
            self._call_next()
            return None
        if "deletionTimestamp" in body["metadata"]:
            self.turns.forget(key)  # a terminating service creates no groups
            self._call_next()
            return RESYNC_S  # garbage collection deletes what it owns
        self.children.prune(key)
        self.children.count_pods(key, self.now())
        snapshot = observe.snapshot(body, self.children)
        parsed = self.manifests.read(body)
        if isinstance(parsed, list):
            self.turns.forget(key)  # a service with an invalid spec creates no groups
            self._call_next()
            return await self._write(snapshot, decide_status.refused(snapshot, Reason.SPEC_INVALID, parsed, self.now()), ())
        return await self._follow(key, parsed, snapshot)

    def _forget(self, key: Key) -> None:
        """Drops all state of a deleted service."""
        self.hands.forget(key)
        self.metrics.forget(key)
        self.routers.forget(key)
        self.minds.pop(key, None)
        self.granted.pop(key, None)
        self.turns.forget(key)
        self.refusals.forget(key)
        self.manifests.forget(key)
        self.written.pop(key, None)
        self.known.forget(key)

    async def _follow(self, key: Key, service: InferenceService, snapshot: Snapshot) -> float:
        """Executes the plan and writes the status. Returns the seconds until the next reconcile."""
        now = self.now()
        fleet = self.routers.fleet(key, _targets(snapshot))
        snapshot = await self._with_refusals(key, plan.assessed(service, snapshot, fleet, now), now)
        service, current, back, no_way_back = await self._followed(service, snapshot, now)
        free = names.group_names(service.name, service.uid, current, plan.most_groups(service, snapshot))
        mind, scaling = autoscaler.scaling(
            service, snapshot, fleet=fleet, mind=self.minds.get(key, AutoscalerState()), now=now, now_s=self.clock()
        )
        gang, kind, turn = await self._placement(key, service, snapshot)
        seen = PlanInputs(
            snapshot=snapshot,
            fleet=fleet,
            scaling=scaling,
            gang=kind,
            turn=turn,
            ungated=self.hands.ungated(key),
            back=back,
            no_way_back=no_way_back,
        )
        desired = plan.desired_groups(service, current, free, seen, now)
        todo = plan.decide(service, seen, desired, now)
        self._take_turn(key, service, gang, todo)
        done: list[GroupAction | SetReplicas] = []
        try:
            await self.hands.carry_out(todo.actions, service, snapshot=snapshot, revision=current, gang=gang, now=now, done=done)
        except (Rejected, Denied) as error:  # a webhook or a quota may refuse an object that the schema allows
            self._leave_turn(key, service, todo, done)
            self._tell(key, service, seen, to_empty(snapshot.groups, ()), todo.hear_s)
            self.minds[key] = mind
            wrong, done = [FieldError("spec", str(error))], []
            reason = Reason.QUOTA_EXCEEDED if decide_status.is_quota(str(error)) else Reason.REJECTED
            said = decide_status.refused(snapshot, reason, wrong, self.now(), wanted=desired.replicas)
            despite = plan.with_plan_errors(todo.actions, snapshot.groups)
            try:
                await self.hands.carry_out(despite, service, snapshot=snapshot, revision=current, gang=gang, now=now, done=done)
            finally:
                await self._write(snapshot, said, done)
            raise
        except KubeError:
            self._tell(key, service, seen, to_empty(snapshot.groups, ()), todo.hear_s)
            raise
        self._tell(key, service, seen, todo.empty, todo.hear_s)
        self.minds[key] = mind
        self.metrics.show_scaling(key, scaling.decision if scaling else None)
        unexposed = self.hands.unexposed(key)
        left_s = await self._write(snapshot, traffic.with_exposure_condition(todo.status, unexposed, snapshot, now), done)
        return min(todo.again_s, left_s, EXPOSE_AGAIN_S if unexposed else RESYNC_S, self.hands.left_s(key) or RESYNC_S)

    async def _with_refusals(self, key: Key, snapshot: Snapshot, now: str) -> Snapshot:
        """Returns the snapshot with the API server's refusals of pods, from events."""
        refused = await self.refusals.of(key, snapshot.groups, now)
        groups = tuple(changed(group, refused=refused.get(group.uid, "")) for group in snapshot.groups)
        return replace(snapshot, groups=groups)

    async def _placement(self, key: Key, service: InferenceService, snapshot: Snapshot) -> tuple[Gang, str, PlacementTurn]:
        """Returns the gang of new groups, its kind for the status, and whether a group may be created now."""
        served = await self.offers.served(service.namespace) if gangs.gang_options(service) else frozenset()
        gang = gangs.chosen(service, served or frozenset())
        turn = self._turn(key, service, snapshot)
        if served is None:
            turn = PlacementTurn(
                why="the API server did not report which schedulers it serves", left_s=RETRY_S, told=True, is_stuck=True
            )
        elif missing := gangs.missing_gang_reason(gang, served):
            why = f"spec.placement.gang: the cluster does not serve PodGroups of {missing}"
            turn = PlacementTurn(why=why, left_s=ASK_AGAIN_S, told=True, is_stuck=True)
        elif gang.kind != "Fallback":
            turn = FREE
        return gang, snapshot.status.gang if served is None else gang.kind, turn

    async def _followed(
        self, service: InferenceService, snapshot: Snapshot, now: str
    ) -> tuple[InferenceService, str, RollbackStatus | None, str]:
        """Returns the service to follow, its revision, the rollback if one is active, and why a due rollback is impossible.

        The first two are the former revision's while a rollback is active; the rollback then is not decided again.
        """
        current = self.manifests.revision(service)
        back = rollback.given_up(snapshot, current, service.spec, now)
        if back is None:
            return service, current, None, ""
        former = await self.hands.recall(service, back.to)
        if former:
            return rollback.as_followed(former, is_former=True), back.to, back, ""
        if snapshot.status.rollback != back:
            return service, current, None, rollback.NO_RECORD
        return rollback.as_followed(service, is_former=False), current, back, rollback.NO_RECORD

    def _turn(self, key: Key, service: InferenceService, snapshot: Snapshot) -> PlacementTurn:
        """Returns whether the service may create a group now. A group that is given up ends its turn; the service then pauses."""
        device, now_s = service.spec.resources.accelerator.resource_name, self.clock()
        unplaced = admission.unplaced(snapshot.groups)
        lost = next((group for group in unplaced if group.lost), None)
        if lost:
            self.turns.gave_up(device, key, f"group {lost.name} was given up: {lost.lost}", now_s)
        elif not unplaced and len(staying(snapshot.groups)) >= plan.wanted_replicas(service):
            self.turns.placed(key)
        waiting = [group.name for group in unplaced if not group.lost]
        return self.turns.look(device, key, waiting, now_s, [group.name for group in snapshot.groups])

    def _take_turn(self, key: Key, service: InferenceService, gang: Gang, todo: Plan) -> None:
        """Takes the turn for the group that the plan creates, or frees it and wakes the next service if the plan creates no
        group."""
        device = service.spec.resources.accelerator.resource_name
        self.turns.line(device, key, waits=todo.in_line)
        for action in todo.actions:
            if isinstance(action, CreateGroup) and gang.kind == "Fallback":
                self.turns.take(device, key, action.name, self.clock())
        self._call_next()

    def _leave_turn(self, key: Key, service: InferenceService, todo: Plan, done: Sequence[GroupAction | SetReplicas]) -> None:
        """Frees the turn and wakes the next service if the group of this turn was rejected."""
        if any(isinstance(action, CreateGroup) and action not in done for action in todo.actions):
            self.turns.leave(service.spec.resources.accelerator.resource_name, key)
            self._call_next()

    def _call_next(self) -> None:
        """Wakes the services whose turn has come."""
        for key in self.turns.called(self.clock()):
            self.wake(key)

    def _tell(self, key: Key, service: InferenceService, seen: PlanInputs, empty: Sequence[str], hear_s: float) -> None:
        """Sends the current policy to all ready routers with the next poll."""
        snapshot = seen.snapshot
        targets = _targets(snapshot)
        now = self.now()
        wanted, current = plan.wanted_replicas(service), self.manifests.revision(service)
        awaited = is_awaited(snapshot.groups, empty, wanted, now)
        last = for_good(snapshot.groups, empty, current, wanted)
        former, at = self.granted.get(key, PublishedPolicy()), parsed(now)
        now_s = at.timestamp() if at else 0.0
        self.granted[key] = former.renewed(
            service.spec, len(targets), empty, now_s, awaited=awaited, revision=current, for_good=last, wanted=wanted > 0
        )
        self.routers.tell(key, targets, self.granted[key].policy, hear_s)

    async def _write(self, snapshot: Snapshot, status: Status, done: Sequence[GroupAction | SetReplicas]) -> float:
        """Writes the status once if it differs, then posts events. Returns the seconds until a postponed write is due; writes
        that change only counters are postponed."""
        key, left_s = (snapshot.namespace, snapshot.name), RESYNC_S
        if status != snapshot.status:
            waits_s = self.pace_s - (self.clock() - self.written.get(key, float("-inf")))
            if waits_s > 0 and pacing.may_wait(snapshot.status, status):
                left_s = waits_s
            else:
                self.known.wrote(await self.client.apply(SERVICES_OF_OURS, _status_body(snapshot, status), subresource="status"))
                self.metrics.status_writes.inc()
                self.written[key] = self.clock()
        self.metrics.show(key, status)
        for action in done:
            self.metrics.actions.labels(type(action).__name__).inc()
        for note in [*_action_notes(done), *_transitions(snapshot.status.conditions, status.conditions)]:
            try:
                await self.notes.post(snapshot, note)
            except KubeError as error:  # a lost event must not repeat the work
                log.warning("event not posted", extra={"service": "/".join(key), "why": str(error)})
        return left_s


def _targets(snapshot: Snapshot) -> list[RouterTarget]:
    """Returns the ready routers."""
    ready = [pod for pod in snapshot.router_pods if pod.ready and pod.ip and not pod.leaving]
    return [RouterTarget(pod.uid, address_of(pod.ip)) for pod in ready]


def _status_body(snapshot: Snapshot, status: Status) -> Json:
    """Returns the body of the status apply. The UID makes it fail for another service of this name."""
    metadata = {"namespace": snapshot.namespace, "name": snapshot.name, "uid": snapshot.uid}
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)  # the API server rejects null
    return {"apiVersion": f"{api.GROUP}/{api.VERSION}", "kind": api.KIND, "metadata": metadata, "status": written}


_NOTES: dict[type[GroupAction | SetReplicas], str] = {
    CreateGroup: "GroupCreated",
    DrainGroup: "GroupDraining",
    KeepGroup: "GroupKept",
    DeleteGroup: "GroupDeleted",
    RestartGroup: "GroupRestarted",
    SetReplicas: "Scaled",
}


def _action_notes(done: Sequence[GroupAction | SetReplicas]) -> list[EventNote]:
    """Returns one event per kind of action, split where the message exceeds an event's limit."""
    said: dict[str, list[str]] = {}
    for action in done:
        what = f"to {action.replicas}" if isinstance(action, SetReplicas) else action.name
        said.setdefault(_NOTES[type(action)], []).append(f"{what}: {action.why}")
    return [EventNote("Normal", reason, part) for reason, lines in said.items() for part in _joined(lines)]


def _joined(lines: Sequence[str]) -> list[str]:
    """Joins the lines into as few messages as the limit of an event allows."""
    parts = [""]
    for line in lines:
        longer = f"{parts[-1]}; {line}" if parts[-1] else line
        parts = [*parts[:-1], longer] if len(longer) <= LONGEST_NOTE or not parts[-1] else [*parts, line]
    return parts


_CALM = (
    Reason.GROUPS_NOT_READY,
    Reason.ROLLING_OUT,
    Reason.ROUTER_NOT_READY,
    Reason.ROUTERS_SILENT,
    Reason.DISABLED,
)
"""Reasons for `False` that end without intervention."""
_OF_ROLLOUTS = (Reason.SURGE_UNSCHEDULABLE, Reason.PROGRESS_DEADLINE_EXCEEDED)
"""Reasons of `Progressing` that need attention."""


def _transitions(before: Sequence[Condition], after: Sequence[Condition]) -> list[EventNote]:
    """Returns an event when the service becomes ready, and one for each new reason of a condition that is not as it should be.

    A return to `True` is reported only after `False`; of a rollout only what stops or changes it.
    """
    notes = []
    for kind in ("Ready", "Progressing", "ModelCached", "ScalingActive", "Balanced", "Compatible", "Speculating"):
        old, new = find_condition(before, kind), find_condition(after, kind)
        if new is None or (old and (old.status, old.reason) == (new.status, new.reason)):
            continue
        if kind == "Progressing":
            notes += [EventNote("Warning", new.reason, new.message)] if new.reason in _OF_ROLLOUTS else []
            continue
        if kind != "Ready" and new.status == "True" and (old is None or old.status != "False"):
            continue
        if new.status == "Unknown" and (kind in ("ModelCached", "Speculating") or (kind == "Balanced" and old is None)):
            continue
        calm = new.status == "True" or new.reason in _CALM
        notes.append(EventNote("Normal" if calm else "Warning", new.reason, new.message))
    return notes
