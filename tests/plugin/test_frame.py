"""Frames of `kubectl phalanx watch`, from readings."""

import pathlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from phalanx_api.cache_curve import CacheCurve
from phalanx_api.summary import OpenStream, StreamList
from phalanx_kubectl.frame import (
    COLUMNS,
    STREAM_COLUMNS,
    STREAM_WIDTHS,
    WIDTHS,
    Reading,
    frame,
    quantile,
    stream_frame,
    text,
)
from phalanx_kubectl.gauges import CacheLoad, GroupLoad, RouterLoad, RouterTraffic, read_router
from phalanx_router.metrics import Outcome, RouterMetrics
from phalanx_router.moves.records import Outcome as MoveOutcome
from tests.plugin.services import METRICS, make_body

ROOT = pathlib.Path(__file__).parents[2]
INF = float("inf")
NO_TRAFFIC = RouterTraffic()
LOAD = GroupLoad(
    streams=5, running=8, waiting=1, kv=0.25, step_s=0.0123, cache=CacheLoad(curve=CacheCurve(10, [0.3, 0.41, 0.5, 0.6]))
)


def reading(*routers: RouterLoad, at_s: float = 10.0, **status: object) -> Reading:
    named = {f"r-{number}": router for number, router in enumerate(routers)}
    return Reading(service=make_body(**status), routers=named, at_s=at_s)


def loaded(streams: int, traffic: RouterTraffic = NO_TRAFFIC, **hotspots: str) -> RouterLoad:
    group = GroupLoad(streams=streams, running=LOAD.running, waiting=1, kv=0.25, step_s=0.0123, cache=LOAD.cache)
    return RouterLoad(
        streams,
        2,
        1,
        {"chat-g-a": group},
        hotspots={name.replace("_", "-"): cause for name, cause in hotspots.items()},
        traffic=traffic,
    )


def test_rows_join_phases_loads_and_hotspots() -> None:
    shown = frame(reading(loaded(5, chat_g_a="kv"), loaded(2)))
    assert shown.rows == {
        "chat-g-a": ("chat-g-a", "Ready", "7", "8", "1", "25%", "41%", "12ms", "kv"),
        "chat-g-b": ("chat-g-b", "Starting", "-", "-", "-", "-", "-", "-", "-"),
    }


def test_streams_show_their_change() -> None:
    shown = frame(reading(loaded(7), at_s=12.0), reading(loaded(5)))
    assert shown.rows["chat-g-a"][2] == "7 +2"
    assert frame(reading(loaded(4), at_s=12.0), reading(loaded(5))).rows["chat-g-a"][2] == "4 -1"
    assert frame(reading(loaded(5), at_s=12.0), reading(loaded(5))).rows["chat-g-a"][2] == "5"


def test_traffic_is_that_since_the_last_reading() -> None:
    before = RouterTraffic(finished=10, moves=1, shed=0, ttft={0.1: 4, 0.2: 4, INF: 4}, itl={0.01: 100, INF: 100})
    now = RouterTraffic(finished=30, moves=4, shed=2, ttft={0.1: 4, 0.2: 24, INF: 24}, itl={0.01: 100, INF: 100})
    lines = frame(reading(loaded(5, now), loaded(1), at_s=14.0), reading(loaded(5, before), loaded(1))).head
    assert lines[1] == "5.0 req/s, ttft p95 195ms, 6 streams, 4 queued, 2 held, 3 moved, 2 rejected"
    assert frame(reading(loaded(5, now))).head[1] == "5 streams, 2 queued, 1 held", "nothing to compare with"
    restarted = frame(reading(loaded(5, before), at_s=14.0), reading(loaded(5, now)))
    assert restarted.head[1].startswith("0.0 req/s, 5 streams"), "its counters began again"


def test_state_names_rollout_drain_and_pause() -> None:
    body = make_body(drainingReplicas=1)
    body["spec"]["rollout"] = {"paused": True}
    shown = frame(Reading(service=body, routers={}, warnings=("router r-b: away",), at_s=1.0))
    assert shown.head[0] == "team/chat RollingOut: 1 of 2 groups ready, 1 draining, 1 updated, rollout paused"
    assert shown.foot == ["Ready: RollingOut: 1 of 2", "router r-b: away"]


def test_stalled_is_bad_when_true() -> None:
    conditions = [
        {"type": "Stalled", "status": "True", "reason": "SpecInvalid", "message": "no"},
        {"type": "Balanced", "status": "True"},
    ]
    assert frame(reading(conditions=conditions)).foot == ["Stalled: SpecInvalid: no"]


def test_text_fits_80_columns() -> None:
    names = [f"a-service-with-a-very-long-name-g-{number:05}" for number in range(64)]
    groups = [{"name": name, "phase": "Terminating", "pods": 1, "readyPods": 1} for name in names]
    load = GroupLoad(streams=1000, running=1024, waiting=9999, kv=1.0, step_s=1.234, cache=LOAD.cache)
    router = RouterLoad(64_000, 2, 1, dict.fromkeys(names, load), hotspots=dict.fromkeys(names, "straggler"))
    lines = text(frame(reading(router, groups=groups))).splitlines()
    table = lines[3:68]
    assert len(table) == 65 and table[0].split() == list(COLUMNS)
    assert max(map(len, table)) <= 80
    assert table[1].startswith("…") and table[1].split()[0].endswith("00000")
    assert sum(WIDTHS) + 2 * len(WIDTHS) == 80


