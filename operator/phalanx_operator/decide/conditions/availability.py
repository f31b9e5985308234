"""The condition `Available`: whether clients get answers, by the control plane or by what routers report.

    a router and a group are ready, or routers report the group         True   Serving
    no router is ready: one answers, and reports that a group serves    True   NodesSilent in a partition, else Unreachable
    no router had time to answer, as after a start of the operator      as before
    otherwise                                                           False

The control plane reports a router as not ready while its node is silent. Routers that were ready and have failed since on ready
nodes are not polled, so their reports do not count. Those that shut down refuse new requests.
"""

from phalanx_api.conditions import Condition, Reason, find_condition, set_condition
from phalanx_operator.decide.groups.lost_nodes import is_leaving, is_reported
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import Snapshot


def with_available(
    conditions: tuple[Condition, ...], snapshot: Snapshot, fleet: Fleet, now: str, *, holds: bool = False
) -> tuple[Condition, ...]:
    """Returns the conditions with `Available`. holds: routers hold requests until a group serves."""
    former = find_condition(conditions, "Available")
    has_answer = _has_answer(snapshot, fleet, now)
    is_true, reason, message = _verdict(snapshot, fleet, former, has_answer=has_answer, holds=holds)
    return set_condition(
        conditions, "Available", is_true, reason=reason, message=message, generation=snapshot.generation, now=now
    )


def _verdict(
    snapshot: Snapshot, fleet: Fleet, former: Condition | None, *, has_answer: bool, holds: bool
) -> tuple[bool, Reason, str]:
    alive = [group for group in live_groups(snapshot.groups) if group.alive]
    has_router = snapshot.router is not None and snapshot.router.ready > 0
    if alive and has_router:
        return True, Reason.SERVING, ""
    if has_answer and any(is_reported(group, fleet) for group in alive):
        reason = Reason.NODES_SILENT if snapshot.kept_reason else Reason.UNREACHABLE
        why = snapshot.kept_reason or "no router is ready for the control plane"
        return True, reason, f"routers answer the operator, and report that groups serve: {why}"
    if alive and fleet.is_new and former and former.status == "True":
        return True, Reason(former.reason), former.message
    if alive:
        return False, Reason.ROUTER_NOT_READY, ""
    if holds and has_router:
        return False, Reason.HOLDING, ""
    why = snapshot.kept_reason
    return False, Reason.NO_READY_GROUP, f"no router reports that a group serves: {why}" if why else ""


def publishes_unready(snapshot: Snapshot, fleet: Fleet, now: str) -> bool:
    """Returns whether the routers' Service has to keep unready pods: no router is ready for the control plane, but one answers.

    Kubernetes takes pods on silent nodes from their Services: at once where proxies still reach the API server, otherwise when
    the nodes return, until kubelets have reported them again. New connections would fail meanwhile. The pods decide, as for
    Kubernetes: the status of their Deployment is late, and starting routers would be published.
    """
    if any(pod.ready and not pod.terminating for pod in snapshot.router_pods):
        return False
    former = find_condition(snapshot.status.conditions, "Available")
    was_by_reports = former is not None and former.reason in (Reason.NODES_SILENT, Reason.UNREACHABLE)
    return was_by_reports if fleet.is_new else _has_answer(snapshot, fleet, now)


def _has_answer(snapshot: Snapshot, fleet: Fleet, now: str) -> bool:
    """Returns whether a router answers the operator that accepts requests: one that shuts down refuses them."""
    leaving = {pod.uid for pod in snapshot.router_pods if is_leaving(pod, snapshot.nodes, now)}
    return bool(fleet.answered_by - leaving)


def available_replicas(snapshot: Snapshot, fleet: Fleet) -> int:
    """Returns the available groups with a router; without reports at most the former number."""
    available = [group for group in staying_groups(snapshot.groups) if group.available]
    if fleet.is_silent:
        return min(snapshot.status.available_replicas, len(available))
    return sum(group.name in fleet.groups and fleet.groups[group.name].is_linked for group in available)
