"""Formats API objects as text."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx_api.cache_curve import NO_USE, SIZES, merge_curves
from phalanx_api.explain.findings import Explanation
from phalanx_kubectl.gauges import CacheLoad, GroupLoad, RouterLoad

Json = Mapping[str, Any]
NOTHING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with columns three spaces apart."""
    lines = [list(head), *([NOTHING if cell in (None, "") else printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def printable(text: str) -> str:
    """Returns one line without control characters, which terminals obey: clients choose names of tenants, containers messages."""
    return "".join(char if char.isprintable() else " " for char in text)


def services(bodies: Sequence[Json], *, with_namespace: bool) -> str:
    """Returns one line per service."""
    rows = [_service_row(body, with_namespace) for body in bodies]
    head = (["NAMESPACE"] if with_namespace else []) + ["NAME", "READY", "REASON", "GROUPS", "UPDATED", "DRAINING", "REVISION"]
    return table(head, rows) if rows else "no inference services found\n"


def _service_row(body: Json, with_namespace: bool) -> list[object]:
    status, metadata = _status(body), body["metadata"]
    ready = conditions_of(body).get("Ready", {})
    own: list[object] = [
        *(metadata["name"], ready.get("status", "Unknown"), ready.get("reason")),
        f"{status.get('readyReplicas', 0)}/{wanted_groups(body)}",
        *(status.get("updatedReplicas", 0), status.get("drainingReplicas", 0), status.get("updateRevision")),
    ]
    return [metadata["namespace"], *own] if with_namespace else own


def leader(lease: Json, now: str) -> str:
    """Returns which operator leads."""
    spec = lease.get("spec") or {}
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        return "no leader: the status below may be out of date"
    age_s = (datetime.datetime.fromisoformat(now) - datetime.datetime.fromisoformat(renewed)).total_seconds()
    if age_s > spec.get("leaseDurationSeconds", 0):
        return f"{holder} renewed its lease {age_s:.0f} s ago: the status below may be out of date"
    return f"{holder} leads"


def status(body: Json, operator: str = "") -> str:
    """Returns the status of a service. `operator`: the leader."""
    current, metadata = _status(body), body["metadata"]
    is_behind = current.get("observedGeneration", 0) < metadata.get("generation", 0)
    facts = [
        ("Service", f"{metadata['namespace']}/{metadata['name']}"),
        ("URL", current.get("url")),
        ("Model", _model(body)),
        ("Revision", revisions_of(current)),
        ("Groups", _counts(body)),
        ("Scaling", _scaling(current)),
        ("Operator", operator),
        ("Note", "the operator has not observed the last change yet" if is_behind else ""),
    ]
    rows = [
        (kind, c.get("status"), c.get("reason"), c.get("lastTransitionTime"), c.get("message"))
        for kind, c in conditions_of(body).items()
    ]
    text = "".join(f"{name + ':':<10}{value}\n" for name, value in facts if value)
    text += "\n" + table(["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"], rows) if rows else ""
    hotspots = (current.get("rebalancing") or {}).get("hotspots") or []
    hot = [(h.get("group"), h.get("cause"), h.get("since"), h.get("action")) for h in hotspots]
    text += "\n" + table(["HOTSPOT", "CAUSE", "SINCE", "ACTION"], hot) if hot else ""
    text += _adapters(current.get("adapters") or [])
    is_limited = any(conditions_of(body).get(kind, {}).get("status") == "False" for kind in ("Ready", "Balanced"))
    command = f"kubectl phalanx explain {metadata['name']} -n {metadata['namespace']}"
    return text + (f"\nWhat limits it: {command}\n" if is_limited else "")


def _adapters(adapters: Sequence[Json]) -> str:
    """Returns the groups that hold each adapter, and why others cannot load it; empty without adapters."""
    loaded = [(a.get("name"), a.get("state"), a.get("loaded"), _loaded_in(a), a.get("message")) for a in adapters]
    text = "\n" + table(["ADAPTER", "STATE", "GROUPS", "LOADED IN", "MESSAGE"], loaded) if loaded else ""
    refused = [
        (a.get("name"), r.get("group"), r.get("state"), r.get("message")) for a in adapters for r in a.get("refusals") or []
    ]
    return text + ("\n" + table(["ADAPTER", "NOT LOADED IN", "STATE", "MESSAGE"], refused) if refused else "")


def _loaded_in(adapter: Json) -> str:
    names = adapter.get("groups") or []
    more = adapter.get("loaded", 0) - len(names)
    return ",".join(names) + (f" and {more} more" if names and more > 0 else "")


def _counts(body: Json) -> str:
    current = _status(body)
    text = f"{current.get('readyReplicas', 0)} of {wanted_groups(body)} ready, {current.get('drainingReplicas', 0)} draining"
    return f"{text}, {current.get('disruptionsAllowed', 0)} may be disrupted now"


def _model(body: Json) -> str:
    uri = ((body.get("spec") or {}).get("model") or {}).get("uri") or ""
    version = (_status(body).get("model") or {}).get("resolvedRevision")
    return f"{uri} at {version}" if version else str(uri)


def groups(body: Json, loads: Mapping[str, GroupLoad]) -> str:
    """Returns one line per group."""
    rows = []
    for group in groups_of(body):
        load = loads.get(group["name"])
        ready = f"{group.get('readyPods', 0)}/{group.get('pods', 0)}"
        gauges = (load.incarnation, load.streams) if load else (None, None)
        nodes = ",".join(group.get("nodes") or [])
        rows.append((group["name"], group.get("revision"), group.get("phase"), ready, *gauges, nodes, group.get("reason")))
    if not rows:
        return "no groups\n"
    text = table(["NAME", "REVISION", "PHASE", "PODS", "INCARNATION", "STREAMS", "NODES", "REASON"], rows)
    current = _status(body)
    more = current.get("replicas", 0) + current.get("drainingReplicas", 0) - len(rows)
    return text + (f"and {more} more ready groups\n" if more > 0 else "")


def top(body: Json, routers: Mapping[str, RouterLoad], loads: Mapping[str, GroupLoad]) -> str:
    """Returns the current load of groups and routers. MBU, MFU: shares of the devices' copy and matmul rates."""
    names = sorted({group["name"] for group in groups_of(body)} | loads.keys())
    rows = []
    for name in names:
        load = loads.get(name)
        rows.append((name, *(_gauges(load) if load else [None] * 8)))
    text = table(["GROUP", "STREAMS", "RUNNING", "WAITING", "KV", "STEP", "BUSY", "MBU", "MFU"], rows) if rows else "no groups\n"
    router_rows = [(name, load.streams, load.queued, load.held) for name, load in sorted(routers.items())]
    return text + ("\n" + table(["ROUTER", "STREAMS", "QUEUED", "HELD"], router_rows) if router_rows else "")


def cache(body: Json, loads: Mapping[str, GroupLoad]) -> str:
    """Returns the hit rates of page lookups by size of the cache: of each group, of all, and as the operator wrote them."""
    names = sorted({group["name"] for group in groups_of(body)} | loads.keys())
    caches = {name: loads[name].cache for name in names if name in loads}
    rows = [_cache_row(name, caches.get(name, CacheLoad())) for name in names]
    if len(caches) > 1:
        rows.append(_cache_row("all", CacheLoad(curve=merge_curves(group.curve for group in caches.values()))))
    if stored := _status(body).get("cache"):
        percents = [_stored(stored, field) for field in _STORED_PERCENTS]
        size = CacheLoad(pages=stored.get("pages", 0), page_bytes=stored.get("pageBytes", 0))
        rows.append([*_cache_row("status.cache", size)[:4], *percents])
    text = (
        table(["GROUP", "PAGES", "MEMORY", "LOOKUPS", "HALF", "NOW", "TWICE", "FOUR TIMES", "HOST", "DISK"], rows)
        if rows
        else "no groups\n"
    )
    text += _host_table(caches, _status(body).get("cache") or {}) + _use_table(caches)
    sized = conditions_of(body).get("CacheSized")
    if sized is None:
        return text
    message = f": {sized['message']}" if sized.get("message") else ""
    return f"{text}\nCacheSized {sized.get('status')}, {sized.get('reason')}{message}\n"


_STORED_SIZES = ("hitPercentHalf", "hitPercent", "hitPercentTwice", "hitPercentFourTimes")
_STORED_PERCENTS = (*_STORED_SIZES, "hitPercentWithHost", "hitPercentWithDisk")


def _stored(stored: Json, field: str) -> str | None:
    return None if stored.get(field) is None else f"{stored[field]}%"


def _cache_row(name: str, load: CacheLoad) -> list[object]:
    rates = [f"{rate:.0%}" for rate in load.curve.hit_rates] or [NOTHING] * len(SIZES)
    tiers = [None if rate is None else f"{rate:.0%}" for rate in (load.curve.tiers.host, load.curve.tiers.disk)]
    return [name, load.pages or None, _memory(load.pages, load.page_bytes), load.curve.lookups or None, *rates, *tiers]


def _host_table(caches: Mapping[str, CacheLoad], stored: Json) -> str:
    """Hit rates by the size of the host tier; empty without any."""
    rows = []
    for name, load in caches.items():
        tiers = load.curve.tiers
        if len(tiers.hit_rates) == len(SIZES):
            rates = [f"{rate:.0%}" for rate in tiers.hit_rates]
            rows.append([name, tiers.pages, _memory(tiers.pages, load.page_bytes), *rates])
    if host := stored.get("host"):
        memory = _memory(host.get("pages", 0), stored.get("pageBytes", 0))
        rows.append(["status.cache", host.get("pages"), memory, *(_stored(host, field) for field in _STORED_SIZES)])
    columns = ["WITH HOST PAGES", "PAGES", "MEMORY", "HALF", "FULL", "TWICE", "FOUR TIMES"]
    return "\n" + table(columns, rows) if rows else ""


def _use_table(caches: Mapping[str, CacheLoad]) -> str:
    """Statistics of pages; empty without any."""
    rows = []
    for name, load in caches.items():
        use = load.use
        if use != NO_USE:
            times = [f"{seconds:.0f}s" if seconds else None for seconds in (use.residency_s, use.host_residency_s)]
            sizes = [f"{size / 2**30:.3g}Gi" if size else None for size in (use.compacted_bytes, use.reclaimed_bytes)]
            rows.append([name, f"{use.reuse_pages:.0f}", *times, f"{use.unused_share:.0%}", *sizes])
    columns = ["PAGES OF", "REUSE", "RESIDENCY", "HOST RESIDENCY", "UNUSED SLOTS", "COMPACTED", "RECLAIMED"]
    return "\n" + table(columns, rows) if rows else ""


def _memory(pages: int, page_bytes: int) -> str | None:
    return f"{pages * page_bytes / 2**30:.3g}Gi" if pages * page_bytes else None


def explanation(found: Explanation) -> str:
    """Returns the state of a service and its findings, one per line."""
    costs = [f"{text}." for text in (found.cost, found.energy) if text]
    lines = [*f"{found.state}.".split("\n"), *costs, *found.numbered]  # an obstacle is a line of its own
    return "".join(f"{printable(line)}\n" for line in lines)


def _gauges(load: GroupLoad) -> list[object]:
    step = f"{load.step_s * 1000:.0f}ms" if load.step_s else None
    shares = [f"{share:.0%}" if share else None for share in (load.busy, load.bandwidth, load.flops)]
    return [load.streams, load.running, load.waiting, f"{load.kv:.0%}", step, *shares]


def _status(body: Json) -> Json:
    current: Json = body.get("status") or {}
    return current


def groups_of(body: Json) -> list[Json]:
    """Returns the groups in the status of a service."""
    return list(_status(body).get("groups") or [])


def conditions_of(body: Json) -> dict[str, Json]:
    """Returns the conditions of a service by type."""
    return {c.get("type", ""): c for c in _status(body).get("conditions") or []}


def wanted_groups(body: Json) -> int:
    """Returns the number of groups that a service should have."""
    spec = body.get("spec") or {}
    return 0 if spec.get("suspend") else int(spec.get("replicas") or 0)


def revisions_of(status: Json) -> str:
    """Returns the revision of a status, with the next one during a rollout."""
    current, update = status.get("currentRevision", ""), status.get("updateRevision", "")
    return f"{current} -> {update}" if current and current != update else update


def _scaling(status: Json) -> str:
    scaling = status.get("autoscaling") or {}
    if not scaling:
        return ""
    bounds = f"{scaling.get('minReplicas', 0)} to {scaling.get('maxReplicas', 0)}"
    why = f" ({scaling['reason']}: {scaling.get('message', '')})" if scaling.get("reason") else ""
    return f"{scaling.get('desired', 0)} groups desired, {bounds} allowed{why}"
