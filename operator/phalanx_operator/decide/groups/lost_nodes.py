"""Decides which groups are given up with a lost node, and which of their pods to delete.

A node is lost when it has not been ready for `nodeLostSeconds`. Its groups get successors on other nodes, and their pods there
are deleted with grace 0: the StatefulSet controller would wait for an unreachable kubelet. A later group may reuse the name; a
pod still running on a partitioned node cannot join it, because the pods of each StatefulSet have their own key.
"""

from collections.abc import Iterable, Mapping

from phalanx_operator.decide.state.actions import DeletePod
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedNode, age_s, changed


def assess(
    groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str
) -> tuple[ObservedGroup, ...]:
    """Returns the groups with the state of their nodes."""
    return tuple(
        changed(
            group,
            lost=next((why for pod in group.pods if (why := why_lost(nodes.get(pod.node), limit_s, now))), ""),
            silent=any(pod.node in nodes and not nodes[pod.node].ready for pod in group.pods),
            cordoned=any(pod.node in nodes and nodes[pod.node].cordoned for pod in group.pods),
        )
        for group in groups
    )


def why_lost(node: ObservedNode | None, limit_s: float, now: str) -> str:
    """Returns why a node is lost; empty if it is not."""
    if node is None or node.ready:
        return ""
    age = age_s(node.since, now)
    return f"node {node.name} was not heard for {limit_s:.0f} s" if age is not None and age >= limit_s else ""


def left_s(groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str) -> float | None:
    """Returns the seconds until the next node is lost; None if all nodes are ready."""
    silent = [nodes[pod.node] for group in groups for pod in group.pods if pod.node in nodes and not nodes[pod.node].ready]
    ages = [age for node in silent if (age := age_s(node.since, now)) is not None and age < limit_s]
    return limit_s - max(ages) if ages else None


def to_end(groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str) -> list[DeletePod]:
    """Returns the pods on lost nodes of groups that are deleted or being deleted."""
    return [
        DeletePod(pod.name, pod.uid, 0, why)
        for group in groups
        if group.terminating or group.lost
        for pod in group.pods
        if pod.uid and (why := why_lost(nodes.get(pod.node), limit_s, now))
    ]
