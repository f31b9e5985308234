"""All that is to be done for one service now."""

from dataclasses import dataclass, replace

from phalanx_api.inference_service import InferenceService
from phalanx_operator.decide import autoscaler, balanced, draining, lost, versions
from phalanx_operator.decide.actions import Action, InitReplicas, KeepChildren, Plan, SetReplicas
from phalanx_operator.decide.autoscaler import Scaling
from phalanx_operator.decide.fleet import Fleet
from phalanx_operator.decide.groups import Desired
from phalanx_operator.decide.rollout import next_step
from phalanx_operator.decide.scale import PANIC_TICK_S, TICK_S
from phalanx_operator.decide.snapshot import Snapshot
from phalanx_operator.decide.status import status

FIRST_REPLICAS = 1
"""Groups of a service whose manifest does not say."""
RESYNC_S = 600.0
LEAST_S = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """What a plan rests on beside the spec: the snapshot, its groups assessed; what routers and autoscaler say."""

    snapshot: Snapshot
    fleet: Fleet
    scaling: Scaling | None = None


def desired_groups(service: InferenceService, revision: str, names: tuple[str, ...]) -> Desired:
    """The groups that the spec asks for."""
    return Desired(revision, wanted_replicas(service), service.spec.router.replicas, names)


def wanted_replicas(service: InferenceService) -> int:
    """How many groups should run: none while suspended."""
    if service.spec.suspend:
        return 0
    return FIRST_REPLICAS if service.spec.replicas is None else service.spec.replicas


def assessed(service: InferenceService, snapshot: Snapshot, fleet: Fleet, now: str) -> Snapshot:
    """The snapshot with what nodes and routers mean for its groups."""
    spec = service.spec
    groups = lost.assess(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now)
    return replace(snapshot, groups=draining.assess(groups, fleet, spec.drain.timeout_seconds, now))


def decide(service: InferenceService, seen: Seen, desired: Desired, now: str) -> Plan:
    """The plan for a service whose spec is valid. Calling it twice with the same arguments does no harm."""
    snapshot, scaling = seen.snapshot, seen.scaling
    actions: list[Action] = []
    if not snapshot.has_replicas:
        actions.append(InitReplicas(FIRST_REPLICAS, "the manifest does not say how many groups"))
    actions.append(KeepChildren(desired.replicas, "every service has them"))
    step = next_step(desired, snapshot.groups)
    of_groups = step.actions if step else ()
    actions += [*of_groups, *draining.marks(snapshot.groups, of_groups)]
    actions += lost.to_end(snapshot.groups, snapshot.nodes, service.spec.restart_policy.node_lost_seconds, now)
    actions += draining.to_end(snapshot.groups, service.spec.drain.timeout_seconds, now)
    if scaling and scaling.write is not None:
        actions.append(SetReplicas(scaling.write, f"{scaling.decision.verdict}: {scaling.decision.why}"))
    said = status(snapshot, desired, suspended=service.spec.suspend, now=now)
    said = balanced.told(said, seen.fleet, snapshot, now)
    said = versions.told(said, seen.fleet, snapshot, now)
    said = autoscaler.told(said, service, scaling, snapshot, now)
    empty = tuple(draining.to_empty(snapshot.groups, of_groups))
    urgent = bool(empty) or (scaling is not None and scaling.decision.panicking)
    return Plan(tuple(actions), said, empty, _again_s(service, seen, urgent, now), urgent)


def _again_s(service: InferenceService, seen: Seen, urgent: bool, now: str) -> float:
    """Seconds until the next look, if nothing wakes us before."""
    snapshot, spec = seen.snapshot, service.spec
    due = [draining.left_s(group, spec.drain.timeout_seconds, now) for group in snapshot.groups]
    due.append(lost.left_s(snapshot.groups, snapshot.nodes, spec.restart_policy.node_lost_seconds, now))
    every_s = PANIC_TICK_S if urgent else TICK_S if seen.scaling else RESYNC_S
    return min([every_s, *(max(left, LEAST_S) for left in due if left is not None)])
