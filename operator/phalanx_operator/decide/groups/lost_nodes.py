"""Decides which groups are lost with a node, and which of their pods to delete.

A silent node may only be cut off from the control plane. The first rule that applies decides:

    its nodes are ready                                                 not lost
    many nodes are silent (`partition`)                                 not lost
    a pod is deleted: routers send it no more requests                  as the control plane reports its node
    a router receives its load reports, at most `EVIDENCE_S` ago        alive: it stays, whatever other routers report
    no router had time to answer, as after a start of the operator      alive, until one answers or fails to
    it was ready before, and all routers that answer have just started  alive, until one had `FIRST_REPORTS_S` to link to groups
    a node is not ready for `nodeLostSeconds`                           lost

A group that is alive on a node that has not been ready for `nodeLostSeconds` gets a successor if `maxSurge` allows, and leaves
once that serves (`rollout`).

A node that is ready again counts as silent for `RETURN_S` for a pod that has been unready since before: its kubelet has yet to
report the pod. Otherwise the pod's group would be deleted or restarted, and reports of a router there would not count. While the
pod's conditions show that no kubelet has reported it, this lasts for `LONGEST_S`, and as long as routers report the group. After
a partition all groups on silent nodes are kept as long after each return, without evidence.

Routers that restart wait as long as a node: if none has run for `nodeLostSeconds`, the control plane alone decides.

Routers on a lost node are deleted once they do not answer the operator either; their Deployment starts others.

Pods on a lost node are deleted with grace 0: the StatefulSet controller would wait for an unreachable kubelet. One that still
runs cannot join a later group of that name, because each group has its own key.

The StatefulSet controller also waits for a pod that does not end on a ready node: a container runtime hangs, or another client's
finalizer holds the pod. Its group is lost `nodeLostSeconds` after the pod's grace period. The pod is not deleted with grace 0,
because its processes may still have the devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx_operator.decide.groups.partition import LONGEST_S, partition_reason
from phalanx_operator.decide.state.actions import DeletePod
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import NodeCensus, ObservedGroup, ObservedNode, ObservedPod, age_s, with_assessment

EVIDENCE_S = 40.0
"""Age at which a router's report no longer counts: the longest poll, and time for its answer."""
POLL_S = 10.0
"""Longest poll of routers while a node is silent, so that reports are young when the node counts as lost."""
RETURN_S = 60.0
"""Time for a kubelet to report its pods after its node is ready again."""
FIRST_ANSWER_S = 10.0
"""Time until a new router has answered or failed to."""
FIRST_REPORTS_S = 20.0
"""Time until a router that is ready has linked to the groups that it can reach."""


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The nodes of a service, as the control plane and routers report them."""

    nodes: Mapping[str, ObservedNode]
    limit_s: float
    """`nodeLostSeconds`."""
    now: str
    fleet: Fleet = field(default_factory=Fleet)
    census: NodeCensus = field(default_factory=NodeCensus)
    was_partitioned: bool = False
    """In the former status."""
    routers: Sequence[ObservedPod] = ()


def assess(groups: Iterable[ObservedGroup], states: NodeStates) -> tuple[ObservedGroup, ...]:
    """Sets the state of the groups' nodes."""
    groups = tuple(groups)
    partition = _partition(groups, states)
    return tuple(_assess_group(group, states, partition) for group in groups)


def _partition(groups: Sequence[ObservedGroup], states: NodeStates) -> str:
    """Counts the nodes of groups, then those of routers too: a router that starts elsewhere ends no partition."""
    of_groups = {pod.node for group in groups for pod in group.pods if pod.node in states.nodes}
    of_all = of_groups | {pod.node for pod in states.routers if pod.node in states.nodes}
    counted = ([states.nodes[name] for name in names] for names in (of_groups, of_all))
    found = (partition_reason(own, states.census, states.fleet, states.now) for own in counted)
    return next(filter(None, found), "")


def _assess_group(group: ObservedGroup, states: NodeStates, partition: str) -> ObservedGroup:
    silent = _silent_nodes(group, states)
    alive_reason, kept_reason = _alive_reason(group, silent, states), _kept_reason(silent, states, partition, group.pods)
    return with_assessment(
        group,
        alive_reason=alive_reason,
        kept_reason=kept_reason,
        unreachable_reason=_unreachable_reason(group, states) if alive_reason and not kept_reason else "",
        lost_reason="" if alive_reason or kept_reason else _lost_reason(group, states) or _stuck_reason(group, states),
        has_unready_node=bool(silent),
        has_cordoned_node=any(pod.node in states.nodes and states.nodes[pod.node].cordoned for pod in group.pods),
    )


