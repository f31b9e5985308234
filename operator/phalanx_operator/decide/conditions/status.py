"""Replica counts, `Ready`, `Progressing`, `Stalled`, `RouterReady` and the list of groups."""

from collections.abc import Mapping, Sequence

from phalanx_api import labels
from phalanx_api.conditions import Condition, ConditionType, Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.inference_service import FieldError
from phalanx_api.status import MAX_LISTED_GROUPS, GroupPhase, GroupStatus, Status
from phalanx_operator.decide.conditions.availability import available_replicas, with_available
from phalanx_operator.decide.groups.recovery import last_death
from phalanx_operator.decide.groups.rollout import disruption_budget
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import DesiredGroups, live_groups, outdated_groups, staying_groups
from phalanx_operator.decide.state.snapshot import (
    ObservedGroup,
    ObservedPod,
    ObservedRouter,
    Snapshot,
    override_condition,
    router_schemes,
)

NO_REPORTS = Fleet()
HOLDS: tuple[ConditionType, ...] = ("ControlPlanePartitioned", "DisruptionsHeld")
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_FAILING_REASONS = (
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "Error",
    "OOMKilled",
)


def service_status(snapshot: Snapshot, desired: DesiredGroups, fleet: Fleet = NO_REPORTS, *, suspended: bool, now: str) -> Status:
    """Returns the status of a valid service, without the conditions of other modules."""
    staying = staying_groups(snapshot.groups)
    updated = [group for group in staying if group.revision == desired.revision]
    outdated = outdated_groups(snapshot.groups, desired)
    is_settled = len(staying) == desired.replicas and not outdated and all(group.available for group in staying)
    is_settled = is_settled and not _draining(snapshot)
    former, generation = snapshot.status, snapshot.generation
    is_true, reason, message = _ready_verdict(snapshot, desired, staying, updated, suspended=suspended)
    conditions = set_condition(
        former.conditions, "Ready", is_true, reason=reason, message=message, generation=generation, now=now
    )
    holds = desired.holds_requests and not desired.replicas
    conditions = with_available(conditions, snapshot, fleet, now, holds=holds)
    conditions = _set_progressing(
        conditions, desired, is_settled=is_settled, is_outdated=bool(outdated), generation=generation, now=now
    )
    conditions = _set_reconciling(conditions, is_settled, generation, now)
    conditions = _set_router_ready(conditions, snapshot.router, desired.routers, generation, now)
    conditions = _set_stalled(conditions, desired, generation, now)
    is_rolled_out = is_settled and staying and len(updated) == len(staying)
    return Status(
        observed_generation=generation,
        replicas=len(staying),
        ready_replicas=sum(group.ready for group in staying),
        available_replicas=available_replicas(snapshot, fleet),
        updated_replicas=len(updated),
        draining_replicas=len(_draining(snapshot)),
        disruptions_allowed=_disruptions_allowed(staying, desired),
        restarts=sum(group.assessment.recent_restarts for group in live_groups(snapshot.groups)),
        selector=f"{labels.SERVICE}={snapshot.name},{labels.POD_INDEX}=0",
        url=_url(snapshot, desired),
        current_revision=desired.revision if is_rolled_out else former.current_revision or desired.revision,
        update_revision=desired.revision,
        surge_failure_time=(former.surge_failure_time or now) if desired.no_surge_reason else "",
        groups=_listed_groups(snapshot.groups, fleet, former.groups),
        conditions=conditions,
    )


def _disruptions_allowed(staying: Sequence[ObservedGroup], desired: DesiredGroups) -> int:
    """Returns the budget of the next step. A rollout with a surge takes no group before a successor serves."""
    held = any(group.assessment.hold or group.assessment.kept_reason for group in staying)
    if desired.hold_reason or held or not desired.replicas:
        return 0
    has_surge = desired.max_surge > 0 and bool(outdated_groups(staying, desired))
    return disruption_budget(staying, desired.replicas - (0 if has_surge else desired.max_unavailable))


