"""What must hold in every world for the autoscaler: the counts that it writes. See `invariants`."""

from collections.abc import Iterator
from datetime import timedelta

from phalanx_api.spec.autoscaling import Autoscaling
from phalanx_operator.decide.state.actions import SetReplicas
from phalanx_operator.decide.state.snapshot import parse_time
from tests.control.search.history import Look, actions_of

IDLE_S, KNOWN_S = 300.0, 20.0
"""Least `idleSeconds` by default; until routers have reported requests."""
OFFSET_H = {"UTC": 0, "Europe/Berlin": 1}
"""Hours before UTC in the winter of the worlds, by time zone of a schedule."""


def scaling_stays_in_bounds(look: Look) -> Iterator[str]:
    """The autoscaler writes no count outside of its bounds; 0 is allowed with `scaleToZero`."""
    for action in actions_of(look, SetReplicas):
        plan = look.plan
        policy = plan.service.spec.autoscaling if plan else None
        if plan is None or policy is None or not fits(action.replicas, policy, plan.now):
            yield f"{action.replicas} groups are written: {action.why}"


def fits(replicas: int, policy: Autoscaling, now: str) -> bool:
    """Returns whether a policy allows a number of groups."""
    least, most = group_bounds(policy, now)
    return (replicas == 0 and policy.scale_to_zero.enabled) or least <= replicas <= most


def group_bounds(policy: Autoscaling, now: str) -> tuple[int, int]:
    """Returns the bounds of the schedule that fired last; each fires once a day. Of equal times the last one counts."""
    moment, latest = parse_time(now), timedelta.max
    assert moment is not None, "each look has a time"
    least, most = policy.min_replicas, policy.max_replicas
    for schedule in policy.schedules:
        minute, hour = map(int, schedule.cron.split()[:2])
        fired = moment.replace(hour=hour - OFFSET_H[schedule.timezone], minute=minute, second=0, microsecond=0)
        if (ago := (moment - fired) % timedelta(days=1)) <= latest:
            latest = ago
            most = policy.max_replicas if schedule.max is None else schedule.max
            least = min(policy.min_replicas if schedule.min is None else schedule.min, most)
    return least, most


def clock_changes_scale_nothing_in(look: Look) -> Iterator[str]:
    """While the clock has just changed, the bounds of a schedule lower no count."""
    for action in actions_of(look, SetReplicas):
        plan = look.plan
        before, policy = ((plan.service.spec.replicas or 0), plan.service.spec.autoscaling) if plan else (0, None)
        if plan is None or policy is None or not plan.snapshot.clock_reason or action.replicas >= before:
            continue
        if before > group_bounds(policy, plan.now)[1]:
            yield f"{before} to {action.replicas} groups: {plan.snapshot.clock_reason}"


def requests_keep_a_group(look: Look) -> Iterator[str]:
    """The count becomes 0 only once the routers that the operator may ask, also those that leave, have been without requests for
    `idleSeconds`, and as long after the operator raised it. Activity that began just now may be unknown."""
    plan = look.plan
    policy = plan.service.spec.autoscaling if plan else None
    if plan is None or policy is None or not any(action.replicas == 0 for action in actions_of(look, SetReplicas)):
        return
    idle_s = policy.scale_to_zero.idle_seconds or IDLE_S
    known = {pod.uid for pod in plan.snapshot.router_pods if pod.ip and (pod.ready or pod.terminating or pod.is_unreported)}
    for uid, (began, ended) in look.activities.items():
        if uid in known and look.at - began > KNOWN_S and look.at - ended < idle_s - KNOWN_S:
            yield f"no group is wanted, {look.at - ended:.0f} s after the last request of router {uid}"
    if look.raised_at is not None and look.at - look.raised_at < idle_s - 1:
        yield f"no group is wanted, {look.at - look.raised_at:.0f} s after the count was raised"


def routers_take_the_newest_policy(look: Look) -> Iterator[str]:
    """No router that answered follows a policy with a higher number than that of the operator: it would ignore the new one."""
    if look.ignored_by:
        yield f"{sorted(look.ignored_by)} ignore the policy"


def only_internal_scaling_writes(look: Look) -> Iterator[str]:
    """With another mode than Internal the operator writes no count."""
    for action in actions_of(look, SetReplicas):
        policy = look.plan.service.spec.autoscaling if look.plan else None
        if policy is not None and policy.mode != "Internal":
            yield f"{action.replicas} groups are written with mode {policy.mode}: {action.why}"


def no_scale_down_without_metrics(look: Look) -> Iterator[str]:
    """A count within its bounds is lowered only if all routers answer, and report two thirds of the serving groups."""
    for action in actions_of(look, SetReplicas):
        plan = look.plan
        before, policy = ((plan.service.spec.replicas or 0), plan.service.spec.autoscaling) if plan else (0, None)
        if plan is None or policy is None or action.replicas >= before or not fits(before, policy, plan.now):
            continue
        serving = [g for g in plan.snapshot.groups if g.available and not (g.terminating or g.draining)]
        reported = [g for g in serving if g.name in plan.fleet.groups and plan.fleet.groups[g.name].load.is_fresh]
        if not 0 < plan.fleet.polled <= plan.fleet.answered:
            yield f"{before} to {action.replicas} groups: {plan.fleet.answered} of {plan.fleet.polled} routers answer"
        elif action.replicas and 3 * len(reported) < 2 * len(serving):
            yield f"{before} to {action.replicas} groups: {len(reported)} of {len(serving)} groups are reported"
