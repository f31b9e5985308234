"""Turns the scaling decision into a count to write, conditions and status.

    Internal    the operator writes `spec.replicas`; another client's later write applies for CONFLICT_S
    External    HPA or KEDA writes it from the metric
    Advisory    no component writes it

Without `Internal`, decisions continue from the operator's own last count.
"""

import datetime
import zoneinfo
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from phalanx_api import labels
from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.spec.autoscaling import Autoscaling, Schedule
from phalanx_api.spec.cron import parse_cron
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import MAX_HISTORY, AutoscalingStatus, ScaleChange, Status
from phalanx_operator.decide.scaling.demand import KV_SHARE, Targets
from phalanx_operator.decide.scaling.scale import (
    COLD_START_S,
    SILENT_S,
    ScaleDecision,
    ScaleHistory,
    ScaleInputs,
    ScalingRules,
    evaluate,
)
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, ReplicasWriter, Snapshot, age_s, parse_time

CONFLICT_S = 300.0
MAX_START_TIMES = 16


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Bounds, and the field that sets them."""

    minimum: int
    maximum: int
    source: str = "spec.autoscaling"


def replica_bounds(autoscaling: Autoscaling, now: datetime.datetime) -> ReplicaBounds:
    """Returns the bounds at `now`: of the schedule that fired last; of equal times, the last in the list."""
    firings = [(at, index) for index, s in enumerate(autoscaling.schedules) if (at := last_firing(s, now)) is not None]
    if not firings:
        return ReplicaBounds(autoscaling.min_replicas, autoscaling.max_replicas)
    index = max(firings)[1]
    schedule = autoscaling.schedules[index]
    minimum = autoscaling.min_replicas if schedule.min is None else schedule.min
    maximum = autoscaling.max_replicas if schedule.max is None else schedule.max
    if schedule.min is None:
        minimum = min(minimum, maximum)
    return ReplicaBounds(minimum, max(minimum, maximum), f"schedules[{index}], {schedule.cron} {schedule.timezone}")


def last_firing(schedule: Schedule, now: datetime.datetime) -> datetime.datetime | None:
    """Returns when a schedule last fired, in UTC, if within eight years.

    A repeated local time counts the first time; a skipped one as much later as the clock moved.
    """
    zone = zoneinfo.ZoneInfo(schedule.timezone)
    cron = parse_cron(schedule.cron)
    clock = now.astimezone(zone)
    local = clock.replace(tzinfo=None) + datetime.timedelta(hours=clock.fold)
    while (fired := cron.last_firing(local)) is not None:
        at = fired.replace(tzinfo=zone).astimezone(datetime.UTC)
        if at <= now:
            return at
        local = fired - datetime.timedelta(minutes=1)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerState:
    """State of a service between evaluations."""

    history: ScaleHistory = field(default_factory=ScaleHistory)
    starting: frozenset[str] = frozenset()
    """UIDs of groups that have not been ready."""
    served: frozenset[str] = frozenset()
    """UIDs of groups that have been ready."""
    start_times_s: tuple[float, ...] = ()
    advised: int | None = None
    """The last count, unless the operator writes it."""
    is_new: bool = True
    """It is unknown which groups have been ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult:
    """Result of the autoscaler."""

    decision: ScaleDecision
    replicas_to_write: int | None
    is_active: bool
    reason: Reason
    message: str
    status: AutoscalingStatus


