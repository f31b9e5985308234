"""`Balanced`, `Speculating`, `Compatible`, `CertificateValid`, and conditions of rejected routers.

Hotspots are listed after `LISTED_AFTER_S`, without values, so that the status changes only when one starts or ends.
"""

import datetime

from phalanx_api.conditions import (
    REASON_OF_CAUSE,
    Condition,
    ConditionType,
    Reason,
    drop_condition,
    find_condition,
    set_condition,
)
from phalanx_api.spec.engine import Engine
from phalanx_api.spec.router import RouterTls
from phalanx_api.status import MAX_LISTED_HOTSPOTS, HotspotStatus, RebalancingStatus, Status
from phalanx_api.summary import Hotspot
from phalanx_operator.decide.conditions.devices import throttled_devices
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import Snapshot, override_condition, parse_time

LISTED_AFTER_S = 5.0
SATURATED = "most groups are overloaded, so moves do not help; kubectl phalanx explain names the limit and the field to change"


def rebalancing_status(fleet: Fleet, former: RebalancingStatus, now: str) -> RebalancingStatus:
    """Returns the hotspots; `former` without router reports."""
    if fleet.is_silent:
        return former
    known = {(hotspot.group, hotspot.cause): hotspot for hotspot in former.hotspots}
    hotspots = [
        HotspotStatus(
            group=hotspot.group[:63],
            cause=REASON_OF_CAUSE[hotspot.cause].value,
            since=_since(hotspot, known.get((hotspot.group[:63], REASON_OF_CAUSE[hotspot.cause].value)), now),
            action=hotspot.action[:64],
        )
        for hotspot in fleet.hotspots
        if hotspot.since_s >= LISTED_AFTER_S
    ]
    listed = sorted(hotspots, key=lambda hotspot: (hotspot.since, hotspot.group))[:MAX_LISTED_HOTSPOTS]
    return RebalancingStatus(hotspots=tuple(listed), saturated=fleet.saturated)


def _since(hotspot: Hotspot, former: HotspotStatus | None, now: str) -> str:
    moment = parse_time(now)
    if former is not None or moment is None:
        return former.since if former else now
    return (moment - datetime.timedelta(seconds=min(hotspot.since_s, 1e6))).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_balanced_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Sets `Balanced` and the hotspots."""
    rebalancing = rebalancing_status(fleet, snapshot.status.rebalancing, now)
    conditions = _set_balanced(status.conditions, fleet, rebalancing, snapshot.generation, now)
    return status.model_copy(update={"rebalancing": rebalancing, "conditions": conditions})


def _set_balanced(
    conditions: tuple[Condition, ...], fleet: Fleet, status: RebalancingStatus, generation: int, now: str
) -> tuple[Condition, ...]:
    """Unchanged before the first complete poll."""
    verdict: bool | None
    if fleet.is_new and find_condition(conditions, "Balanced"):
        return conditions
    message = "; ".join(_describe(hotspot, fleet) for hotspot in status.hotspots)
    if fleet.is_silent:
        verdict, reason, message = None, Reason.ROUTERS_SILENT, "no router answers the operator"
    elif status.saturated:
        verdict, reason = False, Reason.FLEET_SATURATED
        message = "; ".join(filter(None, (SATURATED, message)))
    elif status.hotspots:
        verdict, reason = False, Reason(status.hotspots[0].cause)
    else:
        verdict, reason = True, Reason.BALANCED
    return set_condition(conditions, "Balanced", verdict, reason=reason, message=message, generation=generation, now=now)


def _describe(hotspot: HotspotStatus, fleet: Fleet) -> str:
    """A straggler's throttled device is named: it makes the group slow."""
    text = f"{hotspot.group}: {hotspot.cause} since {hotspot.since}, {hotspot.action}"
    devices = throttled_devices(fleet, hotspot.group) if hotspot.cause == Reason.STRAGGLER else ""
    return f"{text} ({devices})" if devices else text


