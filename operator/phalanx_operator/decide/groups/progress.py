"""Measures how long groups wait for nodes, readiness and availability, and decides which rollouts stop.

A group of the newest revision that is not ready for `progressDeadlineSeconds` stops the rollout: no further serving group is
given up for that revision. A group above `replicas` that waits for a node for `surgeTimeoutSeconds` ends the surge: the rest of
the rollout deletes first, where `maxUnavailable` allows one; the reason of `Progressing` records it. A group that has been ready
for less than `minReadySeconds` counts as missing, except for request routing.
"""

from collections.abc import Iterable

from phalanx_api.conditions import Reason, find_condition
from phalanx_api.spec.lifecycle import Rollout
from phalanx_api.status import Status
from phalanx_operator.decide.state.groups import live, staying
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s, changed

PODLESS_S = 60.0
"""Longest time that counts for a group without any pod."""


def waiting_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long the longest-waiting pod has lacked a node, or has been missing; None if all pods exist and have nodes.

    A pod is missing where a quota or an admission plugin rejects it: only its StatefulSet's events report it.
    """
    ages = [age_s(pod.created or group.created, now) for pod in group.pods if not pod.node]
    ages += [age_s(group.short_since, now)] if group.short_since else []
    return max((age for age in ages if age is not None), default=None)


def unready_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long a group has not been ready, across restarts; None if it is ready."""
    tried = age_s(group.restarts.since, now) if group.restarts.since else None
    present = pods_unready_s(group, now)
    return present if present is None or tried is None else max(present, tried)


def pods_unready_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long the group's current pods have not been ready; None if they are."""
    if group.ready:
        return None
    if not group.pods:  # the time is unknown: a pod deleted just now must not count as the group's whole life
        return min(age_s(group.created, now) or 0.0, PODLESS_S)
    ages = [age_s(pod.unready_since or pod.created or group.created, now) for pod in group.pods if not pod.ready]
    return max((age for age in ages if age is not None), default=0.0)


def ready_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long all pods of a group have been ready; None if they are not, or no kubelet reported the time."""
    ages = [age for pod in group.pods if (age := age_s(pod.ready_since, now)) is not None]
    return min(ages, default=None) if group.ready else None


def assess(groups: Iterable[ObservedGroup], rollout: Rollout, now: str) -> tuple[ObservedGroup, ...]:
    """Returns the groups, marked if ready for less than `minReadySeconds`."""
    ages = ((group, ready_s(group, now)) for group in groups)
    return tuple(changed(group, young=age is not None and age < rollout.min_ready_seconds) for group, age in ages)


def late(groups: Iterable[ObservedGroup], revision: str, rollout: Rollout, now: str) -> str:
    """Returns which group of this revision missed the progress deadline, and its pod's message; empty if no group did."""
    for group in staying(groups):
        age = unready_s(group, now)
        if group.revision == revision and age is not None and age >= rollout.progress_deadline_seconds:
            words = next((f": {pod.name}: {pod.reason} {pod.message}" for pod in group.pods if pod.reason), "")
            return f"{group.name} is not ready after {rollout.progress_deadline_seconds} s{words}"
    return ""


def no_room(groups: Iterable[ObservedGroup], status: Status, revision: str, rollout: Rollout, now: str) -> str:
    """Returns why a rollout to this revision has no surge; empty while it has one or needs none."""
    groups = tuple(groups)
    here = staying(groups)
    if all(group.revision == revision for group in here):
        return ""
    former = find_condition(status.conditions, "Progressing")
    told_of = status.rollback.to if status.rollback else status.update_revision
    if former and former.reason == Reason.SURGE_UNSCHEDULABLE and told_of == revision:
        return former.message
    for group in live(groups):
        if group.revision == revision and group.lost and waiting_s(group, now) is not None:
            return f"{group.name} is given up: {group.lost}"  # with a shorter time to be placed
    for group in here:
        age = waiting_s(group, now)
        if group.revision == revision and age is not None and age >= rollout.surge_timeout_seconds:
            words = next((f": {pod.message}" for pod in group.pods if not pod.node and pod.message), "")
            return f"{group.name} waited {rollout.surge_timeout_seconds} s for nodes{words}"
    return ""


def left_s(groups: Iterable[ObservedGroup], revision: str, rollout: Rollout, now: str) -> float | None:
    """Returns the seconds until the next of these deadlines; None if none runs."""
    due = []
    for group in staying(groups):
        if group.revision == revision:
            waits, unready = waiting_s(group, now), unready_s(group, now)
            due += [] if waits is None else [rollout.surge_timeout_seconds - waits]
            due += [] if unready is None else [rollout.progress_deadline_seconds - unready]
        ready = ready_s(group, now)
        due += [] if ready is None else [rollout.min_ready_seconds - ready]
    return min((left for left in due if left > 0), default=None)
