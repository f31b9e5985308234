"""Status of a service: replica counts, `Ready`, `Available`, `Progressing`, `Stalled`, `RouterReady` and the list of groups."""

from collections.abc import Mapping, Sequence

from phalanx_api import labels
from phalanx_api.conditions import Condition, ConditionType, Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.inference_service import FieldError
from phalanx_api.status import MAX_LISTED_GROUPS, GroupPhase, GroupStatus, Status
from phalanx_operator.decide.groups.recovery import last_death
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import Desired, live, outdated, staying
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedPod, ObservedRouter, Snapshot

NOBODY = Fleet()
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_FAILING_REASONS = (
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "Error",
    "OOMKilled",
)


def status(snapshot: Snapshot, desired: Desired, fleet: Fleet = NOBODY, *, suspended: bool, now: str) -> Status:
    """Returns the status of a service with a valid spec, without the conditions of other modules."""
    here = staying(snapshot.groups)
    updated = [group for group in here if group.revision == desired.revision]
    behind = outdated(snapshot.groups, desired)
    settled = len(here) == desired.replicas and not behind and all(group.available for group in here)
    settled = settled and not _draining(snapshot)
    serving = any(group.ready for group in live(snapshot.groups))
    former = snapshot.status
    conditions = former.conditions
    generation = snapshot.generation
    reason, message = _why_not_ready(snapshot, desired)
    if reason is None:
        reason = Reason.SUSPENDED if suspended else Reason.SCALED_TO_ZERO if not desired.replicas else Reason.READY
        message = f"{len(updated)} groups of revision {desired.revision} are ready" if desired.replicas else "no group is wanted"
        if len(updated) < len(here):
            message += f", {len(here) - len(updated)} keep the former one: spec.rollout.partition"
        conditions = set_condition(conditions, "Ready", True, reason=reason, message=message, generation=generation, now=now)
    else:
        conditions = set_condition(conditions, "Ready", False, reason=reason, message=message, generation=generation, now=now)
    holds = desired.holds and not desired.replicas
    conditions = _set_available(conditions, snapshot.router, serving, generation, now, holds=holds)
    conditions = _set_progressing(conditions, desired, settled=settled, behind=bool(behind), generation=generation, now=now)
    conditions = _set_reconciling(conditions, settled, generation, now)
    conditions = _set_router_ready(conditions, snapshot.router, desired.routers, generation, now)
    conditions = _set_stalled(conditions, desired, generation, now)
    return Status(
        observed_generation=generation,
        replicas=len(here),
        ready_replicas=sum(group.ready for group in here),
        available_replicas=_num_available(snapshot, fleet),
        updated_replicas=len(updated),
        draining_replicas=len(_draining(snapshot)),
        restarts=sum(group.recent_restarts for group in live(snapshot.groups)),
        selector=f"{labels.SERVICE}={snapshot.name},{labels.POD_INDEX}=0",
        url=f"http://{snapshot.name}.{snapshot.namespace}.svc",
        current_revision=desired.revision
        if settled and here and len(updated) == len(here)
        else former.current_revision or desired.revision,
        update_revision=desired.revision,
        groups=_listed(snapshot.groups, fleet, former.groups),
        conditions=conditions,
    )


def _num_available(snapshot: Snapshot, fleet: Fleet) -> int:
    """Returns how many available groups a router has in its fleet; without router reports at most the last known number."""
    serving = [group for group in staying(snapshot.groups) if group.available]
    if fleet.asked and not fleet.answered:
        return min(snapshot.status.available_replicas, len(serving))
    return sum(group.name in fleet.groups and fleet.groups[group.name].linked for group in serving)


def _set_progressing(
    conditions: tuple[Condition, ...], desired: Desired, settled: bool, behind: bool, generation: int, now: str
) -> tuple[Condition, ...]:
    """Sets `Progressing`: whether the groups approach the desired state."""
    verdict: bool | None
    if desired.late:
        verdict, reason, message = False, Reason.PROGRESS_DEADLINE_EXCEEDED, desired.late
    elif behind and desired.paused:
        verdict, reason, message = None, Reason.PAUSED, "spec.rollout.paused"
    elif behind and desired.no_room:
        verdict, reason, message = True, Reason.SURGE_UNSCHEDULABLE, desired.no_room
    else:
        verdict, message = True, ""
        reason = Reason.COMPLETE if settled else Reason.ROLLING if behind else Reason.SCALING
    return set_condition(conditions, "Progressing", verdict, reason=reason, message=message, generation=generation, now=now)


