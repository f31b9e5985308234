"""Decides all actions and the status of one service."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import RecoveryStatus, RollbackStatus, Status
from phalanx_operator.decide.conditions import capacity, traffic
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.conditions.status import status
from phalanx_operator.decide.groups import admission, drain, lost_nodes, progress, recovery, rollback
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.groups.rollout import next_step
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import Scaling
from phalanx_operator.decide.scaling.scale import PANIC_TICK_S, TICK_S
from phalanx_operator.decide.state.actions import (
    Action,
    CreateGroup,
    DeleteGroup,
    DeletePod,
    GroupAction,
    InitReplicas,
    KeepChildren,
    KeepGang,
    KeepRevision,
    NoteRestarts,
    Plan,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import Desired, live, outdated, staying
from phalanx_operator.decide.state.snapshot import ObservedGroup, Snapshot, changed

FIRST_REPLICAS = 1
"""Groups of a service whose manifest sets no count."""
RESYNC_S = 600.0
HEAR_S = 30.0
"""Longest poll of a router whose counts decide nothing now; urgent changes end a poll at once."""
LEAST_S = 0.5
PODS_LOOK_S = 10.0
"""Interval in which missing pods of a group or the router are checked."""
RECORD_LOOK_S = 30.0
"""Interval in which the record of a rolled-back revision is checked."""
GANG_LOOK_S = 30.0
"""Interval in which groups that wait for a gang scheduler are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Inputs of a plan besides the spec."""

    snapshot: Snapshot
    """With assessed groups."""
    fleet: Fleet
    """The routers' reports."""
    scaling: Scaling | None = None
    gang: str = "None"
    """Gang kind of groups that are created now."""
    turn: PlacementTurn = FREE
    """Whether a group may be created now where no gang scheduler places it."""
    ungated: str = ""
    """Why a group's PodGroup could not be created; empty if it could."""
    back: RollbackStatus | None = None
    """Set while the spec's revision is given up and the former one is followed."""
    no_way_back: str = ""
    """Why a due rollback is impossible. With `back`: the former revision was followed and its record is lost."""


def most_groups(service: InferenceService, snapshot: Snapshot) -> int:
    """Returns an upper bound of the number of groups, including existing ones."""
    replicas = wanted_replicas(service)
    return replicas + service.spec.rollout.surge(replicas) + len(snapshot.groups)


def desired_groups(service: InferenceService, revision: str, names: tuple[str, ...], seen: PlanInputs, now: str) -> Desired:
    """Returns the groups that the spec asks for and how they may be replaced now."""
    rollout, replicas, snapshot = service.spec.rollout, wanted_replicas(service), seen.snapshot
    surge, unavailable = rollout.surge(replicas), rollout.unavailable(replicas)
    late = _with(progress.late(snapshot.groups, revision, rollout, now), seen.no_way_back)
    late = seen.no_way_back if seen.back and seen.no_way_back else late
    no_room = progress.no_room(snapshot.groups, snapshot.status, revision, rollout, now) if surge else ""
    past = followed(service, seen, revision, now)
    waits = _waits(service, seen, past, now)
    return Desired(
        revision=revision,
        replicas=replicas,
        routers=service.spec.router.replicas,
        names=names,
        max_unavailable=unavailable,
        max_surge=0 if no_room and unavailable else surge,
        partition=rollout.partition,
        paused=rollout.paused,
        held=late or waits.why,
        late=late,
        stuck=late or (waits.why if waits.is_stuck else ""),
        no_room=no_room,
        spent=_with(past.message, seen.no_way_back) if past and past.given_up > 1 and not _whole(snapshot, replicas) else "",
        holds=_holds(service),
    )


def _with(words: str, more: str) -> str:
    """Returns `words; more`, or `words` if either is empty."""
    return f"{words}; {more}" if words and more else words


def _holds(service: InferenceService) -> bool:
    """Returns whether requests are held for a group although no group is wanted now."""
    scaling = service.spec.autoscaling
    return scaling is not None and scaling.scale_to_zero.enabled and not service.spec.suspend


def _whole(snapshot: Snapshot, replicas: int) -> bool:
    """Returns whether as many groups are ready as are wanted."""
    return sum(group.serving for group in staying(snapshot.groups)) >= replicas


def followed(service: InferenceService, seen: PlanInputs, revision: str, now: str) -> RecoveryStatus | None:
    """Returns the recovery state: groups that were given up for their restarts."""
    snapshot = seen.snapshot
    return recovery.followed(snapshot.status.recovery, snapshot.groups, revision, service.spec.restart_policy, now)