def _url(snapshot: Snapshot, desired: DesiredGroups) -> str:
    schemes = router_schemes(snapshot.router_pods, wants_https=desired.wants_https)
    scheme = "https://" if schemes.is_https else "http://"
    return f"{scheme}{snapshot.name}.{snapshot.namespace}.svc{desired.path}"


def _ready_verdict(
    snapshot: Snapshot,
    desired: DesiredGroups,
    staying: Sequence[ObservedGroup],
    updated: Sequence[ObservedGroup],
    *,
    suspended: bool,
) -> tuple[bool, Reason, str]:
    reason, message = _unready_reason(snapshot, desired)
    if reason is not None:
        return False, reason, message
    reason = Reason.SUSPENDED if suspended else Reason.SCALED_TO_ZERO if not desired.replicas else Reason.READY
    message = f"{len(updated)} groups of revision {desired.revision} are ready" if desired.replicas else "no group is wanted"
    if len(updated) < len(staying):
        message += f", {len(staying) - len(updated)} keep the former one: spec.rollout.partition"
    return True, reason, message


def _set_progressing(
    conditions: tuple[Condition, ...],
    desired: DesiredGroups,
    is_settled: bool,
    is_outdated: bool,
    generation: int,
    now: str,
) -> tuple[Condition, ...]:
    verdict: bool | None
    if desired.late_reason:
        verdict, reason, message = False, Reason.PROGRESS_DEADLINE_EXCEEDED, desired.late_reason
    elif desired.no_surge_reason:
        verdict, reason, message = True, Reason.SURGE_UNSCHEDULABLE, desired.no_surge_reason
    elif is_outdated and desired.paused:
        verdict, reason, message = None, Reason.PAUSED, "spec.rollout.paused"
    else:
        verdict, message = True, ""
        reason = Reason.COMPLETE if is_settled else Reason.ROLLING if is_outdated else Reason.SCALING
    return set_condition(conditions, "Progressing", verdict, reason=reason, message=message, generation=generation, now=now)


def _set_reconciling(conditions: tuple[Condition, ...], is_settled: bool, generation: int, now: str) -> tuple[Condition, ...]:
    progressing = find_condition(conditions, "Progressing")
    if is_settled or progressing is None or progressing.status != "True":
        return drop_condition(conditions, "Reconciling")
    reason, message = Reason(progressing.reason), progressing.message
    return set_condition(conditions, "Reconciling", True, reason=reason, message=message, generation=generation, now=now)


def _set_router_ready(
    conditions: tuple[Condition, ...], router: ObservedRouter | None, routers: int, generation: int, now: str
) -> tuple[Condition, ...]:
    is_settled = _has_routers(router, routers)
    reason, message = (Reason.READY, "") if is_settled else (Reason.ROUTER_NOT_READY, _router_count(router, routers))
    return set_condition(conditions, "RouterReady", is_settled, reason=reason, message=message, generation=generation, now=now)


def _has_routers(router: ObservedRouter | None, routers: int) -> bool:
    return router is not None and router.is_settled and router.replicas == routers


def _router_count(router: ObservedRouter | None, routers: int) -> str:
    rejection = f": {router.rejection}" if router and router.rejection else ""
    return f"{router.ready if router else 0} of {routers} routers are ready{rejection}"


def _set_stalled(conditions: tuple[Condition, ...], desired: DesiredGroups, generation: int, now: str) -> tuple[Condition, ...]:
    """Drops `Reconciling` too: kstatus uses the first of the two."""
    if not desired.late_reason and not desired.spent_reason:
        return drop_condition(conditions, "Stalled")
    conditions = drop_condition(conditions, "Reconciling")
    reason = Reason.RESTART_BUDGET_SPENT if desired.spent_reason else Reason.PROGRESS_DEADLINE_EXCEEDED
    message = desired.spent_reason or desired.late_reason
    return set_condition(conditions, "Stalled", True, reason=reason, message=message, generation=generation, now=now)


