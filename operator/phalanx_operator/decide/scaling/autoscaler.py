"""Turns the scaling decision into a count to write, conditions and status.

Internal   the operator writes `spec.replicas`, unless another client wrote it later; then it waits until that write is CONFLICT_S
           old, and reports it
External   HPA or KEDA writes it from the metric; the decision continues from the operator's own last count
Advisory   no component writes; the same
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
from phalanx_operator.decide.scaling.scale import COLD_S, LOST_S, ScaleDecision, ScaleHistory, ScaleInputs, ScalingRules, evaluate
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, ReplicasWriter, Snapshot, age_s, parsed

# Bounds at the current time.
# The bounds of a schedule hold from its last firing on; the latest firing decides (of equals, the last in the list). A missing
# bound
# is the spec's. Where the clock is put forward over a firing, it fires that much later.


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Least and most groups, and the schedule that sets them."""

    least: int
    most: int
    why: str = "spec.autoscaling"


def bounds(autoscaling: Autoscaling, now: datetime.datetime) -> ReplicaBounds:
    """Returns the bounds at this time, which has a time zone."""
    fired = [(at, index) for index, one in enumerate(autoscaling.schedules) if (at := last_fired(one, now)) is not None]
    if not fired:
        return ReplicaBounds(autoscaling.min_replicas, autoscaling.max_replicas)
    index = max(fired)[1]
    one = autoscaling.schedules[index]
    least = autoscaling.min_replicas if one.min is None else one.min
    most = autoscaling.max_replicas if one.max is None else one.max
    if one.min is None:
        least = min(least, most)
    return ReplicaBounds(least, max(least, most), f"schedules[{index}], {one.cron} {one.timezone}")


def last_fired(schedule: Schedule, now: datetime.datetime) -> datetime.datetime | None:
    """Returns when a schedule last fired, in UTC; None if it has not in eight years."""
    zone = zoneinfo.ZoneInfo(schedule.timezone)
    cron = parse_cron(schedule.cron)
    clock = now.astimezone(zone)
    # Of an hour that occurs twice, the first counts.
    local = clock.replace(tzinfo=None) + datetime.timedelta(hours=clock.fold)
    while (fired := cron.last(local)) is not None:
        at = fired.replace(tzinfo=zone).astimezone(datetime.UTC)
        if at <= now:
            return at
        local = fired - datetime.timedelta(minutes=1)
    return None


CONFLICT_S = 300.0
STARTS = 16
"""Number of start times that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerState:
    """State of a service between evaluations."""

    memory: ScaleHistory = field(default_factory=ScaleHistory)
    starting: frozenset[str] = frozenset()
    """Observed groups that have never served."""
    served: frozenset[str] = frozenset()
    """Observed groups that have served."""
    starts_s: tuple[float, ...] = ()
    """Measured start times."""
    advised: int | None = None
    """The last advised count, where another component writes it."""
    is_new: bool = True
    """No observation yet: whether existing groups have served is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The autoscaler's result. `write`: the count to write; None for no write."""

    decision: ScaleDecision
    write: int | None
    is_active: bool
    reason: Reason
    message: str
    status: AutoscalingStatus


def scaling(
    service: InferenceService, snapshot: Snapshot, fleet: Fleet, mind: AutoscalerState, now: str, now_s: float
) -> tuple[AutoscalerState, Scaling | None]:
    """Returns the new state and the result; None without autoscaling or while suspended."""
    mind = _timed(mind, snapshot.groups, now)
    policy = service.spec.autoscaling
    if policy is None or service.spec.suspend or service.spec.replicas is None:
        return replace(mind, memory=ScaleHistory(), advised=None), None
    between = bounds(policy, parsed(now) or datetime.datetime.fromtimestamp(0, datetime.UTC))
    replicas = service.spec.replicas
    count = replicas if policy.mode == "Internal" or mind.advised is None else mind.advised
    former = snapshot.status.autoscaling or AutoscalingStatus()
    serving = frozenset(group.name for group in snapshot.groups if group.serving)
    scene = ScaleInputs(now_s=now_s, groups=count, serving=serving, fleet=fleet, cold_s=_cold_s(mind, former))
    memory, decision = evaluate(mind.memory, scene, rules_of(service, policy, between))
    mind = replace(mind, memory=memory, advised=decision.groups)
    conflict = _conflict(policy, snapshot, former, replicas, now)
    writes = policy.mode == "Internal" and not conflict and decision.groups != replicas
    active, reason, message = _verdict(policy, decision, conflict)
    counts = writes or policy.mode != "Internal"
    status = _status(
        former, between, decision=decision, before=count, mind=mind, last_scale_time=now if writes else former.last_scale_time
    )
    if counts and decision.groups != count:
        status = status.model_copy(update={"history": _history(former, decision, count, now)})
    return mind, Scaling(
        decision=decision,
        write=decision.groups if writes else None,
        is_active=active,
        reason=reason,
        message=message,
        status=status,
    )


def with_scaling_conditions(
    status: Status, service: InferenceService, said: Scaling | None, snapshot: Snapshot, now: str
) -> Status:
    """Returns the status with the autoscaler's conditions."""
    if service.spec.autoscaling is None:
        conditions = drop_condition(status.conditions, "ScalingActive")
        return status.model_copy(update={"autoscaling": None, "conditions": conditions})
    conditions = set_condition(
        status.conditions,
        "ScalingActive",
        said is not None and said.is_active,
        reason=said.reason if said else Reason.DISABLED,
        message=said.message if said else "the service is suspended",
        generation=snapshot.generation,
        now=now,
    )
    autoscaling = said.status if said else snapshot.status.autoscaling
    return status.model_copy(update={"autoscaling": autoscaling, "conditions": conditions})