def _waits(service: InferenceService, seen: PlanInputs, past: RecoveryStatus | None, now: str) -> PlacementTurn:
    """Returns what keeps new groups from being created now."""
    if seen.back and seen.no_way_back:
        return PlacementTurn(why=seen.no_way_back, left_s=RECORD_LOOK_S, is_stuck=True)
    pause_s = recovery.pause_s(past, service.spec.restart_policy, now)
    if past and pause_s > 0:
        why = f"{past.given_up} groups were given up for their restarts; the next one is created after a pause"
        return PlacementTurn(why=why, left_s=pause_s, told=True, is_stuck=True)
    return seen.turn


def wanted_replicas(service: InferenceService) -> int:
    """Returns how many groups should run; 0 while suspended."""
    if service.spec.suspend:
        return 0
    return FIRST_REPLICAS if service.spec.replicas is None else service.spec.replicas


def assessed(service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> Snapshot:
    """Returns the snapshot with the consequences of nodes, restarts and router reports for its groups."""
    spec = service.spec
    groups = lost_nodes.assess(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now)
    half = admission.given_up(groups, spec.placement.gang.timeout_seconds, now)
    groups = tuple(changed(group, lost=group.lost or half.get(group.uid, "")) for group in groups)
    groups = recovery.assess(groups, fleet, spec.restart_policy, now)
    groups = progress.assess(groups, spec.rollout, now)
    return replace(snapshot, groups=drain.assess(groups, fleet, spec.drain.timeout_seconds, now))


def decide(service: InferenceService, seen: PlanInputs, desired: Desired, now: str) -> Plan:
    """Returns the plan for a service with a valid spec. Executing it twice is harmless."""
    snapshot, scaling = seen.snapshot, seen.scaling
    past = followed(service, seen, desired.revision, now)
    step = next_step(desired, snapshot.groups)
    wished = step.actions if step else ()
    waits = _waits(service, seen, past, now)
    of_groups = _allowed(wished, seen, waits, past)
    if len(of_groups) == len(wished) and not outdated(snapshot.groups, desired):
        waits = FREE  # no group of this service has to wait
    of_groups += _mended(service, seen, of_groups, now)
    actions: list[Action] = []
    if not snapshot.has_replicas:
        actions.append(InitReplicas(FIRST_REPLICAS, "the manifest sets no replicas"))
    is_blind = bool(seen.back and seen.no_way_back)
    actions.append(KeepChildren(desired.replicas, "every service has them", is_blind))
    if service.spec.rollout.on_failure == "Rollback" and rollback.is_whole(snapshot, desired):
        actions.append(KeepRevision(desired.revision, "a later rollout may roll back to it"))
    actions += _noted(snapshot.groups, of_groups)
    actions += [*of_groups, *drain.marks(snapshot.groups, of_groups)]
    actions += lost_nodes.to_end(snapshot.groups, snapshot.nodes, service.spec.restart_policy.node_lost_seconds, now)
    actions += drain.to_end(snapshot.groups, service.spec.drain.timeout_seconds, now)
    if scaling and scaling.write is not None:
        actions.append(SetReplicas(scaling.write, f"{scaling.decision.verdict}: {scaling.decision.why}"))
    actions += [*_gangs(snapshot.groups), *recovery.due(snapshot.groups, snapshot.router, now)]
    empty = tuple(drain.to_empty(snapshot.groups, of_groups))
    tick_s = PANIC_TICK_S if empty or (scaling and scaling.decision.panicking) else TICK_S if scaling else None
    said = _told(service, seen, desired=desired, past=past, waits=waits, now=now)
    again_s = _again_s(service, seen, desired=desired, waits=waits, most_s=tick_s or RESYNC_S, now=now)
    return Plan(actions=tuple(actions), status=said, hear_s=tick_s or HEAR_S, empty=empty, again_s=again_s, in_line=waits.in_line)


def with_plan_errors(actions: Iterable[Action], groups: Iterable[ObservedGroup]) -> tuple[Action, ...]:
    """Returns the actions that depend on no other action; they run even if the API server rejects an object of the service."""
    going = {pod.uid for group in groups if group.terminating for pod in group.pods}
    return tuple(
        action
        for action in actions
        if isinstance(action, RestartGroup | NoteRestarts | SetReplicas)
        or (isinstance(action, DeletePod) and action.uid in going)
    )


def _allowed(
    actions: tuple[GroupAction, ...], seen: PlanInputs, waits: PlacementTurn, past: RecoveryStatus | None
) -> tuple[GroupAction, ...]:
    """Returns the actions without groups that may not be created yet; without a gang scheduler groups are created one by one."""
    avoid = past.nodes if past else ()
    made = [replace(action, avoid=avoid) for action in actions if isinstance(action, CreateGroup)]
    most = 0 if waits.why else 1 if seen.gang == "Fallback" else len(made)
    return (*(action for action in actions if not isinstance(action, CreateGroup)), *made[:most])


def _mended(service: InferenceService, seen: PlanInputs, actions: tuple[GroupAction, ...], now: str) -> tuple[RestartGroup, ...]:
    """Returns restarts of groups that exceeded their startup time, and of groups whose restart is incomplete."""
    policy = service.spec.restart_policy
    touched = {action.uid for action in actions if not isinstance(action, CreateGroup)}
    found = []
    for group in live(seen.snapshot.groups):
        if group.uid in touched:
            continue
        begun = recovery.begun(group, policy)
        if begun:
            pods = tuple((pod.name, pod.uid) for pod in group.pods if pod.name in begun)
            found.append(
                RestartGroup(
                    name=group.name,
                    uid=group.uid,
                    pods=pods,
                    note=group.noted or group.restarts,
                    why="its other pods were replaced",
                )
            )
        elif recovery.overdue(group, policy, now):
            pods = tuple((pod.name, pod.uid) for pod in group.pods)
            why = f"it is not ready after {policy.startup_seconds} s"
            found.append(
                RestartGroup(name=group.name, uid=group.uid, pods=pods, note=recovery.restarted(group, policy, now), why=why)
            )
    return tuple(found)


def _noted(groups: Iterable[ObservedGroup], actions: tuple[GroupAction, ...]) -> list[NoteRestarts]:
    """Returns restart annotations that are due and that no other action writes."""
    touched = {action.uid for action in actions if isinstance(action, DeleteGroup | RestartGroup)}
    return [
        NoteRestarts(group.name, group.uid, group.noted)
        for group in live(groups)
        if group.noted is not None and group.noted != group.restarts and group.uid not in touched
    ]


def _gangs(groups: Iterable[ObservedGroup]) -> list[KeepGang]:
    """Returns gang objects to keep: one may be missing where a pod has no node."""
    return [
        KeepGang(name=group.name, uid=group.uid, kind=group.gang, pods=group.size, why="its pods have no nodes yet")
        for group in live(groups)
        if group.gang in ("Native", "Volcano") and not all(pod.node for pod in group.pods)
    ]


def _told(
    service: InferenceService, seen: PlanInputs, desired: Desired, past: RecoveryStatus | None, waits: PlacementTurn, now: str
) -> Status:
    """Returns the whole status."""
    snapshot, fleet = seen.snapshot, seen.fleet
    said = status(snapshot, desired, fleet, suspended=service.spec.suspend, now=now)
    said = said.model_copy(update={"recovery": past, "gang": seen.gang})
    said = capacity.with_capacity_condition(said, snapshot, waits, seen.ungated, now)
    said = model_conditions.with_model_cached_condition(said, service.spec.model, snapshot, fleet, now)
    said = model_conditions.with_model_status(said, service.spec.model, snapshot, fleet)
    said = traffic.with_balanced_condition(said, fleet, snapshot, now)
    said = traffic.with_compatible_condition(said, fleet, snapshot, now)
    said = traffic.with_speculating_condition(
        said, service.spec.engine, snapshot=snapshot, revision=desired.revision, fleet=fleet, now=now
    )
    said = rollback.with_rollback_condition(said, seen.back, seen.no_way_back, snapshot, now)
    return autoscaler.with_scaling_conditions(said, service, seen.scaling, snapshot, now)


def _again_s(
    service: InferenceService, seen: PlanInputs, desired: Desired, waits: PlacementTurn, most_s: float, now: str
) -> float:
    """Returns the seconds until the next reconcile if nothing wakes the service, at most `most_s`."""
    snapshot, spec = seen.snapshot, service.spec
    left = [group for group in snapshot.groups if not (group.terminating and all(pod.hurried for pod in group.pods))]
    due = [drain.left_s(group, spec.drain.timeout_seconds, now) for group in left]
    due += [
        progress.left_s(snapshot.groups, desired.revision, spec.rollout, now),
        lost_nodes.left_s(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now),
        recovery.left_s(snapshot.groups, spec.restart_policy, now),
        admission.left_s(snapshot.groups, spec.placement.gang.timeout_seconds, now),
        capacity.left_s(snapshot.groups, now),
        waits.left_s if waits.why else None,
        GANG_LOOK_S if _gangs(snapshot.groups) else None,
        PODS_LOOK_S if any(group.short_since for group in live(snapshot.groups)) else None,
        PODS_LOOK_S if snapshot.router and snapshot.router.refused else None,
    ]
    return min([most_s, *(max(left, LEAST_S) for left in due if left is not None)])
