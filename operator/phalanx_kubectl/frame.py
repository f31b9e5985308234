"""What `kubectl phalanx watch` shows: a pure function of two readings of a service."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx_api.conditions import ALARMS
from phalanx_api.explain.findings import counted
from phalanx_api.summary import OpenStream, StreamList
from phalanx_kubectl.gauges import Buckets, GroupLoad, RouterLoad, merge
from phalanx_kubectl.show import NOTHING, Json, conditions_of, groups_of, printable, revisions_of, wanted_groups

COLUMNS = ("GROUP", "PHASE", "STREAMS", "BATCH", "WAIT", "KV", "HIT", "STEP", "HOTSPOT")
WIDTHS = (12, 11, 7, 5, 4, 4, 4, 6, 9)
"""Of the cells, which have a space on both sides: 80 columns."""
STREAM_COLUMNS = ("STREAM", "TENANT", "GROUP", "AGE", "PROMPT", "TOKENS", "RATE", "MOVES")
STREAM_WIDTHS = (6, 9, 12, 5, 6, 6, 6, 14)
StreamLists = tuple[StreamList, StreamList | None]
"""The newest list of a router, and the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A service and its routers at one time."""

    service: Json
    """The InferenceService."""
    routers: Mapping[str, RouterLoad]
    """Those that answered."""
    warnings: Sequence[str] = ()
    """Why others did not."""
    at_s: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class StreamFrame:
    """The line above the table of streams, and its rows by router and number."""

    head: str
    rows: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Frame:
    """The lines above and below the table of groups, and its rows by group."""

    head: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    foot: Sequence[str]


def frame(now: Reading, before: Reading | None = None) -> Frame:
    """Returns the frame of `now`. Rates, percentiles and changes of streams are those since `before`."""
    body, loads = now.service, merge(now.routers.values())
    former = merge(before.routers.values()) if before is not None else {}
    phases = {group["name"]: group.get("phase", "") for group in groups_of(body)}
    hotspots = {group: cause for router in now.routers.values() for group, cause in router.hotspots.items()}
    names = sorted(phases.keys() | loads.keys())
    rows = {name: _row(name, phases.get(name, ""), loads.get(name), former.get(name), hotspots.get(name, "")) for name in names}
    return Frame((_state(body), _traffic(now, before)), rows, [printable(note) for note in (*_notes(body), *now.warnings)])


def text(shown: Frame) -> str:
    """Returns the frame as lines of at most 80 columns where the table allows."""
    lines = [*shown.head, "", _line(COLUMNS), *(_line(row) for row in shown.rows.values())]
    return "\n".join([*lines, *(["", *shown.foot] if shown.foot else [])]) + "\n"


def stream_frame(lists: Mapping[str, StreamLists]) -> StreamFrame:
    """Returns the streams that routers list, moving ones first. Rates are those between the two lists of a router."""
    found = [(router, stream) for router, (now, _) in lists.items() for stream in now.streams]
    found.sort(key=lambda pair: (not pair[1].moving_to, not pair[1].left))  # keeps the order of each router
    rows = {f"{router}/{stream.number}": _stream_row(stream, _rate(stream, *lists[router])) for router, stream in found}
    total = sum(now.total for now, _ in lists.values())
    which = (
        f"{len(rows)} of {total:,} streams, moving ones first, then the oldest" if len(rows) < total else counted(total, "stream")
    )
    return StreamFrame(which, rows)


def _rate(stream: OpenStream, now: StreamList, before: StreamList | None) -> str:
    """Tokens per second since the list before."""
    former = next((each for each in before.streams if each.number == stream.number), None) if before is not None else None
    if before is None or former is None or now.at_s <= before.at_s:
        return NOTHING
    rate = max(0, stream.tokens - former.tokens) / (now.at_s - before.at_s)
    return f"{rate:.0f}/s" if rate >= 10 or not rate else f"{rate:.1f}/s"


def _stream_row(stream: OpenStream, rate: str) -> tuple[str, ...]:
    move = str(stream.moves or NOTHING)
    if stream.moving_to:
        move = f"to {_short(stream.moving_to, 11)}"
    elif stream.left:
        move = f"{stream.moves} from {_short(stream.left, 7)}"
    elif stream.joined:
        move = "joined"
    counts = (str(stream.prompt_tokens), str(stream.tokens), rate)
    group = _short(stream.group, STREAM_WIDTHS[2]) if stream.group else "waits"
    return (str(stream.number), printable(stream.tenant)[: STREAM_WIDTHS[1]] or NOTHING, group, _age(stream.age_s), *counts, move)


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 1000 else f"{seconds / 60:.0f}m" if seconds < 60_000 else f"{seconds / 3600:.0f}h"


def _short(name: str, width: int) -> str:
    """The end of a name: its start is that of the service."""
    return name if len(name) <= width else "…" + name[1 - width :]


def quantile(share: float, now: Buckets, before: Buckets) -> float | None:
    """Returns a quantile in seconds of the values between two readings of a histogram, if there are any.

    Linear within a bucket, as PromQL's `histogram_quantile`; the highest finite bound above it.
    """
    counts = {bound: count - before.get(bound, 0) for bound, count in sorted(now.items())}
    total = max(counts.values(), default=0)
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def _line(cells: Iterable[str]) -> str:
    return "  ".join(cell[:width].ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _row(name: str, phase: str, load: GroupLoad | None, former: GroupLoad | None, hotspot: str) -> tuple[str, ...]:
    short = _short(name, WIDTHS[0])
    if load is None:
        return (short, phase or NOTHING, *[NOTHING] * 6, hotspot or NOTHING)
    change = load.streams - former.streams if former is not None else 0
    streams = f"{load.streams}" + (f" {change:+d}" if change else "")
    rates = load.cache.curve.hit_rates
    hit = f"{rates[1]:.0%}" if len(rates) > 1 else NOTHING
    step = f"{load.step_s * 1000:.0f}ms" if load.step_s else NOTHING
    gauges = (streams, str(load.running), str(load.waiting), f"{load.kv:.0%}", hit, step)
    return (short, phase or NOTHING, *gauges, hotspot or NOTHING)


def _state(body: Json) -> str:
    status, metadata = body.get("status") or {}, body["metadata"]
    ready = conditions_of(body).get("Ready", {})
    why = f" {ready['reason']}" if ready.get("status") != "True" and ready.get("reason") else ""
    rollout = f", {status.get('updatedReplicas', 0)} updated" if "->" in revisions_of(status) else ""
    draining = f", {status['drainingReplicas']} draining" if status.get("drainingReplicas") else ""
    paused = ", rollout paused" if is_paused(body) else ""
    count = f"{status.get('readyReplicas', 0)} of {wanted_groups(body)} groups ready"
    return f"{metadata['namespace']}/{metadata['name']}{why}: {count}{draining}{rollout}{paused}"


def is_paused(body: Json) -> bool:
    """Returns whether the rollout of a service is paused."""
    return bool(((body.get("spec") or {}).get("rollout") or {}).get("paused"))


def _traffic(now: Reading, before: Reading | None) -> str:
    """Sums over the routers that answered both times; one that restarted counts from zero."""
    routers = now.routers.values()
    queue = (
        f"{sum(r.streams for r in routers)} streams, {sum(r.queued for r in routers)} queued, {sum(r.held for r in routers)} held"
    )
    if before is None:
        return queue
    pairs = [(load.traffic, before.routers[name].traffic) for name, load in now.routers.items() if name in before.routers]
    pairs = [(new, old) for new, old in pairs if new.finished >= old.finished]
    seconds = max(now.at_s - before.at_s, 1e-3)
    finished, moves, shed = (
        sum(getattr(new, field) - getattr(old, field) for new, old in pairs) for field in ("finished", "moves", "shed")
    )
    latencies = (
        [
            f"{name} p95 {value * 1000:.0f}ms"
            for name in ("ttft", "itl")
            if (value := quantile(0.95, *(_sum(getattr(side, name) for side in sides) for sides in zip(*pairs, strict=True))))
            is not None
        ]
        if pairs
        else []
    )
    events = [f"{count:.0f} {word}" for count, word in ((moves, "moved"), (shed, "rejected")) if count]
    return ", ".join([f"{finished / seconds:.1f} req/s", *latencies, queue, *events])


def _sum(histograms: Iterable[Buckets]) -> Buckets:
    total: dict[float, float] = {}
    for bound, count in itertools.chain.from_iterable(histogram.items() for histogram in histograms):
        total[bound] = total.get(bound, 0) + count
    return total


def _notes(body: Json) -> list[str]:
    """Conditions that need attention."""
    return [
        f"{kind}: {found.get('reason')}: {found.get('message', '')}".removesuffix(": ")
        for kind, found in conditions_of(body).items()
        if found.get("status") == ("True" if kind in ALARMS else "False") and kind != "Reconciling" and found.get("reason")
    ]