def listed(at_s: float, *tokens: int) -> StreamList:
    """The streams of the example in docs/monitoring.md."""
    streams = [
        OpenStream(
            number=12, tenant="red", group="chat-g-a", prompt_tokens=900, tokens=tokens[0], age_s=8, moves=0, moving_to="chat-g-b"
        ),
        OpenStream(
            number=9, tenant="red", group="chat-g-b", prompt_tokens=4021, tokens=tokens[1], age_s=31, moves=1, left="chat-g-a"
        ),
        OpenStream(number=7, tenant="blue", group="chat-g-b", prompt_tokens=120, tokens=tokens[2], age_s=40, moves=0),
    ]
    return StreamList(at_s=at_s, total=3, streams=streams)


def test_streams_look_as_documented() -> None:
    shown = stream_frame({"r-a": (listed(102.0, 210, 512, 866), listed(100.0, 160, 464, 820))})
    documented = (ROOT / "docs/monitoring.md").read_text()
    lines = documented[documented.index("3 streams\n") :].splitlines()[:5]
    assert lines[0] == shown.head and lines[1].split() == list(STREAM_COLUMNS)
    for text_line, row in zip(lines[2:], shown.rows.values(), strict=True):
        assert text_line == "  ".join(cell.ljust(width) for cell, width in zip(row, STREAM_WIDTHS, strict=True)).rstrip()
    assert sum(STREAM_WIDTHS) + 2 * len(STREAM_WIDTHS) == 80


def test_streams_of_two_routers_keep_apart() -> None:
    shown = stream_frame({"r-a": (listed(102.0, 1, 2, 3), None), "r-b": (listed(9.0, 1, 2, 3), listed(9.0, 0, 0, 0))})
    assert [name for name in shown.rows if name.endswith("/12")] == list(shown.rows)[:2], "moving ones first"
    assert len(shown.rows) == 6 and shown.head == "6 streams"
    assert {row[6] for row in shown.rows.values()} == {"-"}, "without time between lists there is no rate"


@pytest.mark.parametrize(
    ("fields", "cells"),
    [
        ({"group": ""}, {2: "waits"}),
        ({"joined": True}, {7: "joined"}),
        ({"moves": 3}, {7: "3"}),
        ({"tenant": ""}, {1: "-"}),
        ({"tenant": "a-very-long-name"}, {1: "a-very-lo"}),
        ({"tenant": "a\x1b[2J\nb"}, {1: "a [2J b"}),
        ({"age_s": 1800.0}, {3: "30m"}),
        ({"age_s": 100_000.0}, {3: "28h"}),
    ],
)
def test_cells_of_a_stream(fields: dict[str, Any], cells: dict[int, str]) -> None:
    made = msgspec.structs.replace(listed(1.0, 1, 2, 3).streams[2], **fields)
    (row,) = stream_frame({"r-a": (StreamList(at_s=1.0, total=1, streams=[made]), None)}).rows.values()
    assert {column: row[column] for column in cells} == cells
    assert all(len(cell) <= width for cell, width in zip(row, STREAM_WIDTHS, strict=True))


def test_metrics_of_a_router_are_read() -> None:
    page = (
        METRICS
        + """phalanx_router_requests_total{outcome="finished"} 7.0
phalanx_router_requests_total{outcome="failed"} 2.0
phalanx_router_moves_total{outcome="moved",why="hotspot"} 3.0
phalanx_router_moves_total{outcome="moved",why="drain"} 1.0
phalanx_router_moves_total{outcome="refused",why="no_room"} 9.0
phalanx_router_shed_total{why="queue_full"} 4.0
phalanx_router_time_to_first_token_seconds_bucket{le="0.1",model_name="a"} 1.0
phalanx_router_time_to_first_token_seconds_bucket{le="0.1",model_name="b"} 2.0
phalanx_router_time_to_first_token_seconds_bucket{le="+Inf",model_name="a"} 5.0
"""
    )
    read = read_router(page)
    assert read.traffic == RouterTraffic(finished=7, moves=4, shed=4, ttft={0.1: 3, INF: 5}, itl={})
    assert read.hotspots == {"g-b": "kv"}


def test_moves_and_requests_count_as_routers_do() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for outcome in get_args(MoveOutcome):
        metrics.move_ended(outcome, "hotspot", 0, None)
    for end in get_args(Outcome):
        metrics.request_ended(end)
    metrics.shed("queue_full")
    assert read_router(generate_latest(registry).decode()).traffic == RouterTraffic(finished=1, moves=1, shed=1)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        ({}, {}, None),
        ({0.1: 5, INF: 5}, {0.1: 5, INF: 5}, None),
        ({0.1: 0, 0.2: 10, INF: 10}, {}, 0.195),
        ({0.1: 10, 0.2: 20, INF: 20}, {0.1: 10, 0.2: 10, INF: 10}, 0.195),
        ({0.1: 1, INF: 100}, {}, 0.1),
    ],
)
def test_quantile_is_of_new_values(now: dict[float, float], before: dict[float, float], expected: float | None) -> None:
    found = quantile(0.95, now, before)
    assert found == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], share: float) -> None:
    bounds, cumulative, total = [0.1 * (i + 1) for i in range(len(counts))], dict[float, float](), 0
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        cumulative[bound] = total
    cumulative[INF] = total
    found = quantile(share, cumulative, {})
    if total == 0:
        assert found is None
        return
    assert found is not None
    (first, *_) = [bound for bound in bounds if cumulative[bound] >= share * total]
    assert first - 0.1 - 1e-9 <= found <= first + 1e-9


def test_guide_shows_a_frame() -> None:
    before = RouterTraffic(finished=10, ttft={0.1: 4, 0.2: 4, INF: 4})
    now = RouterTraffic(finished=20, moves=3, ttft={0.1: 4, 0.2: 24, INF: 24})
    shown = text(frame(reading(loaded(7, now, chat_g_a="decode"), at_s=12.0), reading(loaded(5, before))))
    assert f"```\n{shown}```\n" in (ROOT / "docs" / "monitoring.md").read_text(), shown
