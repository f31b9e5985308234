"""Groups that are given up with a node, and pods that nobody else will end.

A node is lost when the control plane has not heard it for `nodeLostSeconds`. Its groups get successors elsewhere, and their pods
there are deleted at once: the StatefulSet controller would wait for a kubelet that is not there. A later group may take the name
again; a pod that still runs on a node that is only cut off is not let into it, for the pods of each StatefulSet have a key of
their own.
"""

from collections.abc import Iterable, Mapping

from phalanx_operator.decide.state.actions import DeletePod
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedNode, age_s, changed


def assess(
    groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str
) -> tuple[ObservedGroup, ...]:
    """The groups with what their nodes mean for them."""
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
    """Why a node is given up; empty while it is not."""
    if node is None or node.ready:
        return ""
    age = age_s(node.since, now)
    return f"node {node.name} was not heard for {limit_s:.0f} s" if age is not None and age >= limit_s else ""


def left_s(groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str) -> float | None:
    """Seconds until the next node is given up; None when none is silent."""
    silent = [nodes[pod.node] for group in groups for pod in group.pods if pod.node in nodes and not nodes[pod.node].ready]
    ages = [age for node in silent if (age := age_s(node.since, now)) is not None and age < limit_s]
    return limit_s - max(ages) if ages else None


def to_end(groups: Iterable[ObservedGroup], nodes: Mapping[str, ObservedNode], limit_s: float, now: str) -> list[DeletePod]:
    """Pods on lost nodes of groups that are being deleted, or are now."""
    return [
        DeletePod(pod.name, pod.uid, 0, why)
        for group in groups
        if group.terminating or group.lost
        for pod in group.pods
        if pod.uid and (why := why_lost(nodes.get(pod.node), limit_s, now))
    ]