def _silent_nodes(group: ObservedGroup, states: NodeStates) -> list[str]:
    """Returns the group's nodes that are not ready, those that have just become ready again, and those whose kubelets have not
    reported a group that routers report."""
    unreported = [pod for pod in group.pods if pod.is_unreported and pod.node in states.nodes]
    return [
        pod.node
        for pod in group.pods
        if is_on_silent_node(pod, states.nodes, states.now) or (pod in unreported and is_reported(group, states.fleet))
    ]


def is_on_silent_node(pod: ObservedPod, nodes: Mapping[str, ObservedNode], now: str) -> bool:
    """Returns whether the pod's node is not ready, or has just become ready again and its kubelet has yet to report the pod."""
    node = nodes.get(pod.node)
    return node is not None and (not node.ready or _is_returning(pod, node, now))


def is_leaving(pod: ObservedPod, nodes: Mapping[str, ObservedNode], now: str) -> bool:
    """Returns whether the pod shuts down: it is being deleted, and the kubelet of its node delivers the signal."""
    return pod.terminating and not is_on_silent_node(pod, nodes, now)


def _is_returning(pod: ObservedPod, node: ObservedNode, now: str) -> bool:
    """Returns whether the node has just become ready again, and its kubelet has yet to report the pod."""
    age, lead = age_s(node.since, now), age_s(pod.unready_since, node.since)
    if pod.ready or age is None or lead is None or lead < 0:
        return False
    return abs(age) < (LONGEST_S if pod.is_unreported else RETURN_S)


def _has_returned(node: ObservedNode, now: str, within_s: float = RETURN_S) -> bool:
    age = age_s(node.since, now) if node.ready else None
    return age is not None and abs(age) < within_s


def _kept_reason(silent: Sequence[str], states: NodeStates, partition: str, pods: Sequence[ObservedPod]) -> str:
    """Returns why a group with these silent nodes is kept without evidence: a partition, or nodes that have just returned."""
    if not silent or partition:
        return partition if silent else ""
    unreported = [states.nodes[pod.node] for pod in pods if pod.is_unreported and pod.node in states.nodes]
    is_returning = any(_has_returned(node, states.now) for node in states.nodes.values())
    is_returning |= any(_has_returned(node, states.now, LONGEST_S) for node in unreported)
    if not states.was_partitioned or not is_returning:
        return ""
    if all(states.nodes[name].ready for name in silent):
        return f"node {silent[0]} is ready again, and has yet to report its pods"
    return f"node {silent[0]} is silent, and others have just returned from a partition"


def _alive_reason(group: ObservedGroup, silent: Sequence[str], states: NodeStates) -> str:
    """Returns why a group on a silent node is not lost. Its text does not change while the evidence is renewed."""
    if not silent or group.terminating or any(pod.terminating for pod in group.pods):
        return ""
    if is_reported(group, states.fleet):
        state = "ready again, and has yet to report its pods" if states.nodes[silent[0]].ready else "silent"
        return f"node {silent[0]} is {state}, but routers report that the group serves"
    served = len(group.pods) == group.size and all(pod.ready or pod.is_unreported for pod in group.pods)
    is_awaited = states.fleet.is_new or (served and _awaits_reports(states))
    return f"node {silent[0]} is silent, and routers have yet to report" if is_awaited else ""


def _awaits_reports(states: NodeStates) -> bool:
    """Returns whether no router had time to report groups, and one may have soon."""
    fleet, pods = states.fleet, [pod for pod in states.routers if not pod.terminating]
    young = {pod.uid for pod in pods if pod.ready and _is_younger(pod.ready_since, FIRST_REPORTS_S, states.now)}
    if fleet.is_new or (fleet.answered and not fleet.answered_by <= young):
        return fleet.is_new
    silent = {node.name for node in states.nodes.values() if not node.ready}
    starts = [pod.unready_since or pod.created for pod in pods if not pod.ready and pod.node not in silent]
    return bool(young) or any(_is_younger(since, states.limit_s, states.now) for since in starts)


def _is_younger(since: str, limit_s: float, now: str) -> bool:
    age = age_s(since, now)
    return age is not None and abs(age) < limit_s


def is_reported(group: ObservedGroup, fleet: Fleet) -> bool:
    """Returns whether a router reports that the group serves, at most `EVIDENCE_S` ago."""
    age = _evidence_age_s(group, fleet)
    return age is not None and age <= EVIDENCE_S