def _set_reconciling(conditions: tuple[Condition, ...], settled: bool, generation: int, now: str) -> tuple[Condition, ...]:
    """Sets `Reconciling` with the reason of `Progressing`, only while the groups approach the desired state."""
    moving = find_condition(conditions, "Progressing")
    if settled or moving is None or moving.status != "True":
        return drop_condition(conditions, "Reconciling")
    reason, message = Reason(moving.reason), moving.message
    return set_condition(conditions, "Reconciling", True, reason=reason, message=message, generation=generation, now=now)


def _set_router_ready(
    conditions: tuple[Condition, ...], router: ObservedRouter | None, routers: int, generation: int, now: str
) -> tuple[Condition, ...]:
    """Sets `RouterReady`."""
    settled = _has_routers(router, routers)
    reason, message = (Reason.READY, "") if settled else (Reason.ROUTER_NOT_READY, _count_of_routers(router, routers))
    return set_condition(conditions, "RouterReady", settled, reason=reason, message=message, generation=generation, now=now)


def _has_routers(router: ObservedRouter | None, routers: int) -> bool:
    return router is not None and router.settled and router.wanted == routers


def _count_of_routers(router: ObservedRouter | None, routers: int) -> str:
    why = f": {router.refused}" if router and router.refused else ""
    return f"{router.ready if router else 0} of {routers} routers are ready{why}"


def _set_stalled(conditions: tuple[Condition, ...], desired: Desired, generation: int, now: str) -> tuple[Condition, ...]:
    """Sets `Stalled` while intervention is needed, and drops `Reconciling`: kstatus uses the first of the two."""
    if not desired.late and not desired.spent:
        return drop_condition(conditions, "Stalled")
    conditions = drop_condition(conditions, "Reconciling")
    reason = Reason.RESTART_BUDGET_SPENT if desired.spent else Reason.PROGRESS_DEADLINE_EXCEEDED
    message = desired.spent or desired.late
    return set_condition(conditions, "Stalled", True, reason=reason, message=message, generation=generation, now=now)


def refused(snapshot: Snapshot, reason: Reason, errors: Sequence[FieldError], now: str, *, wanted: int = 0) -> Status:
    """Returns the status for a spec that cannot be followed: the groups stay, and the conditions name the fields. `wanted`:
    desired number of groups, if known."""
    message = "; ".join(f"{error.field}: {error.message}" for error in errors)
    here = staying(snapshot.groups)
    conditions = drop_condition(snapshot.status.conditions, "Reconciling")
    generation = snapshot.generation
    verdicts: list[tuple[ConditionType, bool]] = [("Ready", False), ("Progressing", False), ("Stalled", True)]
    verdicts += [("CapacityAvailable", False)] if len(here) < wanted else []
    for kind, is_true in verdicts:
        conditions = set_condition(conditions, kind, is_true, reason=reason, message=message, generation=generation, now=now)
    conditions = _set_available(conditions, snapshot.router, any(group.ready for group in here), generation, now)
    routers = snapshot.router.wanted if snapshot.router else 1  # from what runs: the desired number may be unknown
    conditions = _set_router_ready(conditions, snapshot.router, routers, generation, now)
    return snapshot.status.model_copy(
        update={
            "observed_generation": generation,
            "replicas": len(here),
            "ready_replicas": sum(group.ready for group in here),
            "available_replicas": min(snapshot.status.available_replicas, sum(group.serving for group in here)),
            "groups": _listed(snapshot.groups, NOBODY, snapshot.status.groups),
            "conditions": conditions,
        }
    )


def _set_available(
    conditions: tuple[Condition, ...],
    router: ObservedRouter | None,
    serving: bool,
    generation: int,
    now: str,
    *,
    holds: bool = False,
) -> tuple[Condition, ...]:
    """Sets `Available`: whether a client would get a response now. `holds`: it would wait for a group to start."""
    has_router = router is not None and router.ready > 0
    reason = Reason.SERVING if has_router else Reason.ROUTER_NOT_READY
    if not serving:
        reason = Reason.HOLDING if holds and has_router else Reason.NO_READY_GROUP
    return set_condition(conditions, "Available", serving and has_router, reason=reason, generation=generation, now=now)


