"""Measures how long groups wait for nodes and readiness, and decides which rollouts stop.

newest revision, unready for `progressDeadlineSeconds`    no serving group is replaced
surge group, unplaced for `surgeTimeoutSeconds`           no surge where `maxUnavailable` allows to delete first
the same, for an unreachable group                        no surge for `SURGE_RETRY_S`: nothing else makes room
ready for less than `minReadySeconds`                     counts as missing, except for routing
"""

from collections.abc import Iterable

from phalanx_api.conditions import Reason, find_condition
from phalanx_api.spec.inference_service import Spec
from phalanx_api.spec.lifecycle import Drain, Rollout
from phalanx_api.status import Status
from phalanx_operator.decide.state.groups import live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s, with_assessment

PODLESS_S = 60.0
"""Longest unready time without pods."""
SURGE_RETRY_S = 600.0
"""Time from the end of a surge for an unreachable group to the next attempt."""


def unplaced_s(group: ObservedGroup, now: str) -> float | None:
    """Returns the longest time that a pod lacks a node, or is missing because it is rejected."""
    ages = [age_s(pod.created or group.created, now) for pod in group.pods if not pod.node]
    ages += [age_s(group.incomplete_since, now)] if group.incomplete_since else []
    return max((age for age in ages if age is not None), default=None)


def unready_s(group: ObservedGroup, drain: Drain, now: str) -> float | None:
    """Returns how long a group has been unready, across restarts. One that is kept on a silent node is not.

    A pod that drains, or is created late, excuses the time of one drain: one that is evicted, or that a kubelet refuses, again
    and again starts no group.
    """
    pods_s = pods_unready_s(group, now)
    if group.is_spared or pods_s is None:
        return None
    incident_s = age_s(group.restarts.since, now) or 0.0
    together_s = 0.0 if any(pod.terminating for pod in group.pods) else pods_s
    observed_s = age_s(group.unready_since, now) or 0.0
    return max(together_s, incident_s, max(_longest_unready_s(group, now), observed_s) - drain.grace_s)


def pods_unready_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long the current pods have been unready together: a pod that is created late gets its whole time to start."""
    if group.ready:
        return None
    if not group.pods:  # they may have been deleted just now
        return min(age_s(group.created, now) or 0.0, PODLESS_S)
    lives = [age for pod in group.pods if (age := age_s(pod.created, now)) is not None]
    return min([_longest_unready_s(group, now), *lives])


def _longest_unready_s(group: ObservedGroup, now: str) -> float:
    """Returns how long a pod has been unready. Pods that are being deleted may have been ready until then."""
    pods = [pod for pod in group.pods if not (pod.ready or pod.terminating)]
    ages = [age_s(pod.unready_since or pod.created or group.created, now) for pod in pods]
    return max((age for age in ages if age is not None), default=0.0)


def ready_s(group: ObservedGroup, now: str) -> float | None:
    """Returns how long all pods have been ready, if reported."""
    ages = [age for pod in group.pods if (age := age_s(pod.ready_since, now)) is not None]
    return min(ages, default=None) if group.ready else None


def assess(groups: Iterable[ObservedGroup], rollout: Rollout, now: str) -> tuple[ObservedGroup, ...]:
    """Marks groups that are ready for less than `minReadySeconds`."""
    ages = ((group, ready_s(group, now)) for group in groups)
    return tuple(
        with_assessment(group, is_below_min_ready=age is not None and age < rollout.min_ready_seconds) for group, age in ages
    )


def deadline_failure(groups: Iterable[ObservedGroup], revision: str, spec: Spec, now: str) -> str:
    """Returns which group of the revision missed the progress deadline."""
    limit_s = spec.rollout.progress_deadline_seconds
    for group in staying_groups(groups):
        age = unready_s(group, spec.drain, now)
        if group.revision == revision and age is not None and age >= limit_s:
            message = next((f": {pod.name}: {pod.reason} {pod.message}" for pod in group.pods if pod.reason), "")
            return f"{group.name} is not ready after {limit_s} s{message}"
    return ""


def surge_failure(groups: Iterable[ObservedGroup], status: Status, revision: str, rollout: Rollout, now: str) -> str:
    """Returns why there is no surge: for the rest of a rollout, or for a time after it failed for an unreachable group."""
    groups = tuple(groups)
    staying = staying_groups(groups)
    is_rolling = sum(group.revision != revision for group in staying) > rollout.partition
    has_unreachable = any(group.assessment.unreachable_reason for group in staying)
    if not (is_rolling or has_unreachable):
        return ""
    former = find_condition(status.conditions, "Progressing")
    reported = status.rollback.to if status.rollback else status.update_revision
    if former and former.reason == Reason.SURGE_UNSCHEDULABLE and reported == revision:
        is_retried = has_unreachable and (rollout.paused or not is_rolling)
        if not (is_retried and surge_retry_in_s(status, now) == 0):
            return former.message
    for group in live_groups(groups):
        lost_reason = group.assessment.lost_reason
        if group.revision == revision and lost_reason and unplaced_s(group, now) is not None:
            return f"{group.name} is given up: {lost_reason}"  # the placement timeout was shorter
    for group in staying:
        age = unplaced_s(group, now)
        if group.revision == revision and age is not None and age >= rollout.surge_timeout_seconds:
            message = next((f": {pod.message}" for pod in group.pods if not pod.node and pod.message), "")
            return f"{group.name} waited {rollout.surge_timeout_seconds} s for nodes{message}"
    return ""


def surge_retry_in_s(status: Status, now: str) -> float:
    """Returns the seconds until a failed surge may be tried again; 0 if none failed."""
    age = age_s(status.surge_failure_time, now)
    return max(SURGE_RETRY_S - abs(age), 0.0) if age is not None else 0.0


def due_in_s(groups: Iterable[ObservedGroup], status: Status, revision: str, spec: Spec, now: str) -> float | None:
    """Returns the seconds until the next of these deadlines."""
    rollout = spec.rollout
    due = [surge_retry_in_s(status, now)]
    for group in staying_groups(groups):
        if group.revision == revision:
            unplaced, unready = unplaced_s(group, now), unready_s(group, spec.drain, now)
            due += [] if unplaced is None else [rollout.surge_timeout_seconds - unplaced]
            due += [] if unready is None else [rollout.progress_deadline_seconds - unready]
        ready = ready_s(group, now)
        due += [] if ready is None else [rollout.min_ready_seconds - ready]
    return min((left_s for left_s in due if left_s > 0), default=None)
