"""The load in router reports, the capacity of a group, and the groups that the load needs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import OfferedLoad, Targets, busy_groups, demand, max_streams, own_ttft_s, wait_p95_s
from phalanx_operator.decide.state.fleet import BACKLOG_BOUND_S, RouterReport, median_step_model, merge
from tests.control.simulated_service import (
    CAPACITY,
    MODEL,
    SHAPE,
    TARGETS,
    rate_for,
)
from tests.control.summaries import fleet_of, group, summary


def load(busy: float = 1.0, kv: float = 0.0, backlog_s: float = 0.0) -> OfferedLoad:
    return OfferedLoad(rate_for(busy), SHAPE, kv * CAPACITY.kv_tokens, backlog_s)


@pytest.mark.parametrize(
    ("offered", "groups", "cause"),
    [
        (load(busy=0.0), 0, "work"),
        (load(busy=0.70), 1, "work"),
        (load(busy=0.76), 2, "work"),
        (load(busy=7.4), 10, "work"),
        (load(busy=0.5, kv=3.1), 4, "KV pages"),
        (load(busy=0.5, backlog_s=9.0), 1, "work"),
        (load(busy=0.5, backlog_s=31.0), 4, "the backlog 3 more"),
    ],
)
def test_groups_that_a_load_needs(offered: OfferedLoad, groups: int, cause: str) -> None:
    need = demand(offered, CAPACITY, Targets(itl_s=0.1))
    assert (need.groups, cause in need.why) == (groups, True), need


def test_wait_falls_with_groups_and_rises_with_burstiness() -> None:
    calm, bursty = load(3.0), replace(load(3.0), shape=replace_scv(9.0))
    waits = [wait_p95_s(n, 3.0, calm, CAPACITY) for n in range(3, 12)]
    assert waits[0] == float("inf") and waits == sorted(waits, reverse=True) and waits[-1] == 0
    assert wait_p95_s(4, 3.0, bursty, CAPACITY) > wait_p95_s(4, 3.0, calm, CAPACITY) > 0


def replace_scv(scv: float) -> Traffic:
    return Traffic(
        window_s=SHAPE.window_s,
        arrivals=1,
        prompt=SHAPE.prompt,
        prompt_squared=SHAPE.prompt_squared,
        missed=SHAPE.missed,
        output=SHAPE.output,
        scv=scv,
    )


def test_ttft_target_adds_groups_unless_it_is_unreachable() -> None:
    offered = replace(load(3.0), shape=replace_scv(20.0))
    own_s = own_ttft_s(offered, CAPACITY)
    loose, tight, absurd = (demand(offered, CAPACITY, Targets(ttft_s=own_s * times)) for times in (10.0, 1.6, 0.5))
    assert loose.ttft < tight.ttft and "first token" in tight.why
    assert (tight.is_ttft_reachable, absurd.is_ttft_reachable) == (True, False)
    assert absurd.groups < 10


def test_streams_per_group_fit_itl_target_and_pages() -> None:
    offered = load(1.0)
    many, few = (max_streams(offered, CAPACITY, Targets(itl_s=itl_s)) for itl_s in (0.2, 0.05))
    assert 1 <= few < many
    assert max_streams(offered, replace(CAPACITY, kv_tokens=int(3 * offered.context / 0.8)), Targets(itl_s=0.2)) == 3
    windowed = replace(CAPACITY, kv_tokens=int(3 * offered.context / 0.8), request_tokens=int(offered.context / 4))
    assert max_streams(offered, windowed, Targets(itl_s=0.2)) == 12, "streams that drop pages fill a quarter"
    assert max_streams(offered, CAPACITY, Targets(itl_s=0.001)) == 1


@settings(deadline=None)
@given(st.floats(0.01, 50.0), st.floats(1.0, 3.0))
def test_more_load_never_needs_fewer_groups(busy: float, times: float) -> None:
    assert demand(load(busy * times), CAPACITY, TARGETS).groups >= demand(load(busy), CAPACITY, TARGETS).groups


def test_slower_group_needs_more_groups_for_the_same_load() -> None:
    assert busy_groups(load(1.0), replace(CAPACITY, speed=2.0), TARGETS) > 1.9


def test_load_is_summed_over_routers_groups_use_newest_report() -> None:
    first = summary(group("a", streams=2, pressure=0.9, state="suspect"), rate=1.0, queued=3, idle_s=5.0, evacuated=["a", "b"])
    other = summary(group("a", streams=3, pressure=0.4), rate=3.0, queued=1, idle_s=9.0, evacuated=["b"])
    fleet = fleet_of(first, other)
    load, requests = fleet.groups["a"].load, fleet.requests
    assert (load.streams, load.pressure, load.is_fresh) == (5, 0.4, True)
    assert (requests.windows[60.0].arrivals, requests.queued, requests.idle_s, fleet.evacuated) == (240, 4, 5.0, frozenset("b"))
    assert requests.windows[60.0].prompt == pytest.approx(SHAPE.prompt)


def test_excuses_of_routers_are_merged_and_bounded() -> None:
    summaries = [summary(group("a", deaths=deaths, excused=excused)) for deaths, excused in ((2, 1), (3, 2), (0, 9))]
    assert fleet_of(*summaries[:2]).groups["a"].engine.excused == 2, "both may excuse the same death"
    excused = [fleet_of(report).groups["a"].engine.excused for report in summaries]
    assert excused == [1, 2, 0], "a later death is not excused in advance"


def test_old_answers_do_not_count() -> None:
    reports = [RouterReport("a", 10.0, summary()), RouterReport("b", 46.0, summary()), RouterReport("c", 90.0, summary())]
    assert [merge(reports, polled, 45.0).has_quorum for polled in (1, 2, 3)] == [True, True, False]
    assert not merge([], 0, 45.0).has_quorum


def test_inconsistent_group_counts_like_an_overloaded_one() -> None:
    absurd = [1e9, 1e9, 0.0, 1e9, 1e9]
    overloaded = group("z", pressure=1e9, backlog_s=1e12, speed=1e9, step_model=absurd, streams=-5, running=-7)
    fleet = fleet_of(summary(group("a"), group("b"), overloaded))
    faulty = fleet.groups["z"].load
    assert (faulty.pressure, faulty.backlog_s, faulty.streams, faulty.running) == (1.5, BACKLOG_BOUND_S, 0, 0)
    assert median_step_model(fleet.loads) == MODEL
    assert median_step_model([replace(faulty, step_model=None)]) is None


@pytest.mark.parametrize("numbers", [[], [0.1], [-1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
def test_invalid_step_model_is_ignored(numbers: list[float]) -> None:
    assert fleet_of(summary(group("a", step_model=numbers))).groups["a"].load.step_model is None
