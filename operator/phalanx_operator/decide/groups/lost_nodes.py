"""Decides which groups are lost with a node, and which of their pods to delete.

Pods on a lost node are deleted with grace 0: the StatefulSet controller would wait for an unreachable kubelet. One that still
runs cannot join a later group of that name, because each group has its own key.
"""

from collections.abc import Iterable, Mapping

from phalanx_operator.decide.state.actions import DeletePod
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedNode, age_s, with_assessment


def assess(
    groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str
) -> tuple[ObservedGroup, ...]:
    """Sets the state of the groups' nodes."""
    return tuple(
        with_assessment(
            group,
            lost_reason=next((why for pod in group.pods if (why := loss_reason(nodes.get(pod.node), limit_s, now))), ""),
            has_unready_node=any(pod.node in nodes and not nodes[pod.node].ready for pod in group.pods),
            has_cordoned_node=any(pod.node in nodes and nodes[pod.node].cordoned for pod in group.pods),
        )
        for group in groups
    )


def loss_reason(node: ObservedNode | None, limit_s: float, now: str) -> str:
    """Returns why a node is lost; empty if it is not."""
    if node is None or node.ready:
        return ""
    age = age_s(node.since, now)
    return f"node {node.name} has not been ready for {limit_s:.0f} s" if age is not None and age >= limit_s else ""


def due_in_s(groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str) -> float | None:
    """Returns the seconds until the next unready node is lost."""
    unready = [nodes[pod.node] for group in groups for pod in group.pods if pod.node in nodes and not nodes[pod.node].ready]
    ages = [age for node in unready if (age := age_s(node.since, now)) is not None and age < limit_s]
    return limit_s - max(ages) if ages else None


def pods_to_delete(
    groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str
) -> list[DeletePod]:
    """Returns pods on lost nodes of lost and terminating groups."""
    return [
        DeletePod(pod.name, pod.uid, 0, why)
        for group in groups
        if group.terminating or group.assessment.lost_reason
        for pod in group.pods
        if pod.uid and (why := loss_reason(nodes.get(pod.node), limit_s, now))
    ]