def autoscale(
    service: InferenceService, snapshot: Snapshot, fleet: Fleet, state: AutoscalerState, now: str, now_s: float
) -> tuple[AutoscalerState, ScalingResult | None]:
    """Returns the new state, and the result unless suspended or without autoscaling."""
    state = _with_start_times(state, snapshot.groups, now)
    policy = service.spec.autoscaling
    if policy is None or service.spec.suspend or service.spec.replicas is None:
        return replace(state, history=ScaleHistory(), advised=None), None
    bounds = replica_bounds(policy, parse_time(now) or datetime.datetime.fromtimestamp(0, datetime.UTC))
    replicas = service.spec.replicas
    count = replicas if policy.mode == "Internal" or state.advised is None else state.advised
    former = snapshot.status.autoscaling or AutoscalingStatus()
    inputs = ScaleInputs(
        now_s=now_s,
        groups=count,
        serving=frozenset(group.name for group in snapshot.groups if group.alive and group.draining is None),
        fleet=fleet,
        cold_start_s=_cold_start_s(state, former),
    )
    history, decision = evaluate(state.history, inputs, scaling_rules(service, policy, bounds))
    held = snapshot.kept_reason or (snapshot.clock_reason if decision.verdict == "Bounds" else "")
    if held and decision.groups < count:
        decision = replace(decision, groups=count, verdict="Steady", why=f"{held}: no group is removed")
    state = replace(state, history=history, advised=decision.groups)
    conflict = _conflict(policy, snapshot, former, replicas, now)
    writes = policy.mode == "Internal" and not conflict and decision.groups != replicas
    is_active, reason, message = _verdict(policy, decision, conflict)
    last_scale_time = now if writes else former.last_scale_time
    status = _status(former, bounds, decision=decision, before=count, state=state, last_scale_time=last_scale_time)
    if (writes or policy.mode != "Internal") and decision.groups != count:
        status = status.model_copy(update={"history": _add_change(former, decision, count, now)})
    return state, ScalingResult(
        decision=decision,
        replicas_to_write=decision.groups if writes else None,
        is_active=is_active,
        reason=reason,
        message=message,
        status=status,
    )


def is_count_of_user(service: InferenceService, snapshot: Snapshot) -> bool:
    """Returns whether another client than the operator wrote `spec.replicas`, or the service is suspended."""
    if service.spec.suspend:
        return True
    writer, former = snapshot.replicas_writer, snapshot.status.autoscaling
    if writer is None:  # as after a 0 through /scale
        return former is None or service.spec.replicas != former.desired
    return writer.manager != labels.MANAGER


def with_scaling_conditions(
    status: Status, service: InferenceService, scaling: ScalingResult | None, snapshot: Snapshot, now: str
) -> Status:
    """Sets `ScalingActive` and `status.autoscaling`."""
    if service.spec.autoscaling is None:
        conditions = drop_condition(status.conditions, "ScalingActive")
        return status.model_copy(update={"autoscaling": None, "conditions": conditions})
    conditions = set_condition(
        status.conditions,
        "ScalingActive",
        scaling is not None and scaling.is_active,
        reason=scaling.reason if scaling else Reason.DISABLED,
        message=scaling.message if scaling else "the service is suspended",
        generation=snapshot.generation,
        now=now,
    )
    autoscaling = scaling.status if scaling else snapshot.status.autoscaling
    return status.model_copy(update={"autoscaling": autoscaling, "conditions": conditions})


def scaling_rules(service: InferenceService, policy: Autoscaling, bounds: ReplicaBounds) -> ScalingRules:
    """Returns the rules of a spec."""
    targets = Targets(
        ttft_s=policy.targets.ttft_p95_ms / 1000 if policy.targets.ttft_p95_ms else None,
        itl_s=policy.targets.itl_p95_ms / 1000 if policy.targets.itl_p95_ms else None,
        kv_share=policy.targets.kv_utilization / 100 if policy.targets.kv_utilization else KV_SHARE,
    )
    return ScalingRules(
        min_groups=bounds.minimum,
        max_groups=bounds.maximum,
        targets=targets,
        up_stabilization_s=policy.scale_up.stabilization_seconds,
        up_max_step=policy.scale_up.max_step,
        down_stabilization_s=policy.scale_down.stabilization_seconds,
        down_max_step=policy.scale_down.max_step,
        scales_to_zero=policy.scale_to_zero.enabled,
        idle_s=policy.scale_to_zero.idle_seconds,
        can_move_streams=service.spec.rebalancing.mode == "Migrate",
        step_tokens=service.spec.engine.get_setting("max_num_batched_tokens"),
        fallback=policy.fallback_replicas,
    )


