"""Formats API objects as text. Pure functions."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx_kubectl.gauges import GroupLoad, RouterLoad

Json = Mapping[str, Any]
NOTHING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with columns three spaces apart."""
    lines = [list(head), *([NOTHING if cell in (None, "") else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def services(bodies: Sequence[Json], *, with_namespace: bool) -> str:
    """Returns one line per service."""
    rows = [_service_row(body, with_namespace) for body in bodies]
    head = (["NAMESPACE"] if with_namespace else []) + ["NAME", "READY", "REASON", "GROUPS", "UPDATED", "DRAINING", "REVISION"]
    return table(head, rows) if rows else "no inference services found\n"


def _service_row(body: Json, with_namespace: bool) -> list[object]:
    status, metadata = _status(body), body["metadata"]
    ready = _conditions(body).get("Ready", {})
    own: list[object] = [
        *(metadata["name"], ready.get("status", "Unknown"), ready.get("reason")),
        f"{status.get('readyReplicas', 0)}/{_wanted(body)}",
        *(status.get("updatedReplicas", 0), status.get("drainingReplicas", 0), status.get("updateRevision")),
    ]
    return [metadata["namespace"], *own] if with_namespace else own


def leader(lease: Json, now: str) -> str:
    """Returns which operator leads by its Lease; without a leader that conditions may be out of date."""
    spec = lease.get("spec") or {}
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        return "no leader: the status below may be out of date"
    age_s = (datetime.datetime.fromisoformat(now) - datetime.datetime.fromisoformat(renewed)).total_seconds()
    if age_s > spec.get("leaseDurationSeconds", 0):
        return f"{holder} renewed its lease {age_s:.0f} s ago: the status below may be out of date"
    return f"{holder} leads"


def status(body: Json, operator: str = "") -> str:
    """Returns the whole status of a service. `operator`: the leader's line."""
    said, metadata = _status(body), body["metadata"]
    is_behind = said.get("observedGeneration", 0) < metadata.get("generation", 0)
    facts = [
        ("Service", f"{metadata['namespace']}/{metadata['name']}"),
        ("URL", said.get("url")),
        ("Model", _model(body)),
        ("Revision", _revisions(said)),
        ("Groups", f"{said.get('readyReplicas', 0)} of {_wanted(body)} ready, {said.get('drainingReplicas', 0)} draining"),
        ("Scaling", _scaling(said)),
        ("Operator", operator),
        ("Note", "the operator has not observed the last change yet" if is_behind else ""),
    ]
    rows = [
        (kind, one.get("status"), one.get("reason"), one.get("lastTransitionTime"), one.get("message"))
        for kind, one in _conditions(body).items()
    ]
    text = "".join(f"{name + ':':<10}{value}\n" for name, value in facts if value)
    text += "\n" + table(["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"], rows) if rows else ""
    hot = (said.get("rebalancing") or {}).get("hotspots") or []
    spots = [(one.get("group"), one.get("cause"), one.get("since"), one.get("action")) for one in hot]
    return text + ("\n" + table(["HOTSPOT", "CAUSE", "SINCE", "ACTION"], spots) if spots else "")


def _model(body: Json) -> str:
    """Returns the source of the model and the served version, if it has versions."""
    uri = ((body.get("spec") or {}).get("model") or {}).get("uri") or ""
    version = (_status(body).get("model") or {}).get("resolvedRevision")
    return f"{uri} at {version}" if version else str(uri)


def groups(body: Json, loads: Mapping[str, GroupLoad]) -> str:
    """Returns one line per group of the status, groups that are not ready first."""
    rows = []
    for group in _groups(body):
        load = loads.get(group["name"])
        ready = f"{group.get('readyPods', 0)}/{group.get('pods', 0)}"
        seen = (load.incarnation, load.streams) if load else (None, None)
        nodes = ",".join(group.get("nodes") or [])
        rows.append((group["name"], group.get("revision"), group.get("phase"), ready, *seen, nodes, group.get("reason")))
    if not rows:
        return "no groups\n"
    text = table(["NAME", "REVISION", "PHASE", "PODS", "INCARNATION", "STREAMS", "NODES", "REASON"], rows)
    said = _status(body)
    more = said.get("replicas", 0) + said.get("drainingReplicas", 0) - len(rows)
    return text + (f"and {more} more ready groups\n" if more > 0 else "")


def top(body: Json, routers: Mapping[str, RouterLoad], loads: Mapping[str, GroupLoad]) -> str:
    """Returns the current load of each group and each router."""
    names = sorted({group["name"] for group in _groups(body)} | loads.keys())
    rows = []
    for name in names:
        load = loads.get(name)
        rows.append((name, *(_gauges(load) if load else [None] * 5)))
    text = table(["GROUP", "STREAMS", "RUNNING", "WAITING", "KV", "STEP"], rows) if rows else "no groups\n"
    doors = [(name, load.streams, load.queued, load.held) for name, load in sorted(routers.items())]
    return text + ("\n" + table(["ROUTER", "STREAMS", "QUEUED", "HELD"], doors) if doors else "")


def _gauges(load: GroupLoad) -> list[object]:
    step = f"{load.step_s * 1000:.0f}ms" if load.step_s else None
    return [load.streams, load.running, load.waiting, f"{load.kv:.0%}", step]


def _status(body: Json) -> Json:
    found: Json = body.get("status") or {}
    return found


def _groups(body: Json) -> list[Json]:
    return list(_status(body).get("groups") or [])


def _conditions(body: Json) -> dict[str, Json]:
    return {one.get("type", ""): one for one in _status(body).get("conditions") or []}


def _wanted(body: Json) -> int:
    spec = body.get("spec") or {}
    return 0 if spec.get("suspend") else int(spec.get("replicas") or 0)


def _revisions(said: Json) -> str:
    current, update = said.get("currentRevision", ""), said.get("updateRevision", "")
    return f"{current} -> {update}" if current and current != update else update


def _scaling(said: Json) -> str:
    scaling = said.get("autoscaling") or {}
    if not scaling:
        return ""
    bounds = f"{scaling.get('minReplicas', 0)} to {scaling.get('maxReplicas', 0)}"
    why = f" ({scaling['reason']}: {scaling.get('message', '')})" if scaling.get("reason") else ""
    return f"{scaling.get('desired', 0)} groups desired, {bounds} allowed{why}"
