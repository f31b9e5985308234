"""Makes the console's records of the state of a router. Pure: reads, and changes nothing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from phalanx_api.cache_curve import SIZES, CacheCurve, merge_curves
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import BalancePolicy, GroupSummary, Histogram, Hotspot, RouterSummary
from phalanx_api.wire.leader import Load
from phalanx_router.console.records import (
    ConsoleMove,
    FleetState,
    GroupCurve,
    GroupState,
    LoadCurve,
    Quantiles,
    RequestDetails,
    RequestList,
    RequestState,
    SegmentState,
    SettingsState,
    TimelineEntry,
)
from phalanx_router.request_log import RequestTimeline, StreamMove
from phalanx_router.session import FleetSettings

MAX_REQUESTS = 200
"""Requests in a list."""
NOW = SIZES.index(1.0)
"""Position of the present size in the curve of a cache."""
MIN_SPEEDUP = 0.5
LOAD_POINTS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
"""Loads of a curve, as shares of the largest batch."""


def fleet_state(
    summary: RouterSummary,
    loads: Mapping[str, Load | None],
    timelines: Iterable[RequestTimeline],
    moves: Iterable[StreamMove],
    drain_requests: Collection[str],
    policy: BalancePolicy,
    now: float,
    instance: str = "",
    explanation: Sequence[str] = (),
) -> FleetState:
    """Returns the fleet. `loads`: last load report by group; `instance`: id of the process."""
    hotspots = {hotspot.group: hotspot for hotspot in summary.hotspots}
    groups = sorted(summary.groups, key=lambda group: group.group)
    positions = {group.group: position for position, group in enumerate(groups)}
    streams = [
        (line.number, positions.get(line.group, -1), line.prompt_tokens + line.tokens, _num_moved(line), line.is_moving)
        for line in timelines
    ]
    return FleetState(
        router=summary.router,
        instance=instance,
        groups=[
            _group(group, loads.get(group.group), hotspots.get(group.group), group.group in drain_requests) for group in groups
        ],
        streams=streams,
        moves=[_move(move, now - move.at) for move in reversed(list(moves))],
        hotspots=summary.hotspots,
        saturated=summary.fleet_saturated,
        queued=summary.queued,
        queued_tokens=summary.queued_tokens,
        held=summary.held,
        shed_total=summary.shed_total,
        moves_total=summary.moves_total,
        moves_failed_total=summary.moves_failed_total,
        policy=summary.policy,
        mode=policy.mode,
        cpu_share=summary.cpu_share,
        explanation=list(explanation),
    )


def _num_moved(line: RequestTimeline) -> int:
    return sum(move.outcome == "moved" for move in line.moves)


def _group(group: GroupSummary, load: Load | None, hotspot: Hotspot | None, is_requested: bool) -> GroupState:
    rates = group.cache_curve.hit_rates
    used = max(0, load.total_pages - load.free_pages - load.reserved_pages) if load is not None else 0
    return GroupState(
        name=group.group,
        revision=group.revision,
        state=group.state,
        draining=group.draining,
        drain_requested=is_requested and not group.draining,
        streams=group.streams,
        running=group.running,
        max_num_seqs=group.max_num_seqs,
        waiting=group.waiting,
        pressure=group.pressure,
        backlog_s=group.backlog_s,
        itl_s=group.itl_s / max(group.speedup, MIN_SPEEDUP),
        speed=group.speed,
        device_busy=group.device_busy,
        preemptions=group.preemptions,
        hit_rate=rates[NOW] if len(rates) > NOW else None,
        page_size=group.page_size,
        pages=load.total_pages if load is not None else 0,
        used_pages=used,
        reserved_pages=load.reserved_pages if load is not None else 0,
        cached_pages=load.cached_pages if load is not None else 0,
        hotspot=str(hotspot.cause) if hotspot is not None else "",
        action=hotspot.action if hotspot is not None else "",
    )


def _move(move: StreamMove, at_s: float) -> ConsoleMove:
    return ConsoleMove(
        request=move.number,
        source=move.source,
        target=move.target,
        at_s=at_s,
        index=move.index,
        transfer=move.transfer,
        reason=move.reason,
        outcome=move.outcome,
        pages=move.pages,
        num_bytes=move.num_bytes,
        duration_s=max(0.0, move.ended_at - move.at) if move.outcome else 0.0,
        stall_s=move.stall_s,
    )


def request_list(
    timelines: Iterable[RequestTimeline], tenant: str | None, now: float, wall_s: float, instance: str = ""
) -> RequestList:
    """Returns the newest requests of a tenant, or of all. `timelines`: the newest first; `wall_s`: Unix time of `now`."""
    shown: list[RequestState] = []
    num_open, is_truncated = 0, False
    for line in timelines:
        if tenant is not None and line.tenant != tenant:
            continue
        num_open += line.end is None
        if len(shown) < MAX_REQUESTS:
            shown.append(request_state(line, now, wall_s))
        else:
            is_truncated = True
    return RequestList(instance=instance, requests=shown, open=num_open, truncated=is_truncated)


def request_state(line: RequestTimeline, now: float, wall_s: float) -> RequestState:
    """Returns one request."""
    first = line.first_token_at
    return RequestState(
        number=line.number,
        name=line.name,
        tenant=line.tenant,
        group=line.group,
        arrived_unix_s=round(wall_s - (now - line.arrived_at), 1),
        prompt_tokens=line.prompt_tokens,
        tokens=line.tokens,
        first_token_s=first - line.arrived_at if first is not None else None,
        duration_s=(line.end.at if line.end is not None else now) - line.arrived_at,
        moves=_num_moved(line),
        replays=sum(event.kind in ("lost", "drained") for event in line.events),
        end=line.end.how if line.end is not None else "",
    )


def request_details(line: RequestTimeline, now: float, wall_s: float) -> RequestDetails:
    """Returns one request with its time line."""
    since = line.arrived_at
    events = [
        TimelineEntry(at_s=event.at - since, kind=event.kind, group=event.group, index=event.index, note=event.note)
        for event in line.events
    ]
    if line.first_token_at is not None:
        first = TimelineEntry(at_s=line.first_token_at - since, kind="first token", group="", index=0, note="")
        events = sorted([*events, first], key=lambda event: event.at_s)
    return RequestDetails(
        request=request_state(line, now, wall_s),
        events=events,
        segments=_segments(line),
        moves=[_move(move, move.at - since) for move in line.moves],
        dropped=line.num_dropped,
    )


def _segments(line: RequestTimeline) -> list[SegmentState]:
    """Without those in which a group computed no token."""
    ends = [later.start for _, later in pairwise(line.segments)] + [line.tokens]
    return [
        SegmentState(group=segment.group, epoch=segment.epoch, start=segment.start, end=end)
        for segment, end in zip(line.segments, ends, strict=False)
        if end > segment.start
    ]


def settings_state(summary: RouterSummary, settings: FleetSettings, policy: BalancePolicy) -> SettingsState:
    """Returns settings and curves."""
    return SettingsState(
        router=summary.router,
        settings=shown_settings(settings),
        policy=msgspec.to_builtins(policy),
        traffic=summary.traffic,
        ttft=quantiles(summary.ttft),
        itl=quantiles(summary.itl),
        wait=quantiles(summary.wait),
        sizes=list(SIZES),
        curve=merge_curves(group.cache_curve for group in summary.groups),
        group_curves=[
            GroupCurve(group=group.group, curve=CacheCurve(group.cache_curve.lookups, group.cache_curve.hit_rates))
            for group in summary.groups
            if group.cache_curve.hit_rates
        ],
        load_curves=load_curves(summary.groups),
    )


def shown_settings(settings: FleetSettings) -> dict[str, float | int | list[str]]:
    """Returns the settings of a router. The token of the service is not among them."""
    return {
        "served names": list(settings.served_names),
        "heartbeat timeout, s": settings.link.heartbeat_timeout_s,
        "replays of a stream, at most": settings.max_replays,
        "departures of a stream, at most": settings.max_departures,
        "patience of a started stream, s": settings.patience_s,
        "keep-alive after, s": settings.keep_alive_s,
        "retry after, s": settings.retry_after_s,
        "queued requests, at most": settings.queue.max_requests,
        "queued prompt tokens, at most": settings.queue.max_tokens,
        "balancing tick, s": settings.tick_s,
        "hold of a cold start, s": settings.hold_s,
        "held requests, at most": settings.max_held,
    }


def quantiles(values: Histogram) -> Quantiles:
    """Returns the quantiles of a histogram."""
    return Quantiles(p50=values.quantile(0.5), p90=values.quantile(0.9), p99=values.quantile(0.99))


def load_curves(groups: Sequence[GroupSummary]) -> list[LoadCurve]:
    """Returns the curve of each group with fitted steps, at the mean context of its present requests."""
    curves = []
    for group in groups:
        model = StepModel.from_coefficients(group.step_model)
        if model is None:
            continue
        most = group.max_num_seqs or max(16, group.running)
        context = group.live_tokens / group.running if group.running else 512.0
        counts = sorted({1, *(max(1, round(most * share)) for share in LOAD_POINTS)})
        points = [
            (count, model.predict(StepWork(0, count, int(count * context))) / max(group.speedup, MIN_SPEEDUP)) for count in counts
        ]
        curves.append(LoadCurve(group=group.group, running=group.running, points=points))
    return curves
