"""Conditions and status fields from router reports: `Balanced`, `Speculating`, exposure and `Compatible`.

A hotspot is listed once it has lasted LASTING_S, without its values, which are metrics: the status changes only when one starts
or ends.
"""

import datetime

from phalanx_api.conditions import Condition, ConditionType, Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.engine import Engine
from phalanx_api.status import MAX_LISTED_HOTSPOTS, HotspotStatus, RebalancingStatus, Status
from phalanx_api.summary import Cause, Hotspot
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import Snapshot, override_condition, parsed

LASTING_S = 5.0
REASONS: dict[Cause, Reason] = {
    "kv": Reason.KV_BOUND,
    "prefill": Reason.PREFILL_BOUND,
    "decode": Reason.DECODE_BOUND,
    "prefix": Reason.PREFIX_SKEW,
    "straggler": Reason.STRAGGLER,
    "full": Reason.IMMINENT_FULL,
}


def rebalancing_status(fleet: Fleet, former: RebalancingStatus, now: str) -> RebalancingStatus:
    """Returns the hotspots; without router reports the last known ones."""
    if fleet.asked and not fleet.answered:
        return former
    known = {(hotspot.group, hotspot.cause): hotspot for hotspot in former.hotspots}
    found = [
        HotspotStatus(
            group=hotspot.group[:63],
            cause=REASONS[hotspot.cause].value,
            since=_since(hotspot, known.get((hotspot.group[:63], REASONS[hotspot.cause].value)), now),
            action=hotspot.action[:64],
        )
        for hotspot in fleet.hotspots
        if hotspot.since_s >= LASTING_S
    ]
    listed = sorted(found, key=lambda hotspot: (hotspot.since, hotspot.group))[:MAX_LISTED_HOTSPOTS]
    return RebalancingStatus(hotspots=tuple(listed), saturated=fleet.saturated)


def _since(hotspot: Hotspot, former: HotspotStatus | None, now: str) -> str:
    moment = parsed(now)
    if former is not None or moment is None:
        return former.since if former else now
    return (moment - datetime.timedelta(seconds=min(hotspot.since_s, 1e6))).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_balanced_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Returns the status with the hotspots and `Balanced`."""
    rebalancing = rebalancing_status(fleet, snapshot.status.rebalancing, now)
    conditions = _set_balanced(status.conditions, fleet, rebalancing, snapshot.generation, now)
    return status.model_copy(update={"rebalancing": rebalancing, "conditions": conditions})


def _set_balanced(
    conditions: tuple[Condition, ...], fleet: Fleet, status: RebalancingStatus, generation: int, now: str
) -> tuple[Condition, ...]:
    """Sets `Balanced`: false with the cause of the longest hotspot; unchanged before the first complete poll."""
    verdict: bool | None
    if fleet.is_new and find_condition(conditions, "Balanced"):
        return conditions
    message = "; ".join(f"{one.group}: {one.cause} since {one.since}, {one.action}" for one in status.hotspots)
    if fleet.asked and not fleet.answered:
        verdict, reason, message = None, Reason.ROUTERS_SILENT, "no router answers the operator"
    elif status.saturated:
        verdict, reason = False, Reason.FLEET_SATURATED
    elif status.hotspots:
        verdict, reason = False, Reason(status.hotspots[0].cause)
    else:
        verdict, reason = True, Reason.BALANCED
    return set_condition(conditions, "Balanced", verdict, reason=reason, message=message, generation=generation, now=now)


# `Speculating`, set only with `spec.engine.speculative`. A group whose draft model cannot be loaded or fails serves without it
# and
# reports that to the routers.


def with_speculating_condition(
    status: Status, engine: Engine, snapshot: Snapshot, revision: str, fleet: Fleet, now: str
) -> Status:
    """Returns the status with the condition, from ready groups of this revision; without router reports it stays unchanged."""
    conditions = status.conditions
    is_asked = engine.speculative is not None and engine.speculative.method != "None"
    if not is_asked:
        conditions = drop_condition(conditions, "Speculating")
    elif not (fleet.asked and not fleet.answered and find_condition(conditions, "Speculating")):
        conditions = _set(conditions, snapshot, revision, fleet, now)
    return status.model_copy(update={"conditions": conditions})


def _set(conditions: tuple[Condition, ...], snapshot: Snapshot, revision: str, fleet: Fleet, now: str) -> tuple[Condition, ...]:
    names = sorted(group.name for group in live(snapshot.groups) if group.ready and group.revision == revision)
    seen = [fleet.groups[name] for name in names if name in fleet.groups]
    lost = [f"{group.name}: {group.draft_lost}" for group in seen if group.draft_lost]
    reason = Reason.DRAFT_LOST if lost else Reason.PROPOSING if seen else Reason.NO_READY_GROUP
    verdict = not lost if seen else None
    return set_condition(
        conditions, "Speculating", verdict, reason=reason, message="; ".join(lost), generation=snapshot.generation, now=now
    )


# Exposure outside of the cluster: `spec.router.expose`.


def with_exposure_condition(status: Status, why: str, snapshot: Snapshot, now: str) -> Status:
    """Returns the status with why the Ingress or HTTPRoute could not be created; unchanged if it could, or is not wanted.

    The service still serves inside the cluster: only conditions that would claim that everything is as specified become false.
    """
    if not why:
        return status
    conditions = drop_condition(status.conditions, "Reconciling")  # even during a rollout: intervention is needed
    message = f"spec.router.expose: {why}"[:1024]
    ready = find_condition(conditions, "Ready")
    verdicts: list[tuple[ConditionType, bool]] = [("RouterReady", False)]
    verdicts += [("Ready", False)] if ready and ready.status == "True" else []
    verdicts += [("Stalled", True)] if find_condition(conditions, "Stalled") is None else []
    for kind, is_true in verdicts:
        conditions = override_condition(
            conditions, kind, is_true=is_true, reason=Reason.REJECTED, message=message, snapshot=snapshot, now=now
        )
    return status.model_copy(update={"conditions": conditions})


def with_compatible_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Returns the status with `Compatible`, which is absent until versions differ; without router reports it stays unchanged."""
    unknown = fleet.unknown_versions
    if not unknown and (find_condition(status.conditions, "Compatible") is None or not fleet.all_heard or not fleet.answered):
        return status
    reason = Reason.UNKNOWN_VERSION if unknown else Reason.VERSIONS_AGREE
    conditions = set_condition(
        status.conditions,
        "Compatible",
        not unknown,
        reason=reason,
        message="; ".join(unknown),
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})