def _with_start_times(state: AutoscalerState, groups: Iterable[ObservedGroup], now: str) -> AutoscalerState:
    """Adds the start times of groups that became ready."""
    groups = tuple(groups)
    ready = {group.uid: group for group in groups if group.ready}
    ages = [age_s(ready[uid].created, now) for uid in sorted(state.starting & ready.keys())]
    new = tuple(age for age in ages if age is not None and age >= 0)
    uids = frozenset(group.uid for group in groups)
    if state.is_new:
        return replace(state, served=uids, is_new=False)
    served = (state.served | ready.keys()) & uids
    starting = frozenset(group.uid for group in groups if not group.ready) - served
    start_times_s = (*state.start_times_s, *new)[-MAX_START_TIMES:]
    return replace(state, starting=starting, served=served, start_times_s=start_times_s)


def _cold_start_s(state: AutoscalerState, former: AutoscalingStatus) -> float:
    """Returns the 95th percentile of start times."""
    if state.start_times_s:
        return sorted(state.start_times_s)[int(0.95 * (len(state.start_times_s) - 1) + 0.5)]
    return float(former.cold_start_seconds) or COLD_START_S


def _conflict(policy: Autoscaling, snapshot: Snapshot, former: AutoscalingStatus, replicas: int, now: str) -> str:
    """Returns which other client wrote the count within `CONFLICT_S`.

    After a 0 through /scale, managedFields have no owner: a count other than the operator's is then another client's.
    """
    writer = snapshot.replicas_writer
    if policy.mode != "Internal" or not former.last_scale_time:
        return ""
    if writer is None:
        reported = next((c for c in snapshot.status.conditions if c.reason == Reason.CONFLICTING_SCALER), None)
        writer = ReplicasWriter("another client", reported.last_transition_time if reported else now)
        is_ours = reported is None and replicas == former.desired
    else:
        is_ours = writer.manager == labels.MANAGER
    age = age_s(writer.at, now)
    return "" if is_ours or age is None or age >= CONFLICT_S else f"{writer.manager} wrote spec.replicas at {writer.at}"


def _verdict(policy: Autoscaling, decision: ScaleDecision, conflict: str) -> tuple[bool, Reason, str]:
    if conflict:
        remedy = "only one client may write it: remove that one, or set mode External"
        return False, Reason.CONFLICTING_SCALER, f"{conflict}; {remedy}"
    if decision.verdict in ("Hold", "Fallback"):
        fallback = policy.fallback_replicas
        outcome = "the count is held" + (f", and is at least {fallback} after {SILENT_S:.0f} s" if fallback else "")
        return False, Reason.METRICS_UNAVAILABLE, f"fewer than half of the routers answered recently: {outcome}"
    reasons = {"Internal": Reason.ACTIVE, "External": Reason.EXTERNAL, "Advisory": Reason.ADVISORY}
    return True, reasons[policy.mode], ""


def _add_change(former: AutoscalingStatus, decision: ScaleDecision, before: int, now: str) -> tuple[ScaleChange, ...]:
    change = ScaleChange(time=now, before=before, after=decision.groups, reason=decision.verdict, message=decision.why[:256])
    return (*former.history, change)[-MAX_HISTORY:]


def _status(
    former: AutoscalingStatus,
    bounds: ReplicaBounds,
    decision: ScaleDecision,
    before: int,
    state: AutoscalerState,
    last_scale_time: str,
) -> AutoscalingStatus:
    changes = decision.groups != before
    return AutoscalingStatus(
        desired=decision.groups,
        min_replicas=bounds.minimum,
        max_replicas=bounds.maximum,
        bounds=bounds.source[:256],
        reason=decision.verdict if changes else former.reason,
        message=f"from {before} to {decision.groups}: {decision.why}"[:512] if changes else former.message,
        last_scale_time=last_scale_time,
        cold_start_seconds=round(_cold_start_s(state, former)) if state.start_times_s else former.cold_start_seconds,
        history=former.history,
    )