def rules_of(service: InferenceService, policy: Autoscaling, between: ReplicaBounds) -> ScalingRules:
    """Returns the rules of a spec with the current bounds."""
    goals = policy.targets
    targets = Targets(
        ttft_s=goals.ttft_p95_ms / 1000 if goals.ttft_p95_ms else None,
        itl_s=goals.itl_p95_ms / 1000 if goals.itl_p95_ms else None,
        kv=goals.kv_utilization / 100 if goals.kv_utilization else KV_SHARE,
    )
    return ScalingRules(
        least=between.least,
        most=between.most,
        targets=targets,
        up_s=policy.scale_up.stabilization_seconds,
        up_step=policy.scale_up.max_step,
        down_s=policy.scale_down.stabilization_seconds,
        down_step=policy.scale_down.max_step,
        to_zero=policy.scale_to_zero.enabled,
        idle_s=policy.scale_to_zero.idle_seconds,
        streams_move=service.spec.rebalancing.mode == "Migrate",
        room=service.spec.engine.given("max_num_batched_tokens"),
        fallback=policy.fallback_replicas,
    )


def _timed(mind: AutoscalerState, groups: Iterable[ObservedGroup], now: str) -> AutoscalerState:
    """Returns the state with the start times of groups that serve since the last observation."""
    groups = tuple(groups)
    ready = {group.uid: group for group in groups if group.ready}
    ages = [age_s(ready[uid].created, now) for uid in sorted(mind.starting & ready.keys())]
    starts = tuple(age for age in ages if age is not None and age >= 0)
    known = frozenset(group.uid for group in groups)
    if mind.is_new:
        return replace(mind, served=known, is_new=False)
    served = (mind.served | ready.keys()) & known
    young = frozenset(group.uid for group in groups if not group.ready) - served
    return replace(mind, starting=young, served=served, starts_s=(*mind.starts_s, *starts)[-STARTS:])


def _cold_s(mind: AutoscalerState, former: AutoscalingStatus) -> float:
    """Returns the 95th percentile of a group's start time."""
    if mind.starts_s:
        return sorted(mind.starts_s)[int(0.95 * (len(mind.starts_s) - 1) + 0.5)]
    return float(former.cold_start_seconds) or COLD_S


def _conflict(policy: Autoscaling, snapshot: Snapshot, former: AutoscalingStatus, replicas: int, now: str) -> str:
    """Returns who wrote the count after the operator within CONFLICT_S; empty if no other client did.

    A 0 written through /scale has no owner in managedFields, and neither has any later write there: then a count that differs
    from the operator's last one is another client's.
    """
    writer = snapshot.replicas_writer
    if policy.mode != "Internal" or not former.last_scale_time:
        return ""
    if writer is None:
        told = next((c for c in snapshot.status.conditions if c.reason == Reason.CONFLICTING_SCALER), None)
        writer = ReplicasWriter("somebody", told.last_transition_time if told else now)
        is_ours = told is None and replicas == former.desired
    else:
        is_ours = writer.manager == labels.MANAGER
    age = age_s(writer.at, now)
    return "" if is_ours or age is None or age >= CONFLICT_S else f"{writer.manager} wrote spec.replicas at {writer.at}"


def _verdict(policy: Autoscaling, decision: ScaleDecision, conflict: str) -> tuple[bool, Reason, str]:
    if conflict:
        return (
            False,
            Reason.CONFLICTING_SCALER,
            f"{conflict}; only one client may write it: remove that one, or set mode External",
        )
    if decision.verdict in ("Hold", "Fallback"):
        fallback = policy.fallback_replicas
        held = "the count is held" + (f", and is at least {fallback} after {LOST_S:.0f} s" if fallback else "")
        return False, Reason.METRICS_UNAVAILABLE, f"fewer than half of the routers answered recently: {held}"
    reasons = {"Internal": Reason.ACTIVE, "External": Reason.EXTERNAL, "Advisory": Reason.ADVISORY}
    return True, reasons[policy.mode], ""


def _history(former: AutoscalingStatus, decision: ScaleDecision, before: int, now: str) -> tuple[ScaleChange, ...]:
    """Returns the last changes with this one, the newest last."""
    why = decision.why[:256]
    change = ScaleChange(time=now, before=before, after=decision.groups, reason=decision.verdict, message=why)
    return (*former.history, change)[-MAX_HISTORY:]


def _status(
    former: AutoscalingStatus,
    between: ReplicaBounds,
    decision: ScaleDecision,
    before: int,
    mind: AutoscalerState,
    last_scale_time: str,
) -> AutoscalingStatus:
    changed = decision.groups != before
    return AutoscalingStatus(
        desired=decision.groups,
        min_replicas=between.least,
        max_replicas=between.most,
        bounds=between.why[:256],
        reason=decision.verdict if changed else former.reason,
        message=f"from {before} to {decision.groups}: {decision.why}"[:512] if changed else former.message,
        last_scale_time=last_scale_time,
        cold_start_seconds=round(_cold_s(mind, former)) if mind.starts_s else former.cold_start_seconds,
        history=former.history,
    )
