"""What the page shows of a service, from its object."""

from collections.abc import Mapping
from typing import Any

import msgspec

from phalanx_api.conditions import ALARMS
from phalanx_operator.kube.client import Json


class Trouble(msgspec.Struct, frozen=True):
    """A condition that needs attention."""

    type: str
    reason: str
    message: str


class ScalingRow(msgspec.Struct, frozen=True):
    """The autoscaler's last decision."""

    desired: int
    min_replicas: int
    max_replicas: int
    reason: str
    message: str


class ServiceRow(msgspec.Struct, frozen=True):
    """One service."""

    namespace: str
    name: str
    state: str
    """Reason of its condition Ready."""
    is_ready: bool
    groups: int
    ready_groups: int
    draining_groups: int
    wanted_groups: int
    """0 while it is suspended."""
    model: str
    hotspots: list[str]
    """Names of groups."""
    troubles: list[Trouble]
    has_console: bool
    is_https: bool
    """Its routers serve HTTPS."""
    scaling: ScalingRow | None
    """Null without `status.autoscaling`."""


def service_row(body: Json) -> ServiceRow:
    """Returns the row of an InferenceService, which may be invalid or have no status yet."""
    metadata, spec, status = body["metadata"], _table(body, "spec"), _table(body, "status")
    conditions = [each for each in status.get("conditions") or [] if isinstance(each, Mapping)]
    ready = next((each for each in conditions if each.get("type") == "Ready"), {})
    hotspots = _table(status, "rebalancing").get("hotspots") or []
    return ServiceRow(
        namespace=metadata["namespace"],
        name=metadata["name"],
        state=str(ready.get("reason", "NotObserved")),
        is_ready=ready.get("status") == "True",
        groups=_number(status, "replicas"),
        ready_groups=_number(status, "readyReplicas"),
        draining_groups=_number(status, "drainingReplicas"),
        wanted_groups=0 if spec.get("suspend") else _number(spec, "replicas"),
        model=str(_table(spec, "model").get("uri", "")),
        hotspots=[str(each.get("group", "")) for each in hotspots if isinstance(each, Mapping)],
        troubles=[_trouble(each) for each in conditions if _is_trouble(each)],
        has_console=_table(spec, "router").get("console") is True,
        is_https=str(status.get("url", "")).startswith("https:"),
        scaling=_scaling(_table(status, "autoscaling")),
    )


def _is_trouble(condition: Mapping[str, Any]) -> bool:
    kind = condition.get("type")
    return kind != "Reconciling" and condition.get("status") == ("True" if kind in ALARMS else "False")


def _trouble(condition: Mapping[str, Any]) -> Trouble:
    return Trouble(*(str(condition.get(name, "")) for name in ("type", "reason", "message")))


def _scaling(autoscaling: Mapping[str, Any]) -> ScalingRow | None:
    if not autoscaling:
        return None
    return ScalingRow(
        desired=_number(autoscaling, "desired"),
        min_replicas=_number(autoscaling, "minReplicas"),
        max_replicas=_number(autoscaling, "maxReplicas"),
        reason=str(autoscaling.get("reason", "")),
        message=str(autoscaling.get("message", "")),
    )


def _table(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(body: Mapping[str, Any], name: str) -> int:
    found = body.get(name)
    return found if isinstance(found, int) else 0
