"""Decides all actions and the status of one service."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx_api.conditions import Reason, find_condition
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import RecoveryStatus, RollbackStatus, Status
from phalanx_operator.decide.conditions import adapters, availability, cache, capacity, devices, holds, traffic
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.conditions.status import service_status
from phalanx_operator.decide.groups import admission, drain, lost_nodes, progress, recovery, rollback
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.groups.lost_nodes import NodeStates
from phalanx_operator.decide.groups.rollout import next_step
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import ScalingResult
from phalanx_operator.decide.scaling.scale import PANIC_TICK_S, TICK_S
from phalanx_operator.decide.state.actions import (
    Action,
    CreateGroup,
    DeleteGroup,
    DeletePod,
    GroupAction,
    InitReplicas,
    KeepGang,
    KeepRevision,
    KeepSharedObjects,
    Plan,
    RecordRestarts,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import DesiredGroups, live_groups, outdated_groups, staying_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup, Snapshot, with_assessment

DEFAULT_REPLICAS = 1
"""Groups without `spec.replicas`."""
RESYNC_S = 600.0
POLL_S = 30.0
"""Longest poll without autoscaling."""
MIN_REQUEUE_S = 0.5
CERTIFICATE_CHECK_S = 60.0
"""Between checks of the certificate of `spec.router.tls`."""
CHECK_S = 10.0
"""Between checks of missing pods, and whether disruptions are still held."""
RECORD_CHECK_S = 30.0
"""Between checks of a missing revision."""
GANG_CHECK_S = 30.0
"""Interval between checks of waiting gangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Inputs other than the spec."""

    snapshot: Snapshot
    """Observed state with the groups assessed."""
    fleet: Fleet
    scaling: ScalingResult | None = None
    gang_kind: str = "None"
    """Gang scheduler of new groups."""
    turn: PlacementTurn = FREE
    gang_error: str = ""
    rollback: RollbackStatus | None = None
    """Rollback in progress, as in `EffectiveService`."""
    rollback_blocked: str = ""
    """Why no rollback is possible (`EffectiveService.blocked_reason`)."""

    @property
    def is_spec_lost(self) -> bool:
        """Whether groups run a revision that is not stored."""
        return bool(self.rollback and self.rollback_blocked)


def max_groups(service: InferenceService, snapshot: Snapshot) -> int:
    """Returns an upper bound of the number of groups."""
    replicas = wanted_replicas(service)
    return replicas + service.spec.rollout.surge(replicas) + len(snapshot.groups)


def desired_groups(
    service: InferenceService, revision: str, names: tuple[str, ...], inputs: PlanInputs, now: str
) -> DesiredGroups:
    """Returns the wanted groups, and constraints on replacing them."""
    rollout, replicas, snapshot = service.spec.rollout, wanted_replicas(service), inputs.snapshot
    surge, unavailable = rollout.surge(replicas), rollout.unavailable(replicas)
    deadline_reason = no_surge_reason = ""
    if _counts(Reason.PROGRESS_DEADLINE_EXCEEDED, snapshot):
        deadline_reason = progress.deadline_failure(snapshot.groups, revision, service.spec, now)
    late_reason = inputs.rollback_blocked if inputs.is_spec_lost else _join(deadline_reason, inputs.rollback_blocked)
    if surge and _counts(Reason.SURGE_UNSCHEDULABLE, snapshot):
        no_surge_reason = progress.surge_failure(snapshot.groups, snapshot.status, revision, rollout, now)
    recovery_status = _recovery_status(service, inputs, revision, now)
    turn = _turn(service, inputs, recovery_status, now)
    is_spent = recovery_status is not None and recovery_status.given_up > 1 and not _all_ready(snapshot, replicas)
    return DesiredGroups(
        revision=revision,
        replicas=replicas,
        routers=service.spec.router.replicas,
        names=names,
        max_unavailable=unavailable,
        max_surge=0 if no_surge_reason and unavailable else surge,
        partition=rollout.partition,
        paused=rollout.paused,
        hold_reason=late_reason
        or turn.why
        or snapshot.clock_reason
        or snapshot.kept_reason
        or _uncertified_routers(service, snapshot),
        late_reason=late_reason,
        stuck_reason=late_reason or (turn.why if turn.is_stuck else "") or snapshot.kept_reason,
        kept_reason=snapshot.kept_reason,
        num_kept=_num_kept(service, snapshot),
        no_surge_reason=no_surge_reason,
        spent_reason=_join(recovery_status.message, inputs.rollback_blocked) if recovery_status and is_spent else "",
        holds_requests=_holds_requests(service),
        wants_https=service.spec.router.tls is not None,
        path=service.spec.router.expose.path.removesuffix("/"),
    )


def _num_kept(service: InferenceService, snapshot: Snapshot) -> int:
    """Returns the least number of groups that a partition leaves: all, or the lower count of a user and its surge."""
    if not snapshot.kept_reason:
        return 0
    if not autoscaler.is_count_of_user(service, snapshot):
        return len(snapshot.groups)
    replicas = wanted_replicas(service)
    return replicas + service.spec.rollout.surge(replicas) if replicas else 0


def _uncertified_routers(service: InferenceService, snapshot: Snapshot) -> str:
    """Returns why serving groups are kept: a router without a certificate cannot reach their successors."""
    former = [pod.name for pod in snapshot.router_pods if pod.ready and not pod.is_internal]
    wants = service.spec.security.tls == "Internal"
    return f"router {former[0]} has no certificate for groups with spec.security.tls yet" if wants and former else ""


def _counts(reason: Reason, snapshot: Snapshot) -> bool:
    """Returns whether ages count for this reason: the clock has not changed, or the former status has the reason."""
    former = find_condition(snapshot.status.conditions, "Progressing")
    return not snapshot.clock_reason or (former is not None and former.reason == reason)


def _join(message: str, detail: str) -> str:
    return f"{message}; {detail}" if message and detail else message


def _holds_requests(service: InferenceService) -> bool:
    scaling = service.spec.autoscaling
    return scaling is not None and scaling.scale_to_zero.enabled and not service.spec.suspend


def _all_ready(snapshot: Snapshot, replicas: int) -> bool:
    return sum(group.serving for group in staying_groups(snapshot.groups)) >= replicas


def _recovery_status(service: InferenceService, inputs: PlanInputs, revision: str, now: str) -> RecoveryStatus | None:
    snapshot = inputs.snapshot
    return recovery.recovery_status(snapshot.status.recovery, snapshot.groups, revision, service.spec.restart_policy, now)


def _turn(service: InferenceService, inputs: PlanInputs, status: RecoveryStatus | None, now: str) -> PlacementTurn:
    """Adds the pauses of rollback and recovery."""
    if inputs.is_spec_lost:
        return PlacementTurn(why=inputs.rollback_blocked, retry_s=RECORD_CHECK_S, is_stuck=True)
    pause_s = recovery.pause_s(status, service.spec.restart_policy, now)
    if status and pause_s > 0:
        why = f"{status.given_up} groups were given up for their restarts; the next one is created after a pause"
        return PlacementTurn(why=why, retry_s=pause_s, is_reported=True, is_stuck=True)
    return inputs.turn


def wanted_replicas(service: InferenceService) -> int:
    """Returns the wanted groups; 0 while suspended."""
    if service.spec.suspend:
        return 0
    return DEFAULT_REPLICAS if service.spec.replicas is None else service.spec.replicas


def assess(service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> Snapshot:
    """Returns the snapshot with assessed groups."""
    spec = service.spec
    groups = lost_nodes.assess(snapshot.groups, _node_states(service, snapshot, fleet, now))
    not_kept = [group for group in groups if not (group.assessment.alive_reason or group.assessment.kept_reason)]
    failures = admission.placement_failures(not_kept, spec.placement.gang.timeout_seconds, now)
    failures |= {group.uid: "another client scaled its StatefulSet to 0" for group in groups if not group.size}
    groups = tuple(
        with_assessment(group, lost_reason=group.assessment.lost_reason or failures.get(group.uid, "")) for group in groups
    )
    groups = recovery.assess(groups, fleet, spec.restart_policy, now, snapshot.status.recovery)
    groups = progress.assess(groups, spec.rollout, now)
    timeout_s = math.inf if snapshot.clock_reason else float(spec.drain.timeout_seconds)
    groups = drain.assess(groups, fleet, timeout_s, now, replicas=wanted_replicas(service))
    if snapshot.clock_reason:
        groups = tuple(_without_ages(group) for group in groups)
    if any(group.assessment.kept_reason for group in groups):
        groups = tuple(with_assessment(group, lost_reason="", exceeds_restart_budget=False) for group in groups)
    return replace(snapshot, groups=groups)


def _without_ages(group: ObservedGroup) -> ObservedGroup:
    """Drops conclusions from ages, which are wrong after a change of the clock. `hold_reason` keeps what is being replaced.

    A group on a silent node may have a successor, whatever the time of its node: it is kept, and none is created.
    """
    state = group.assessment
    unreachable_reason = state.unreachable_reason or ("" if state.kept_reason else state.alive_reason)
    return with_assessment(group, lost_reason="", exceeds_restart_budget=False, hold=None, unreachable_reason=unreachable_reason)


def _node_states(service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> NodeStates:
    return NodeStates(
        nodes=snapshot.nodes,
        limit_s=service.spec.restart_policy.node_lost_seconds,
        now=now,
        fleet=fleet,
        census=snapshot.census,
        was_partitioned=find_condition(snapshot.status.conditions, "ControlPlanePartitioned") is not None,
        routers=snapshot.router_pods,
    )


def decide(service: InferenceService, inputs: PlanInputs, desired: DesiredGroups, now: str) -> Plan:
    """Returns the plan for a valid service."""
    snapshot, scaling = inputs.snapshot, inputs.scaling
    status = _recovery_status(service, inputs, desired.revision, now)
    # requested drains use up part of `maxUnavailable`
    requested = drain.requested(snapshot.groups, inputs.fleet, now)
    step = next_step(desired, drain.with_marks(snapshot.groups, requested, now)).actions
    turn = _turn(service, inputs, status, now)
    states = _node_states(service, snapshot, inputs.fleet, now)
    avoid_nodes = [*(status.nodes if status else ()), *lost_nodes.nodes_with_stuck_pods(snapshot.groups, states)]
    group_actions = _admitted(step, inputs, turn, tuple(dict.fromkeys(avoid_nodes)))
    if len(group_actions) == len(step) and not outdated_groups(snapshot.groups, desired):
        turn = FREE  # no group of this service has to wait
    changed = {action.uid for action in group_actions if not isinstance(action, CreateGroup)}
    group_actions += tuple(action for action in requested if action.uid not in changed)
    group_actions += _restarts(service, inputs, group_actions, now)
    actions: list[Action] = []
    if not snapshot.has_replicas:
        actions.append(InitReplicas(DEFAULT_REPLICAS, "the manifest sets no replicas"))
    unready = availability.publishes_unready(snapshot, inputs.fleet, now)
    actions.append(KeepSharedObjects(desired.replicas, "every service has them", inputs.is_spec_lost, unready))
    if service.spec.rollout.on_failure == "Rollback" and rollback.is_complete(snapshot, desired):
        actions.append(KeepRevision(desired.revision, "a later rollout may roll back to it"))
    actions += _records_to_store(snapshot.groups, group_actions)
    actions += [*group_actions, *drain.leader_marks(snapshot.groups, group_actions)]
    if not snapshot.clock_reason:
        actions += lost_nodes.pods_to_delete(snapshot.groups, states)
        actions += lost_nodes.routers_to_delete(snapshot.groups, states)
        actions += drain.pods_to_delete(snapshot.groups, service.spec.drain.timeout_seconds, now)
    if scaling and scaling.replicas_to_write is not None:
        actions.append(SetReplicas(scaling.replicas_to_write, f"{scaling.decision.verdict}: {scaling.decision.why}"))
    actions += [*_missing_gangs(snapshot.groups), *recovery.due_retries(snapshot.groups, snapshot.router, now)]
    evacuate = tuple(drain.groups_to_evacuate(snapshot.groups, group_actions))
    is_evacuating = any(group.name in evacuate and not group.assessment.lost_reason for group in snapshot.groups)
    is_fast = is_evacuating or (scaling is not None and scaling.decision.is_panicking)
    has_silent_node = any(group.assessment.has_unready_node for group in live_groups(snapshot.groups))
    tick_s = PANIC_TICK_S if is_fast else TICK_S if scaling else None
    return Plan(
        actions=tuple(actions),
        status=_status(service, inputs, desired=desired, recovery_status=status, turn=turn, now=now),
        poll_s=min(tick_s or POLL_S, lost_nodes.POLL_S if has_silent_node else POLL_S),
        evacuate=evacuate,
        requeue_s=_requeue_s(service, inputs, desired=desired, turn=turn, max_s=tick_s or RESYNC_S, now=now),
        is_queued=turn.is_queued,
    )


def independent_actions(actions: Iterable[Action], snapshot: Snapshot) -> tuple[Action, ...]:
    """Returns the actions to execute even after a rejection."""
    pods = {pod.uid for group in snapshot.groups if group.terminating for pod in group.pods}
    pods |= {pod.uid for pod in snapshot.router_pods}
    return tuple(
        action
        for action in actions
        if isinstance(action, RestartGroup | RecordRestarts | SetReplicas)
        or (isinstance(action, DeletePod) and action.uid in pods)
    )


def _admitted(
    actions: tuple[GroupAction, ...], inputs: PlanInputs, turn: PlacementTurn, avoid_nodes: tuple[str, ...]
) -> tuple[GroupAction, ...]:
    """Drops creations that have to wait."""
    creations = [replace(action, avoid_nodes=avoid_nodes) for action in actions if isinstance(action, CreateGroup)]
    limit = 0 if turn.why else 1 if inputs.gang_kind == "Fallback" else len(creations)
    return (*(action for action in actions if not isinstance(action, CreateGroup)), *creations[:limit])


def _restarts(
    service: InferenceService, inputs: PlanInputs, actions: tuple[GroupAction, ...], now: str
) -> tuple[RestartGroup, ...]:
    """Returns overdue and unfinished restarts."""
    policy = service.spec.restart_policy
    changed = {action.uid for action in actions if not isinstance(action, CreateGroup)}
    is_held = bool(inputs.snapshot.clock_reason or inputs.snapshot.kept_reason)
    restarts = []
    for group in live_groups(inputs.snapshot.groups):
        if group.uid in changed or group.assessment.kept_reason:
            continue
        if unfinished := recovery.unfinished_restart(group, policy):
            pods = tuple((pod.name, pod.uid) for pod in group.pods if pod.name in unfinished)
            record, why = recovery.restart_record(group), "its other pods were replaced"
        elif recovery.is_overdue(group, policy, now) and not is_held:
            pods = tuple((pod.name, pod.uid) for pod in group.pods)
            record, why = recovery.record_restart(group, policy, now), f"it is not ready after {policy.startup_seconds} s"
        else:
            continue
        restarts.append(RestartGroup(name=group.name, uid=group.uid, pods=pods, record=record, why=why))
    return tuple(restarts)


def _records_to_store(groups: Iterable[ObservedGroup], actions: tuple[GroupAction, ...]) -> list[RecordRestarts]:
    """Returns changed records that no other action stores."""
    changed = {action.uid for action in actions if isinstance(action, DeleteGroup | RestartGroup)}
    return [
        RecordRestarts(group.name, group.uid, record)
        for group in live_groups(groups)
        if (record := recovery.restart_record(group)) != group.restarts and group.uid not in changed
    ]


def _missing_gangs(groups: Iterable[ObservedGroup]) -> list[KeepGang]:
    """Returns gang objects that may be missing, because a pod has no node."""
    return [
        KeepGang(name=group.name, uid=group.uid, kind=group.gang, pods=group.size, why="its pods have no nodes yet")
        for group in live_groups(groups)
        if group.gang in ("Native", "Volcano") and not all(pod.node for pod in group.pods)
    ]


def _status(
    service: InferenceService,
    inputs: PlanInputs,
    desired: DesiredGroups,
    recovery_status: RecoveryStatus | None,
    turn: PlacementTurn,
    now: str,
) -> Status:
    snapshot, fleet, spec = inputs.snapshot, inputs.fleet, service.spec
    status = service_status(snapshot, desired, fleet, suspended=spec.suspend, now=now)
    status = status.model_copy(update={"recovery": recovery_status, "gang": inputs.gang_kind})
    status = capacity.with_capacity_condition(status, snapshot, turn, inputs.gang_error, now)
    status = model_conditions.with_model_cached_condition(status, spec.model, snapshot, fleet, now)
    status = model_conditions.with_model_status(status, spec.model, snapshot, fleet)
    status = traffic.with_balanced_condition(status, fleet, snapshot, now)
    status = traffic.with_compatible_condition(status, fleet, snapshot, now)
    status = traffic.with_certificate_condition(status, spec.router.tls, snapshot, now)
    status = holds.with_partition_condition(status, snapshot, now)
    status = holds.with_held_condition(status, snapshot, now)
    status = devices.with_devices_condition(status, fleet, snapshot, now)
    status = adapters.with_adapters(status, spec.adapters, fleet, snapshot, now)
    status = cache.with_cache_condition(status, spec.engine, fleet=fleet, snapshot=snapshot, revision=desired.revision, now=now)
    status = traffic.with_speculating_condition(
        status, spec.engine, snapshot=snapshot, revision=desired.revision, fleet=fleet, now=now
    )
    status = rollback.with_rollback_condition(status, inputs.rollback, inputs.rollback_blocked, snapshot, now)
    return autoscaler.with_scaling_conditions(status, service, inputs.scaling, snapshot, now)


def _requeue_s(
    service: InferenceService, inputs: PlanInputs, desired: DesiredGroups, turn: PlacementTurn, max_s: float, now: str
) -> float:
    snapshot, spec = inputs.snapshot, service.spec
    groups, policy = snapshot.groups, spec.restart_policy
    if snapshot.clock_reason:
        return min(max_s, CHECK_S)
    draining = [group for group in groups if not (group.terminating and all(pod.has_short_grace for pod in group.pods))]
    due = [drain.due_in_s(group, spec.drain.timeout_seconds, now) for group in draining]
    due += [
        progress.due_in_s(groups, snapshot.status, desired.revision, spec, now),
        lost_nodes.due_in_s(groups, _node_states(service, snapshot, inputs.fleet, now)),
        recovery.due_in_s(groups, policy, now),
        admission.due_in_s(groups, spec.placement.gang.timeout_seconds, now),
        capacity.due_in_s(groups, now),
        turn.retry_s if turn.why else None,
        CERTIFICATE_CHECK_S if spec.router.tls else None,
        GANG_CHECK_S if _missing_gangs(groups) else None,
        CHECK_S if any(group.incomplete_since for group in live_groups(groups)) else None,
        CHECK_S if any(group.assessment.hold for group in groups) else None,
        CHECK_S if snapshot.router and snapshot.router.rejection else None,
    ]
    return min([max_s, *(max(left_s, MIN_REQUEUE_S) for left_s in due if left_s is not None)])