def rejected_status(
    snapshot: Snapshot,
    reason: Reason,
    errors: Sequence[FieldError],
    now: str,
    *,
    fleet: Fleet = NO_REPORTS,
    replicas: int = 0,
    keeps_holds: bool = False,
) -> Status:
    """Returns the status for a spec that cannot be followed. `replicas`: wanted groups, if known.

    keeps_holds: disruptions that the former status holds are still held.
    """
    message = "; ".join(f"{error.field}: {error.message}" for error in errors)
    staying = staying_groups(snapshot.groups)
    conditions = snapshot.status.conditions
    dropped: tuple[ConditionType, ...] = ("Reconciling", *(() if keeps_holds else HOLDS))
    for kind in dropped:
        conditions = drop_condition(conditions, kind)
    generation = snapshot.generation
    verdicts: list[tuple[ConditionType, bool]] = [("Ready", False), ("Progressing", False), ("Stalled", True)]
    verdicts += [("CapacityAvailable", False)] if len(staying) < replicas else []
    for kind, is_true in verdicts:
        conditions = set_condition(conditions, kind, is_true, reason=reason, message=message, generation=generation, now=now)
    conditions = with_available(conditions, snapshot, fleet, now)
    routers = snapshot.router.replicas if snapshot.router else 1  # the number in an invalid spec is unknown
    conditions = _set_router_ready(conditions, snapshot.router, routers, generation, now)
    return snapshot.status.model_copy(
        update={
            "observed_generation": generation,
            "replicas": len(staying),
            "ready_replicas": sum(group.ready for group in staying),
            "disruptions_allowed": 0,
            "available_replicas": min(snapshot.status.available_replicas, sum(group.available for group in staying)),
            "groups": _listed_groups(snapshot.groups, NO_REPORTS, snapshot.status.groups),
            "conditions": conditions,
        }
    )


def with_failed_call(status: Status, error: str, snapshot: Snapshot, now: str) -> Status:
    """Returns the status while a call of each reconcile fails: as observed, without what follows from actions.

    `Stalled` stays alone, because it needs a person.
    """
    former, conditions = snapshot.status, status.conditions
    if not find_condition(conditions, "Stalled"):
        conditions = override_condition(
            conditions, "Reconciling", is_true=True, reason=Reason.RETRYING, message=error, snapshot=snapshot, now=now
        )
    kept = {"observed_generation": former.observed_generation, "recovery": former.recovery, "autoscaling": former.autoscaling}
    return status.model_copy(update=kept | {"conditions": conditions})


def _unready_reason(snapshot: Snapshot, desired: DesiredGroups) -> tuple[Reason | None, str]:
    """Returns the most severe deviation from the desired state."""
    staying = staying_groups(snapshot.groups)
    unready = [group for group in staying if not group.ready]
    has_routers = _has_routers(snapshot.router, desired.routers)
    pods = [pod for group in unready for pod in group.pods if pod.reason]
    pods += [pod for pod in snapshot.router_pods if pod.reason and not has_routers]
    failure = (
        _pod_failure(pods, _IMAGE_REASONS, Reason.IMAGE_PULL_FAILED)
        or _pod_failure(pods, _FAILING_REASONS, Reason.POD_FAILING)
        or _rejection(staying, None if has_routers else snapshot.router)  # existing pods may wait for rejected ones
        or _pod_failure(pods, ("Unschedulable",), Reason.INSUFFICIENT_CAPACITY)
    )
    if failure:
        return failure
    if desired.spent_reason:
        return Reason.RESTART_BUDGET_SPENT, desired.spent_reason
    if kept := [group for group in unready if _kept_reason(group)]:
        more = f"; {len(kept) - 1} more groups are kept likewise" if len(kept) > 1 else ""
        return Reason.UNREACHABLE, f"group {kept[0].name} is kept: {_kept_reason(kept[0])}{more}"
    live = live_groups(snapshot.groups)
    old = _num_old(live, desired) - min(desired.partition, _num_old(staying, desired))
    if old > 0:
        paused = "; spec.rollout.paused" if desired.paused else ""
        return Reason.ROLLING_OUT, f"{old} of {len(live)} groups are not of revision {desired.revision} yet{paused}"
    if unready or len(staying) != desired.replicas:
        ready = len(staying) - len(unready)
        return Reason.GROUPS_NOT_READY, f"{ready} of {desired.replicas} groups are ready{_unready_cause(unready)}"
    available = sum(group.available for group in staying)
    if available < len(staying):
        field = "spec.rollout.minReadySeconds"
        return Reason.GROUPS_NOT_READY, f"{available} of {desired.replicas} groups have been ready for {field}"
    if not has_routers:
        return Reason.ROUTER_NOT_READY, _router_count(snapshot.router, desired.routers)
    return None, ""


