"""What must hold in every world. Each invariant is a pure function that yields a sentence per violation.

They use their own rules and records, and none of the operator's decisions, so that an error there is not repeated here.
"""

from collections.abc import Callable, Iterator, Sequence

from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.actions import (
    DeleteGroup,
    DeletePod,
    DrainGroup,
    RecordRestarts,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedNode, ObservedPod, age_s, parse_time
from phalanx_operator.kube.http import SILENCE_S
from tests.control.condition_table import ALLOWED, verdicts
from tests.control.kstatus import kstatus
from tests.control.search.cluster import LATE_REPORT_S, REPORT_S
from tests.control.search.history import Look, PlanSeen, actions_of
from tests.control.search.scaling_invariants import (
    clock_changes_scale_nothing_in,
    no_scale_down_without_metrics,
    only_internal_scaling_writes,
    requests_keep_a_group,
    routers_take_the_newest_policy,
    scaling_stays_in_bounds,
)
from tests.control.search.simulated_routers import LINK_S

LookInvariant = Callable[[Look], Iterator[str]]
TOGETHER_S, PARTITION_S, EVIDENCE_S, YOUNG_S, RETURN_S = 120.0, 600.0, 40.0, 20.0, 60.0


def never_above_surge(look: Look) -> Iterator[str]:
    """A group is created only below `replicas` and the surge, among those that the operator observes or has created."""
    if look.plan is None:
        return
    replicas = 0 if look.plan.service.spec.suspend else look.plan.service.spec.replicas or 0
    limit = replicas + look.plan.service.spec.rollout.surge(replicas)
    observed = {group.uid for group in look.plan.snapshot.groups}
    created = set(look.created)
    for write in look.done:
        if (write.call.verb, write.call.plural) == ("create", "statefulsets"):
            created |= {write.after[write.call.name].uid} if write.call.name in write.after else set()
            live = sum(group.is_live and group.uid in observed | created for group in write.after.values())
            if live > limit:
                yield f"{write.call.name} is group {live} of {limit}"


def never_below_availability(look: Look) -> Iterator[str]:
    """The operator takes no serving group away below `replicas - maxUnavailable`, over all causes together.

    Serving: available for the operator, and neither drained nor deleted as far as it observes or has written itself. A drain
    that a user requests does not count as the operator's, but its group no longer serves.
    """
    plan = look.plan
    if plan is None:
        return
    replicas = 0 if plan.service.spec.suspend else plan.service.spec.replicas or 0
    least = replicas - plan.service.spec.rollout.unavailable(replicas) if replicas else 0
    serving = {g.uid for g in plan.snapshot.groups if g.available and not (g.terminating or g.draining)} - look.taken
    serving -= {action.uid for action in actions_of(look, DrainGroup) if action.purpose == "asked"}
    own = {action.uid for action in actions_of(look, DrainGroup, DeleteGroup, RestartGroup) if action.uid in serving}
    left = len(serving - own)
    if own and left < min(len(serving), least):
        yield f"{sorted(own)} leave: {left} of {len(serving)} serving groups are left, at least {least} must serve"


def no_group_leaves_without_cause(look: Look) -> Iterator[str]:
    """A deleted group is drained, lost, of an old revision, or one too many; a ready one is drained.

    A group that is not ready is deleted in the same pass in which the operator reads that a user asks to drain it.
    """
    for action in actions_of(look, DeleteGroup):
        group, plan = look.group(action.uid), look.plan
        assert plan is not None
        if group is None:
            yield f"{action.name} is deleted, but not observed"
        elif group.ready and not _is_drained(group, plan):
            yield f"{action.name} is deleted while it is ready and not drained"
        elif not (group.ready or group.draining or _is_asked(group, plan) or _is_lost(group, plan) or _is_surplus(group, plan)):
            yield f"{action.name} is deleted: {action.why}, which nothing shows"


def _is_asked(group: ObservedGroup, plan: PlanSeen) -> bool:
    """Returns whether a user asks to drain it. A request that is older than the group concerns a former group of its name."""
    age = age_s(group.created, plan.now) or 0.0
    return age > plan.fleet.drain_requests.get(group.name, age)


def _is_drained(group: ObservedGroup, plan: PlanSeen) -> bool:
    age = age_s(group.draining.since, plan.now) if group.draining else None
    if group.draining is None:
        return False
    is_empty = plan.fleet.answered >= plan.fleet.polled and group.name in plan.fleet.evacuated
    return not plan.fleet.polled or age is None or age >= plan.service.spec.drain.timeout_seconds or is_empty


def _is_lost(group: ObservedGroup, plan: PlanSeen) -> bool:
    policy = plan.service.spec.restart_policy
    times = [age_s(n.since, plan.now) for p in group.pods if (n := plan.snapshot.nodes.get(p.node)) and not n.ready]
    is_silent = any(age is not None and age >= policy.node_lost_seconds for age in times)
    unplaced = [age_s(pod.created or group.created, plan.now) or 0.0 for pod in group.pods if not pod.node]
    unplaced += [age_s(group.incomplete_since, plan.now) or 0.0] if group.incomplete_since else []
    is_unplaced = max(unplaced, default=0.0) >= plan.service.spec.placement.gang.timeout_seconds
    ages = [age_s(pod.ends_at, plan.now) for pod in group.pods if pod.terminating]
    is_stuck = any(age is not None and age >= policy.node_lost_seconds for age in ages)
    return is_silent or is_stuck or is_unplaced or group.assessment.recent_restarts > policy.max_group_restarts


def _is_surplus(group: ObservedGroup, plan: PlanSeen) -> bool:
    replicas = 0 if plan.service.spec.suspend else plan.service.spec.replicas or 0
    staying = sum(not (other.terminating or other.draining) for other in plan.snapshot.groups)
    return group.revision != plan.revision or staying > replicas


def no_stream_is_cut(look: Look) -> Iterator[str]:
    """A serving group with streams is deleted only after its drain timeout, or if it is unready for the operator."""
    if look.has_frozen_router:
        return
    for action in actions_of(look, DeleteGroup):
        group, plan = look.group(action.uid), look.plan
        true = look.before.get(action.name)
        if plan is None or group is None or true is None or true.uid != action.uid or not plan.fleet.polled:
            continue
        age = age_s(group.draining.since, plan.now) if group.draining else 0.0
        is_early = age is not None and age < plan.service.spec.drain.timeout_seconds
        if group.ready and true.is_serving and true.streams and is_early:
            yield f"{action.name} is deleted with {true.streams} streams: {action.why}"


def routers_evidence_keeps_groups(look: Look) -> Iterator[str]:
    """A group that a router reports to serve is not deleted for a silent node."""
    for action in actions_of(look, DeleteGroup):
        group, plan = look.group(action.uid), look.plan
        if plan is None or group is None or group.draining or any(pod.terminating for pod in group.pods):
            continue
        report = plan.fleet.groups.get(group.name)
        is_alive = report is not None and report.load_age_s is not None and report.load_age_s <= EVIDENCE_S
        if is_alive and any((n := plan.snapshot.nodes.get(pod.node)) and not n.ready for pod in group.pods):
            yield f"{action.name} is deleted, though routers report that it serves: {action.why}"


def young_routers_end_no_group(look: Look) -> Iterator[str]:
    """A group that serves in truth on a silent node is not deleted while every router that answers is too young to know it."""
    for action in actions_of(look, DeleteGroup):
        group, plan, true = look.group(action.uid), look.plan, look.before.get(action.name)
        if plan is None or group is None or group.draining or true is None or not true.is_serving:
            continue
        ages = [age_s(pod.ready_since, plan.now) for pod in plan.snapshot.router_pods if pod.uid in plan.fleet.answered_by]
        is_young = bool(ages) and all(age is not None and 0 <= age < LINK_S for age in ages)
        if is_young and any((n := plan.snapshot.nodes.get(pod.node)) and not n.ready for pod in group.pods):
            yield f"{action.name} is deleted, though only routers answer that have started {ages} s ago: {action.why}"


def routers_that_may_run_are_asked(look: Look) -> Iterator[str]:
    """The operator counts reports of ready routers, and of those that only their kubelets have yet to report."""
    if look.plan is None:
        return
    plan, fleet = look.plan, look.plan.fleet
    silent = {node.name for node in plan.snapshot.nodes.values() if not node.ready}
    routers = [pod for pod in plan.snapshot.router_pods if pod.ip]
    may_run = [
        pod.name for pod in routers if (pod.ready and not pod.terminating) or pod.node in silent or _awaits_report(pod, plan)
    ]
    if fleet.polled + fleet.unanswered < len(may_run):
        yield f"{fleet.polled + fleet.unanswered} routers are asked, {may_run} may run"


def nothing_is_deleted_in_a_partition(look: Look) -> Iterator[str]:
    """While many nodes are silent together, all groups and pods stay, and the count, except what users' commands take away.

    Users ask to drain a group, or to have fewer: then as many as they ordered stay, and the surge. A count of the operator is no
    order.
    A restart of a group on ready nodes is finished.
    """
    plan = look.plan
    if plan is None or not _is_partitioned(plan):
        return
    silent = {node.name for node in plan.snapshot.nodes.values() if not node.ready}
    deleted = [a for a in actions_of(look, DeleteGroup) if (group := look.group(a.uid)) and not _is_asked_for(group, plan)]
    asked = len(actions_of(look, DeleteGroup)) - len(deleted)
    live = sum(not group.terminating for group in plan.snapshot.groups)
    ordered = 0 if plan.service.spec.suspend else plan.ordered
    least = live if ordered is None else ordered + plan.service.spec.rollout.surge(ordered) if ordered else 0
    if deleted and live - asked - len(deleted) < least:
        yield f"{[(action.name, action.why) for action in deleted]} of {live} groups are deleted in a partition"
    for action in actions_of(look, RestartGroup):
        group = look.group(action.uid)
        is_unfinished = group is not None and {uid for _, uid in action.pods} <= set(group.restarts.pods)
        if group and (not is_unfinished or silent & {pod.node for pod in group.pods}):
            yield f"{action.name} is restarted in a partition: {action.why}"
    for action in actions_of(look, SetReplicas):
        if action.replicas < (plan.service.spec.replicas or 0):
            yield f"the count is lowered to {action.replicas} in a partition: {action.why}"
    for action in actions_of(look, DeletePod):
        pods = {pod.uid: pod for group in plan.snapshot.groups for pod in group.pods}
        if action.grace_s == 0 and action.uid in pods and pods[action.uid].node in silent:
            yield f"pod {action.name} is deleted in a partition: {action.why}"


def _is_asked_for(group: ObservedGroup, plan: PlanSeen) -> bool:
    return _is_asked(group, plan) or (group.draining is not None and group.draining.purpose == "asked")


def _is_partitioned(plan: PlanSeen) -> bool:
    """More than a third of the service's nodes, or of all nodes and one of the service among them, at least 2, became silent
    within two minutes, less than ten minutes ago."""
    names = {pod.node for group in plan.snapshot.groups for pod in group.pods if pod.node in plan.snapshot.nodes}
    nodes, census = [plan.snapshot.nodes[name] for name in names], plan.snapshot.census
    own = [node for node in nodes if not node.ready]
    areas = ((own, len(nodes)), (census.silent, census.total))
    return bool(own) and any(_are_together(silent, total, plan.now) for silent, total in areas)


def _are_together(silent: Sequence[ObservedNode], total: int, now: str) -> bool:
    times, moment = sorted(time.timestamp() for node in silent if (time := parse_time(node.since))), parse_time(now)
    if moment is None or len(times) < 2 or 3 * len(times) <= total or times[-1] - times[0] > TOGETHER_S:
        return False
    return 0 <= moment.timestamp() - times[-1] < PARTITION_S


def pods_are_forced_on_lost_nodes_only(look: Look) -> Iterator[str]:
    """A pod is deleted without grace only on a node that has been silent for `nodeLostSeconds`."""
    for action in actions_of(look, DeletePod):
        if action.grace_s != 0 or look.plan is None:
            continue
        snapshot = look.plan.snapshot
        pods = {pod.uid: pod for group in snapshot.groups for pod in group.pods} | {pod.uid: pod for pod in snapshot.router_pods}
        node = snapshot.nodes.get(pods[action.uid].node) if action.uid in pods else None
        age = age_s(node.since, look.plan.now) if node and not node.ready else None
        if age is None or age < look.plan.service.spec.restart_policy.node_lost_seconds:
            yield f"pod {action.name} is deleted without grace: {action.why}"


def restarts_are_due(look: Look) -> Iterator[str]:
    """Only a group that has been unready for `startupSeconds`, each of whose pods is as old, or whose restart is unfinished, is
    restarted.

    A pod that no kubelet has reported since the return of its node may be ready.
    """
    for action in actions_of(look, RestartGroup):
        group, plan = look.group(action.uid), look.plan
        if group is None or plan is None:
            yield f"{action.name} is restarted, but not observed"
            continue
        ages = [age_s(pod.unready_since or pod.created, plan.now) or 0.0 for pod in group.pods if not pod.ready]
        ages = [max(ages, default=0.0), *(age for pod in group.pods if (age := age_s(pod.created, plan.now)) is not None)]
        is_late = min(ages) >= plan.service.spec.restart_policy.startup_seconds and not _is_unreported(group, plan)
        is_unfinished = {uid for _, uid in action.pods} <= set(group.restarts.pods)
        if group.ready or not (is_late or is_unfinished):
            yield f"{action.name} is restarted: {action.why}"


def _is_unreported(group: ObservedGroup, plan: PlanSeen) -> bool:
    return any(_awaits_report(pod, plan) for pod in group.pods)


def _awaits_report(pod: ObservedPod, plan: PlanSeen, report_s: float = REPORT_S) -> bool:
    """Returns whether a pod's node has just returned, and the pod is unready since before, or since that second."""
    node = plan.snapshot.nodes.get(pod.node)
    if pod.ready or node is None or not node.ready:
        return False
    age, lead = age_s(node.since, plan.now), age_s(pod.unready_since, node.since)
    limit_s = LATE_REPORT_S if pod.is_unreported else report_s
    return age is not None and 0 <= age < limit_s and lead is not None and lead >= 0


def groups_of_stuck_pods_are_replaced(look: Look) -> Iterator[str]:
    """A group is deleted once one of its pods outlasts its grace period by `nodeLostSeconds`, though all nodes have long been
    ready."""
    plan = look.plan
    if plan is None or look.error or plan.snapshot.clock_reason or plan.snapshot.census.silent:
        return
    limit_s = plan.service.spec.restart_policy.node_lost_seconds
    if any((age_s(node.since, plan.now) or 0.0) < PARTITION_S + limit_s for node in plan.snapshot.nodes.values()):
        return
    deleted = {action.uid for action in actions_of(look, DeleteGroup)}
    for group in plan.snapshot.groups:
        ages = [age_s(pod.ends_at, plan.now) or 0.0 for pod in group.pods if pod.terminating]
        if max(ages, default=0.0) >= limit_s and not group.terminating and group.uid not in deleted:
            yield f"{group.name} waits for a pod that does not end"


def refused_groups_are_given_up(look: Look) -> Iterator[str]:
    """A group whose pods kubelets have refused more than `maxGroupRestarts` times in a short time is deleted, or its restarts
    count until the pause after another one is over."""
    plan = look.plan
    if plan is None or look.error:
        return
    policy = plan.service.spec.restart_policy
    for group in plan.snapshot.groups:
        ages = [age_s(refusal.at, plan.now) for refusal in group.refusals]
        count = sum(age is not None and 0 <= age < policy.window_seconds for age in ages)
        if count > policy.max_group_restarts >= group.assessment.recent_restarts and not group.terminating:
            yield f"pods of {group.name} were refused {count} times, {group.assessment.recent_restarts} count"


def paused_rollouts_replace_nothing(look: Look) -> Iterator[str]:
    """While `rollout.paused`, no serving group is drained for its revision."""
    for action in actions_of(look, DrainGroup):
        if look.plan and look.plan.service.spec.rollout.paused and action.purpose == "revision":
            yield f"{action.name} is drained while the rollout is paused"


def every_action_has_a_reason(look: Look) -> Iterator[str]:
    """Each action says why."""
    for action in look.plan.actions if look.plan else ():
        if not isinstance(action, RecordRestarts) and len(action.why.strip(" ;:")) < 4:
            yield f"{action} has no reason"


def only_own_objects_change(look: Look) -> Iterator[str]:
    """A reconcile writes and deletes only objects of its service."""
    yield from (f"{w.call.verb} {w.call.plural} {w.call.name}" for w in look.done if w.call.service not in (look.key, ("", "")))


def conditions_agree(look: Look) -> Iterator[str]:
    """A written status is in the table of conditions, agrees with kstatus, and claims what the snapshot shows."""
    if look.service is None or not any(write.call.plural == "inferenceservices/status" for write in look.done):
        return
    status = Status.model_validate(look.service.get("status", {}))
    found = {condition.type: condition.status for condition in status.conditions}
    outside = verdicts(status.conditions) - ALLOWED
    if outside:
        yield f"unknown conditions {sorted(outside)}"
    is_ready = found.get("Ready") == "True"
    if {"Stalled", "Reconciling"} <= set(found):
        yield "Stalled and Reconciling contradict each other"
    if is_ready and (found.get("Stalled") == "True" or kstatus(look.service) == "Failed"):
        yield "Ready and Stalled contradict each other"
    if is_ready and found.get("Available") == "False" and status.replicas:
        yield "Ready, but not Available"
    yield from _claims(look, status, is_ready)


def _claims(look: Look, status: Status, is_ready: bool) -> Iterator[str]:
    plan = look.plan
    if plan is None:
        return
    replicas = 0 if plan.service.spec.suspend else plan.service.spec.replicas or 0
    staying = [group for group in plan.snapshot.groups if not (group.terminating or group.draining)]
    ready = sum(group.ready for group in staying)
    if is_ready and (ready != replicas or len(staying) != replicas):
        yield f"Ready with {ready} ready groups of {replicas}"
    progressing = find_condition(status.conditions, "Progressing")
    available = sum(group.available for group in staying)  # on silent nodes too, while routers report that they serve
    if progressing and progressing.reason == "Complete" and available < replicas:
        yield f"Complete with {available} available groups of {replicas}"
    if status.ready_replicas > len(plan.snapshot.groups) or status.available_replicas > status.replicas:
        yield "the counts of the status exceed the groups"
    silent = {node.name for node in plan.snapshot.nodes.values() if not node.ready}
    partition = find_condition(status.conditions, "ControlPlanePartitioned")
    if partition and not silent and not plan.snapshot.census.silent:
        ages = [age_s(node.since, plan.now) for node in plan.snapshot.nodes.values()]
        seen = age_s(partition.last_transition_time, plan.now)  # maybe by another leader, whose watches are not late
        if not any(age < 120 + LATE_REPORT_S for age in ages if age is not None) and (seen is None or seen >= SILENCE_S):
            yield "partitioned without a silent node"


def availability_follows_evidence(look: Look) -> Iterator[str]:
    """A written `Available` is true with a ready router and a group that is ready, or as long as routers report that a group on
    a silent node serves, or one beside routers on silent nodes, and not all of them shut down; before the first answers to a new
    operator, or of routers that have just started, either may hold for groups that were ready before."""
    plan = look.plan
    if plan is None or plan.fleet.is_new or not any(write.call.plural == "inferenceservices/status" for write in look.done):
        return
    live = [group for group in plan.snapshot.groups if not group.terminating]
    reported = [group for group in live if _is_reported_to_serve(group, plan)] if _accepts_requests(plan) else []
    has_router = plan.snapshot.router is not None and plan.snapshot.router.ready > 0
    is_serving = bool(reported) or (has_router and any(group.ready for group in live))
    status = Status.model_validate((look.service or {}).get("status", {}))
    found = find_condition(status.conditions, "Available")
    ages = [age_s(pod.ready_since, plan.now) for pod in plan.snapshot.router_pods if pod.uid in plan.fleet.answered_by]
    is_awaited = all(age is not None and age < YOUNG_S for age in ages) and any(
        all(pod.ready or pod.is_unreported for pod in group.pods) for group in live
    )
    if found and (found.status == "True") != is_serving and not (is_awaited and not reported):
        yield f"Available is {found.status}, {found.reason}; {[group.name for group in reported]} are reported to serve"
    if found and found.reason == "NodesSilent" and not find_condition(status.conditions, "ControlPlanePartitioned"):
        yield "Available names a partition that no condition shows"


def _accepts_requests(plan: PlanSeen) -> bool:
    """Returns whether a router that answers does not shut down: it is not deleted, or no kubelet ends it."""
    silent = {node.name for node in plan.snapshot.nodes.values() if not node.ready}
    leaving = {
        pod.uid
        for pod in plan.snapshot.router_pods
        if pod.terminating and pod.node not in silent and not _awaits_report(pod, plan, RETURN_S)
    }
    return bool(plan.fleet.answered_by - leaving)


def _is_reported_to_serve(group: ObservedGroup, plan: PlanSeen) -> bool:
    report, nodes = plan.fleet.groups.get(group.name), plan.snapshot.nodes
    if report is None or report.load_age_s is None or report.load_age_s > EVIDENCE_S:
        return False
    is_silent = any(
        pod.is_unreported or (pod.node in nodes and not nodes[pod.node].ready) or _awaits_report(pod, plan, RETURN_S)
        for pod in group.pods
    )
    return group.ready or (is_silent and not any(pod.terminating for pod in group.pods))


LOOK_INVARIANTS: tuple[LookInvariant, ...] = (
    never_above_surge,
    never_below_availability,
    no_group_leaves_without_cause,
    no_stream_is_cut,
    routers_evidence_keeps_groups,
    young_routers_end_no_group,
    routers_that_may_run_are_asked,
    nothing_is_deleted_in_a_partition,
    pods_are_forced_on_lost_nodes_only,
    restarts_are_due,
    groups_of_stuck_pods_are_replaced,
    refused_groups_are_given_up,
    paused_rollouts_replace_nothing,
    every_action_has_a_reason,
    scaling_stays_in_bounds,
    requests_keep_a_group,
    routers_take_the_newest_policy,
    clock_changes_scale_nothing_in,
    only_internal_scaling_writes,
    no_scale_down_without_metrics,
    only_own_objects_change,
    conditions_agree,
    availability_follows_evidence,
)