def _why_not_ready(snapshot: Snapshot, desired: Desired) -> tuple[Reason | None, str]:
    """Returns the most severe deviation from the desired state, or None."""
    here = staying(snapshot.groups)
    unready = [group for group in here if not group.ready]
    routers_settled = _has_routers(snapshot.router, desired.routers)
    pods = [pod for group in unready for pod in group.pods if pod.reason]
    pods += [pod for pod in snapshot.router_pods if pod.reason and not routers_settled]
    why = (
        _of_pods(pods, _IMAGE_REASONS, Reason.IMAGE_PULL_FAILED)
        or _of_pods(pods, _FAILING_REASONS, Reason.POD_FAILING)
        or _of_refusals(here, None if routers_settled else snapshot.router)  # existing pods may wait for rejected ones
        or _of_pods(pods, ("Unschedulable",), Reason.INSUFFICIENT_CAPACITY)
    )
    if why:
        return why
    if desired.spent:
        return Reason.RESTART_BUDGET_SPENT, desired.spent
    there = live(snapshot.groups)
    old = sum(group.revision != desired.revision for group in there) - min(desired.partition, _num_old(here, desired))
    if old > 0:
        paused = "; spec.rollout.paused" if desired.paused else ""
        return Reason.ROLLING_OUT, f"{old} of {len(there)} groups are not of revision {desired.revision} yet{paused}"
    if unready or len(here) != desired.replicas:
        return Reason.GROUPS_NOT_READY, f"{len(here) - len(unready)} of {desired.replicas} groups are ready{_short(unready)}"
    if young := [group for group in here if group.young]:
        least = "spec.rollout.minReadySeconds"
        return Reason.GROUPS_NOT_READY, f"{len(here) - len(young)} of {desired.replicas} groups have been ready for {least}"
    if not routers_settled:
        return Reason.ROUTER_NOT_READY, _count_of_routers(snapshot.router, desired.routers)
    return None, ""


def _of_pods(pods: Sequence[ObservedPod], reasons: Sequence[str], answer: Reason) -> tuple[Reason, str] | None:
    return next(((answer, f"pod {pod.name}: {pod.reason}: {pod.message}") for pod in pods if pod.reason in reasons), None)


def _of_refusals(groups: Sequence[ObservedGroup], router: ObservedRouter | None) -> tuple[Reason, str] | None:
    said = [(f"group {group.name}", group.refused) for group in groups]
    said += [("router", router.refused)] if router else []
    for whose, words in said:
        if words:
            return Reason.QUOTA_EXCEEDED if is_quota(words) else Reason.REJECTED, f"{whose}: {words}"
    return None


def is_quota(words: str) -> bool:
    """Returns whether this is the API server's message for an exceeded quota."""
    return "exceeded quota" in words


def _num_old(groups: Sequence[ObservedGroup], desired: Desired) -> int:
    return sum(group.revision != desired.revision for group in groups)


def _short(unready: Sequence[ObservedGroup]) -> str:
    """Returns which group lacks pods: admission may have rejected them, which only the StatefulSet's events report."""
    for group in unready:
        if len(group.pods) < group.size:
            return f"; {group.name} has {len(group.pods)} of {group.size} pods: kubectl describe statefulset {group.name}"
    return ""


def _draining(snapshot: Snapshot) -> list[ObservedGroup]:
    return [group for group in live(snapshot.groups) if group.draining is not None]


def _phase(group: ObservedGroup) -> GroupPhase:
    if group.terminating:
        return "Terminating"
    return "Draining" if group.draining else "Ready" if group.ready else "Starting"


def _reason(group: ObservedGroup, fleet: Fleet) -> str:
    """Returns why the group does not serve; empty if unknown or serving."""
    if group.draining:
        return group.draining.why[:256]
    said = [group.lost, group.refused, *(_words(pod) for pod in group.pods), last_death(group, fleet)]
    return "" if group.ready else next((words[:256] for words in said if words), "")


def _words(pod: ObservedPod) -> str:
    """Returns a pod's reason and message. The scheduler's message changes with the cluster; only conditions carry it."""
    return f"{pod.reason}: {pod.message}" if pod.reason and pod.message and pod.node else pod.reason


def _incarnation(group: ObservedGroup, fleet: Fleet, former: Mapping[str, int]) -> int:
    """Returns the incarnation that routers report; without a report the last known one."""
    seen = fleet.groups.get(group.name)
    return seen.incarnation if seen else former.get(group.name, 0)


def _listed(groups: tuple[ObservedGroup, ...], fleet: Fleet, former: Sequence[GroupStatus]) -> tuple[GroupStatus, ...]:
    """Returns the listed groups: those that are not ready first, at most as many as the schema allows."""
    before = {group.name: group.incarnation for group in former}
    worst_first = sorted(groups, key=lambda group: (group.ready, group.name))
    return tuple(
        GroupStatus(
            name=group.name,
            revision=group.revision,
            phase=_phase(group),
            pods=group.size,
            ready_pods=group.ready_pods,
            nodes=tuple(pod.node for pod in group.pods if pod.node)[:64],
            reason=_reason(group, fleet),
            restarts=group.recent_restarts,
            incarnation=_incarnation(group, fleet, before),
        )
        for group in worst_first[:MAX_LISTED_GROUPS]
    )