def _kept_reason(group: ObservedGroup) -> str:
    return group.assessment.alive_reason or group.assessment.kept_reason


def _pod_failure(pods: Sequence[ObservedPod], reasons: Sequence[str], answer: Reason) -> tuple[Reason, str] | None:
    return next(((answer, f"pod {pod.name}: {pod.reason}: {pod.message}") for pod in pods if pod.reason in reasons), None)


def _rejection(groups: Sequence[ObservedGroup], router: ObservedRouter | None) -> tuple[Reason, str] | None:
    rejections = [(f"group {group.name}", group.rejection) for group in groups]
    rejections += [("router", router.rejection)] if router else []
    for owner, message in rejections:
        if message:
            return Reason.QUOTA_EXCEEDED if is_quota_error(message) else Reason.REJECTED, f"{owner}: {message}"
    return None


def is_quota_error(message: str) -> bool:
    """Returns whether the message is about an exceeded quota."""
    return "exceeded quota" in message


def _num_old(groups: Sequence[ObservedGroup], desired: DesiredGroups) -> int:
    return sum(group.revision != desired.revision for group in groups)


def _unready_cause(unready: Sequence[ObservedGroup]) -> str:
    for group in unready:
        if group.refusals:
            return f"; {group.refusals[-1].why}"
        if len(group.pods) < group.size:
            return f"; {group.name} has {len(group.pods)} of {group.size} pods: kubectl describe statefulset {group.name}"
    return ""


def _draining(snapshot: Snapshot) -> list[ObservedGroup]:
    return [group for group in live_groups(snapshot.groups) if group.draining is not None]


def _phase(group: ObservedGroup) -> GroupPhase:
    if group.terminating:
        return "Terminating"
    return "Draining" if group.draining else "Ready" if group.alive else "Starting"


def _group_reason(group: ObservedGroup, fleet: Fleet) -> str:
    if group.draining:
        return group.draining.why[:256]
    causes = [
        *(group.assessment.lost_reason, _kept_reason(group), group.rejection),
        *(_pod_reason(pod) for pod in group.pods),
        *(refusal.why for refusal in group.refusals[-1:]),
        last_death(group, fleet),
    ]
    return "" if group.ready else next((cause[:256] for cause in causes if cause), "")


def _pod_reason(pod: ObservedPod) -> str:
    """Drops the scheduler's message, which changes with the cluster."""
    return f"{pod.reason}: {pod.message}" if pod.reason and pod.message and pod.node else pod.reason


def _incarnation(group: ObservedGroup, fleet: Fleet, former: Mapping[str, int]) -> int:
    report = fleet.groups.get(group.name)
    return report.engine.incarnation if report else former.get(group.name, 0)


def _listed_groups(groups: tuple[ObservedGroup, ...], fleet: Fleet, former: Sequence[GroupStatus]) -> tuple[GroupStatus, ...]:
    incarnations = {group.name: group.incarnation for group in former}
    unready_first = sorted(groups, key=lambda group: (group.ready, group.name))
    return tuple(
        GroupStatus(
            name=group.name,
            revision=group.revision,
            phase=_phase(group),
            pods=group.size,
            ready_pods=group.ready_pods,
            nodes=tuple(pod.node for pod in group.pods if pod.node)[:64],
            reason=_group_reason(group, fleet),
            restarts=group.assessment.recent_restarts,
            incarnation=_incarnation(group, fleet, incarnations),
        )
        for group in unready_first[:MAX_LISTED_GROUPS]
    )
