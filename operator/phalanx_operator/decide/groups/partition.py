"""Decides whether the control plane is partitioned from its nodes: then no group counts as lost because its node is silent.

    became not ready within `TOGETHER_S`, and still are               silent together
    more than a third of the service's nodes, at least 2, together    partitioned
    more than a third of all nodes, at least 2, or the only one       partitioned, if a node of the service is among them
    older than `LONGEST_S`, and half of the routers answer            no longer: what routers report decides

The service's nodes are those of its groups' pods, or of these and its routers. A node that was deleted from the API is not
silent. If routers do not answer, a partition lasts until nodes return: a successor would start beside a group that may still
serve.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import NodeCensus, ObservedNode, parse_time

TOGETHER_S = 120.0
"""Longest time between the first and the last node of a partition. The node controller reports them within 15 s."""
LONGEST_S = 600.0
"""Time from the last node of a partition until routers' reports decide."""
MIN_SILENT = 2
"""One node of several is more likely to have failed."""


def partition_reason(own: Sequence[ObservedNode], census: NodeCensus, fleet: Fleet, now: str) -> str:
    """Returns how many nodes are silent together; empty without a partition. `own`: the nodes of the service."""
    silent = [node for node in own if not node.ready]
    if not silent:
        return ""
    own_times = [time for node in silent if (time := parse_time(node.since))]
    areas = (
        ("the service", silent, len(own), MIN_SILENT),
        ("the cluster", census.silent, census.total, min(MIN_SILENT, census.total)),
    )
    for area, nodes, total, least in areas:
        found = _latest_partition(nodes, total, least, own_times)
        if found and not _is_over(found[1], fleet, now):
            return f"{found[0]} of {total} nodes of {area} became not ready within {TOGETHER_S:.0f} s"
    return ""


def _latest_partition(
    silent: Iterable[ObservedNode], total: int, least: int, own_times: Sequence[datetime]
) -> tuple[int, datetime] | None:
    """Returns the number of nodes that are silent together, one of the service's among them, and the time of the last, if they
    are too many."""
    times = sorted(time for node in silent if (time := parse_time(node.since)))
    for last in reversed(range(len(times))):
        count = last + 1 - bisect_left(times, times[last] - timedelta(seconds=TOGETHER_S))
        has_own = any(times[last + 1 - count] <= time <= times[last] for time in own_times)
        if has_own and count >= least and 3 * count > total:
            return count, times[last]
    return None


def _is_over(since: datetime, fleet: Fleet, now: str) -> bool:
    moment = parse_time(now)
    answers = fleet.has_quorum and 2 * fleet.answered >= fleet.polled + fleet.unanswered
    return answers and moment is not None and (moment - since).total_seconds() >= LONGEST_S
