"""All that is to be done for one service now."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import RecoveryStatus, RollbackStatus, Status
from phalanx_operator.decide.conditions import capacity
from phalanx_operator.decide.conditions import compatibility as versions
from phalanx_operator.decide.conditions import model as caching
from phalanx_operator.decide.conditions import model as sourced
from phalanx_operator.decide.conditions import traffic as balanced
from phalanx_operator.decide.conditions import traffic as speculating
from phalanx_operator.decide.conditions.status import status
from phalanx_operator.decide.groups import admission, progress, recovery, rollback
from phalanx_operator.decide.groups import drain as draining
from phalanx_operator.decide.groups import lost_nodes as lost
from phalanx_operator.decide.groups import recovery as retry
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
"""Groups of a service whose manifest does not say."""
RESYNC_S = 600.0
HEAR_S = 30.0
"""Routers say at least this often that they live where no count follows what they say; what begins or ends they say at once."""
LEAST_S = 0.5
PODS_LOOK_S = 10.0
"""How soon to look again why a group, or the router, lacks pods."""
RECORD_LOOK_S = 30.0
"""How soon to look again for the record of the revision that a service went back to."""
GANG_LOOK_S = 30.0
"""How soon to look again at groups whose pods wait to be placed together."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan rests on beside the spec: the snapshot, its groups assessed; what routers and autoscaler say.

    gang: who places the pods of groups that are made now. turn: whether one may be made, where nobody does. ungated: why what
    places the pods of a group together could not be made, if so. back: that the revision of the spec is given up, and the one
    before is followed; no_way_back: why it is not, although it should be. Both: it was followed, and is not known any more.
    """

    snapshot: Snapshot
    fleet: Fleet
    scaling: Scaling | None = None
    gang: str = "None"
    turn: PlacementTurn = FREE
    ungated: str = ""
    back: RollbackStatus | None = None
    no_way_back: str = ""


def most_groups(service: InferenceService, snapshot: Snapshot) -> int:
    """More groups than there may ever be at once, counted with those that are there."""
    replicas = wanted_replicas(service)
    return replicas + service.spec.rollout.surge(replicas) + len(snapshot.groups)


def desired_groups(service: InferenceService, revision: str, names: tuple[str, ...], seen: PlanInputs, now: str) -> Desired:
    """The groups that the spec asks for, and how they may be replaced now."""
    rollout, replicas, snapshot = service.spec.rollout, wanted_replicas(service), seen.snapshot
    surge, unavailable = rollout.surge(replicas), rollout.unavailable(replicas)
    late = _with(progress.late(snapshot.groups, revision, rollout, now), seen.no_way_back)
    late = seen.no_way_back if seen.back and seen.no_way_back else late
    no_room = progress.no_room(snapshot.groups, snapshot.status, revision, rollout, now) if surge else ""
    past = followed(service, seen, revision, now)
    waits = _waits(service, seen, past, now)
    return Desired(
        revision,
        replicas,
        service.spec.router.replicas,
        names,
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
    """These words, and more if there are any of both."""
    return f"{words}; {more}" if words and more else words


def _holds(service: InferenceService) -> bool:
    """Whether requests wait for a group where none is wanted now."""
    scaling = service.spec.autoscaling
    return scaling is not None and scaling.scale_to_zero.enabled and not service.spec.suspend


def _whole(snapshot: Snapshot, replicas: int) -> bool:
    """Whether as many groups are ready as are wanted."""
    return sum(group.serving for group in staying(snapshot.groups)) >= replicas


def followed(service: InferenceService, seen: PlanInputs, revision: str, now: str) -> RecoveryStatus | None:
    """What is remembered of groups that were given up for their restarts."""
    snapshot = seen.snapshot
    return recovery.followed(snapshot.status.recovery, snapshot.groups, revision, service.spec.restart_policy, now)


def _waits(service: InferenceService, seen: PlanInputs, past: RecoveryStatus | None, now: str) -> PlacementTurn:
    """What keeps new groups from being made now, if anything."""
    if seen.back and seen.no_way_back:
        return PlacementTurn(seen.no_way_back, RECORD_LOOK_S, is_stuck=True)
    pause_s = recovery.pause_s(past, service.spec.restart_policy, now)
    if past and pause_s > 0:
        why = f"{past.given_up} groups were given up for their restarts; the next one is made after a pause"
        return PlacementTurn(why, pause_s, told=True, is_stuck=True)
    return seen.turn


def wanted_replicas(service: InferenceService) -> int:
    """How many groups should run: none while suspended."""
    if service.spec.suspend:
        return 0
    return FIRST_REPLICAS if service.spec.replicas is None else service.spec.replicas


def assessed(service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> Snapshot:
    """The snapshot with what nodes, restarts and routers mean for its groups."""
    spec = service.spec
    groups = lost.assess(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now)
    half = admission.given_up(groups, spec.placement.gang.timeout_seconds, now)
    groups = tuple(changed(group, lost=group.lost or half.get(group.uid, "")) for group in groups)
    groups = recovery.assess(groups, fleet, spec.restart_policy, now)
    groups = progress.assess(groups, spec.rollout, now)
    return replace(snapshot, groups=draining.assess(groups, fleet, spec.drain.timeout_seconds, now))


def decide(service: InferenceService, seen: PlanInputs, desired: Desired, now: str) -> Plan:
    """The plan for a service whose spec is valid. Calling it twice with the same arguments does no harm."""
    snapshot, scaling = seen.snapshot, seen.scaling
    past = followed(service, seen, desired.revision, now)
    step = next_step(desired, snapshot.groups)
    wished = step.actions if step else ()
    waits = _waits(service, seen, past, now)
    of_groups = _allowed(wished, seen, waits, past)
    if len(of_groups) == len(wished) and not outdated(snapshot.groups, desired):
        waits = FREE  # nothing of this service has to
    of_groups += _mended(service, seen, of_groups, now)
    actions: list[Action] = []
    if not snapshot.has_replicas:
        actions.append(InitReplicas(FIRST_REPLICAS, "the manifest does not say how many groups"))
    is_blind = bool(seen.back and seen.no_way_back)
    actions.append(KeepChildren(desired.replicas, "every service has them", is_blind))
    if service.spec.rollout.on_failure == "Rollback" and rollback.is_whole(snapshot, desired):
        actions.append(KeepRevision(desired.revision, "a later rollout may go back to it"))
    actions += _noted(snapshot.groups, of_groups)
    actions += [*of_groups, *draining.marks(snapshot.groups, of_groups)]
    actions += lost.to_end(snapshot.groups, snapshot.nodes, service.spec.restart_policy.node_lost_seconds, now)
    actions += draining.to_end(snapshot.groups, service.spec.drain.timeout_seconds, now)
    if scaling and scaling.write is not None:
        actions.append(SetReplicas(scaling.write, f"{scaling.decision.verdict}: {scaling.decision.why}"))
    actions += [*_gangs(snapshot.groups), *retry.due(snapshot.groups, snapshot.router, now)]
    empty = tuple(draining.to_empty(snapshot.groups, of_groups))
    tick_s = PANIC_TICK_S if empty or (scaling and scaling.decision.panicking) else TICK_S if scaling else None
    said = _told(service, seen, desired=desired, past=past, waits=waits, now=now)
    again_s = _again_s(service, seen, desired=desired, waits=waits, most_s=tick_s or RESYNC_S, now=now)
    return Plan(tuple(actions), said, hear_s=tick_s or HEAR_S, empty=empty, again_s=again_s, in_line=waits.in_line)


def with_plan_errors(actions: Iterable[Action], groups: Iterable[ObservedGroup]) -> tuple[Action, ...]:
    """What is to be done even if the API server refuses an object that the service needs: what rests on no other action."""
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
    """The actions without groups that may not be made yet: one after another where nobody places their pods together."""
    avoid = past.nodes if past else ()
    made = [replace(action, avoid=avoid) for action in actions if isinstance(action, CreateGroup)]
    most = 0 if waits.why else 1 if seen.gang == "Fallback" else len(made)
    return (*(action for action in actions if not isinstance(action, CreateGroup)), *made[:most])


def _mended(service: InferenceService, seen: PlanInputs, actions: tuple[GroupAction, ...], now: str) -> tuple[RestartGroup, ...]:
    """Groups of which all pods are to be replaced: those that had their time, and those of which some pods were already."""
    policy = service.spec.restart_policy
    touched = {action.uid for action in actions if not isinstance(action, CreateGroup)}
    found = []
    for group in live(seen.snapshot.groups):
        if group.uid in touched:
            continue
        begun = recovery.begun(group, policy)
        if begun:
            pods = tuple((pod.name, pod.uid) for pod in group.pods if pod.name in begun)
            found.append(RestartGroup(group.name, group.uid, pods, group.noted or group.restarts, "the rest of its pods"))
        elif recovery.overdue(group, policy, now):
            pods = tuple((pod.name, pod.uid) for pod in group.pods)
            why = f"it is not ready after {policy.startup_seconds} s"
            found.append(RestartGroup(group.name, group.uid, pods, recovery.restarted(group, policy, now), why))
    return tuple(found)


def _noted(groups: Iterable[ObservedGroup], actions: tuple[GroupAction, ...]) -> list[NoteRestarts]:
    """Notes that are to be written and are not by anything else that is done now."""
    touched = {action.uid for action in actions if isinstance(action, DeleteGroup | RestartGroup)}
    return [
        NoteRestarts(group.name, group.uid, group.noted)
        for group in live(groups)
        if group.noted is not None and group.noted != group.restarts and group.uid not in touched
    ]


def _gangs(groups: Iterable[ObservedGroup]) -> list[KeepGang]:
    """What places pods together may be missing where some have no node."""
    return [
        KeepGang(group.name, group.uid, group.gang, group.size, "its pods have no nodes yet")
        for group in live(groups)
        if group.gang in ("Native", "Volcano") and not all(pod.node for pod in group.pods)
    ]


def _told(
    service: InferenceService, seen: PlanInputs, desired: Desired, past: RecoveryStatus | None, waits: PlacementTurn, now: str
) -> Status:
    """All that the status says."""
    snapshot, fleet = seen.snapshot, seen.fleet
    said = status(snapshot, desired, fleet, suspended=service.spec.suspend, now=now)
    said = said.model_copy(update={"recovery": past, "gang": seen.gang})
    said = capacity.with_capacity_condition(said, snapshot, waits, seen.ungated, now)
    said = caching.with_model_cached_condition(said, service.spec.model, snapshot, fleet, now)
    said = sourced.with_model_status(said, service.spec.model, snapshot, fleet)
    said = balanced.with_balanced_condition(said, fleet, snapshot, now)
    said = versions.with_compatible_condition(said, fleet, snapshot, now)
    said = speculating.with_speculating_condition(
        said, service.spec.engine, snapshot=snapshot, revision=desired.revision, fleet=fleet, now=now
    )
    said = rollback.with_rollback_condition(said, seen.back, seen.no_way_back, snapshot, now)
    return autoscaler.with_scaling_conditions(said, service, seen.scaling, snapshot, now)


def _again_s(
    service: InferenceService, seen: PlanInputs, desired: Desired, waits: PlacementTurn, most_s: float, now: str
) -> float:
    """Seconds until the next look, if nothing wakes us before: at most `most_s`."""
    snapshot, spec = seen.snapshot, service.spec
    left = [group for group in snapshot.groups if not (group.terminating and all(pod.hurried for pod in group.pods))]
    due = [draining.left_s(group, spec.drain.timeout_seconds, now) for group in left]
    due += [
        progress.left_s(snapshot.groups, desired.revision, spec.rollout, now),
        lost.left_s(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now),
        recovery.left_s(snapshot.groups, spec.restart_policy, now),
        admission.left_s(snapshot.groups, spec.placement.gang.timeout_seconds, now),
        capacity.left_s(snapshot.groups, now),
        waits.left_s if waits.why else None,
        GANG_LOOK_S if _gangs(snapshot.groups) else None,
        PODS_LOOK_S if any(group.short_since for group in live(snapshot.groups)) else None,
        PODS_LOOK_S if snapshot.router and snapshot.router.refused else None,
    ]
    return min([most_s, *(max(left, LEAST_S) for left in due if left is not None)])