def _unreachable_reason(group: ObservedGroup, states: NodeStates) -> str:
    """Returns why a group that routers report as serving gets a successor."""
    return "" if _awaits_reports(states) else _loss_reason(group, states)


def _evidence_age_s(group: ObservedGroup, fleet: Fleet) -> float | None:
    return fleet.groups[group.name].load_age_s if group.name in fleet.groups else None


def _lost_reason(group: ObservedGroup, states: NodeStates) -> str:
    why = _loss_reason(group, states)
    return f"{why}, and no router reports that the group serves" if why and states.fleet.answered else why


def _stuck_reason(group: ObservedGroup, states: NodeStates) -> str:
    for pod in group.pods:
        if _is_stuck(pod, states):
            place = f" on node {pod.node}" if pod.node else ""
            return f"pod {pod.name} has not ended{place} {states.limit_s:.0f} s after its grace period"
    return ""


def _is_stuck(pod: ObservedPod, states: NodeStates) -> bool:
    """Returns whether a pod that is being deleted outlasts its grace period, though its node has been ready."""
    if not pod.ends_at or is_on_silent_node(pod, states.nodes, states.now):
        return False
    node = states.nodes.get(pod.node)
    age = age_s(max(pod.ends_at, node.since if node else ""), states.now)
    return age is not None and age >= states.limit_s


def nodes_with_stuck_pods(groups: Iterable[ObservedGroup], states: NodeStates) -> list[str]:
    """Returns the nodes on which pods of groups do not end."""
    return [pod.node for group in groups for pod in group.pods if pod.node and _is_stuck(pod, states)]


def _loss_reason(group: ObservedGroup, states: NodeStates) -> str:
    reasons = (loss_reason(states.nodes.get(pod.node), states.limit_s, states.now) for pod in group.pods)
    return next((why for why in reasons if why), "")


def loss_reason(node: ObservedNode | None, limit_s: float, now: str) -> str:
    """Returns why a node is lost to the control plane; empty if it is not."""
    if node is None or node.ready:
        return ""
    age = age_s(node.since, now)
    return f"node {node.name} has not been ready for {limit_s:.0f} s" if age is not None and age >= limit_s else ""


def due_in_s(groups: Iterable[ObservedGroup], states: NodeStates) -> float | None:
    """Returns the seconds until the next unready node is lost, the evidence of a pod on one gets old, or a partition may end.

    Nodes of other services, which return without an event for this one, may end it.
    """
    groups = tuple(groups)
    silent = {name for group in groups for name in _silent_nodes(group, states)}
    silent_routers = {pod.node for pod in states.routers if pod.node in states.nodes and not states.nodes[pod.node].ready}
    due = [left_s for name in silent if (left_s := _left_s(states.nodes[name], states)) > 0]
    for group in groups:
        if group.assessment.alive_reason:
            age = _evidence_age_s(group, states.fleet)
            due.append(FIRST_ANSWER_S if age is None or age > EVIDENCE_S else EVIDENCE_S - age + 1.0)
    due += [POLL_S for group in groups if group.assessment.kept_reason][:1]
    due += [POLL_S] if silent_routers else []
    return min(due, default=None)


def _left_s(node: ObservedNode, states: NodeStates) -> float:
    """Returns the seconds until a silent node is lost, or one that is ready again counts as ready; 0 if unknown."""
    age = age_s(node.since, states.now)
    if age is None:
        return 0.0
    return (RETURN_S if age < RETURN_S else LONGEST_S) - age if node.ready else states.limit_s - age


def routers_to_delete(groups: Iterable[ObservedGroup], states: NodeStates) -> list[DeletePod]:
    """Returns routers on lost nodes that are unreachable for the operator too, or never started; none during a partition."""
    partition = _partition(tuple(groups), states)
    return [
        DeletePod(pod.name, pod.uid, 0, f"{why}, and it does not answer")
        for pod in states.routers
        if pod.uid in states.fleet.unreachable or not pod.ip
        if (why := loss_reason(states.nodes.get(pod.node), states.limit_s, states.now))
        if not _kept_reason([pod.node], states, partition, [pod])
    ]


def pods_to_delete(groups: Iterable[ObservedGroup], states: NodeStates) -> list[DeletePod]:
    """Returns pods on lost nodes of lost and terminating groups; none during a partition."""
    return [
        DeletePod(pod.name, pod.uid, 0, why)
        for group in groups
        if (group.terminating or group.assessment.lost_reason) and not group.assessment.kept_reason
        for pod in group.pods
        if pod.uid and (why := loss_reason(states.nodes.get(pod.node), states.limit_s, states.now))
    ]