def with_speculating_condition(
    status: Status, engine: Engine, snapshot: Snapshot, revision: str, fleet: Fleet, now: str
) -> Status:
    """Sets `Speculating`, from ready groups of this revision; unchanged without router reports."""
    conditions = status.conditions
    is_configured = engine.speculative is not None and engine.speculative.method != "None"
    if not is_configured:
        conditions = drop_condition(conditions, "Speculating")
    elif not (fleet.is_silent and find_condition(conditions, "Speculating")):
        conditions = _set_speculating(conditions, snapshot, revision, fleet, now)
    return status.model_copy(update={"conditions": conditions})


def _set_speculating(
    conditions: tuple[Condition, ...], snapshot: Snapshot, revision: str, fleet: Fleet, now: str
) -> tuple[Condition, ...]:
    names = sorted(group.name for group in live_groups(snapshot.groups) if group.alive and group.revision == revision)
    reports = [fleet.groups[name] for name in names if name in fleet.groups]
    losses = [f"{report.name}: {report.engine.draft_loss}" for report in reports if report.engine.draft_loss]
    reason = Reason.DRAFT_LOST if losses else Reason.PROPOSING if reports else Reason.NO_READY_GROUP
    verdict = not losses if reports else None
    return set_condition(
        conditions, "Speculating", verdict, reason=reason, message="; ".join(losses), generation=snapshot.generation, now=now
    )


def with_router_error(status: Status, error: str, snapshot: Snapshot, now: str) -> Status:
    """Sets conditions for rejected routers, or their exposure. `Available` stays: former routers serve inside the cluster."""
    return with_rejection(status, error, snapshot, now, ("RouterReady",)) if error else status


def with_rejection(status: Status, error: str, snapshot: Snapshot, now: str, unmet: tuple[ConditionType, ...] = ()) -> Status:
    """Sets conditions for an object that the API server rejects while groups are managed. `unmet`: further conditions."""
    conditions = drop_condition(status.conditions, "Reconciling")  # intervention is needed even during a rollout
    ready = find_condition(conditions, "Ready")
    verdicts: list[tuple[ConditionType, bool]] = [(kind, False) for kind in unmet]
    verdicts += [("Ready", False)] if ready and ready.status == "True" else []
    verdicts += [("Stalled", True)] if find_condition(conditions, "Stalled") is None else []
    for kind, is_true in verdicts:
        conditions = override_condition(
            conditions, kind, is_true=is_true, reason=Reason.REJECTED, message=error[:1024], snapshot=snapshot, now=now
        )
    return status.model_copy(update={"conditions": conditions})


def with_certificate_condition(status: Status, tls: RouterTls | None, snapshot: Snapshot, now: str) -> Status:
    """Sets `CertificateValid`, only with `spec.router.tls`; unchanged while the Secret cannot be read."""
    certificate = snapshot.certificate
    if tls is None:
        return status.model_copy(update={"conditions": drop_condition(status.conditions, "CertificateValid")})
    if certificate is None:
        return status
    is_valid = certificate.reason is Reason.VALID
    message = certificate.message if is_valid else f"spec.router.tls.secretName: {certificate.message}"
    conditions = set_condition(
        status.conditions,
        "CertificateValid",
        is_valid,
        reason=certificate.reason,
        message=message,
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})


def with_compatible_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Sets `Compatible`, which is absent until versions differ; unchanged without router reports."""
    unknown = fleet.unknown_versions
    is_known = find_condition(status.conditions, "Compatible") is not None
    if not unknown and (not is_known or not fleet.is_complete or not fleet.answered):
        return status
    conditions = set_condition(
        status.conditions,
        "Compatible",
        not unknown,
        reason=Reason.UNKNOWN_VERSION if unknown else Reason.VERSIONS_AGREE,
        message="; ".join(unknown),
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})
