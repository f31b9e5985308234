"""The autoscaler: its rule, its behaviour in virtual time, and its bounds for any reports."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.summary import GroupSummary, Histogram, RouterSummary, Traffic
from phalanx_operator.decide.scaling.scale import ScaleDecision, ScaleHistory, ScaleInputs, ScalingRules, evaluate
from phalanx_operator.decide.state.fleet import Fleet
from tests.control.simulated_service import (
    RULES,
    Change,
    SimulatedService,
    rate_for,
    square,
)
from tests.control.summaries import COEFFICIENTS, fleet_of, group, summary
from tests.examples import examples

HOUR = 3600.0


def steps(fleet: Fleet, groups: int, rules: ScalingRules, seconds: float, history: ScaleHistory | None = None) -> ScaleDecision:
    """Returns the first decision within `seconds` that changes the count, else the last one."""
    history, start_s = history or ScaleHistory(), 100.0
    now_s = start_s
    while True:
        inputs = ScaleInputs(now_s=now_s, groups=groups, serving=frozenset(fleet.groups), fleet=fleet)
        history, decision = evaluate(history, inputs, rules)
        if decision.groups != groups or now_s - start_s >= seconds:
            return decision
        now_s += 1.0


BUSY = fleet_of(summary(group("a"), rate=rate_for(2.9)))
CALM = fleet_of(summary(group("a"), group("b"), group("c"), rate=rate_for(0.4)))
SILENT_GROUPS = fleet_of(summary(group("a"), group("b", state="suspect"), group("c", state="suspect"), rate=rate_for(0.4)))
IDLE = fleet_of(summary(group("a", streams=0, running=0)))
EMPTY = fleet_of(summary())
HELD = fleet_of(summary(held=2, queued=2, queued_tokens=2000))
ZERO = replace(RULES, min_groups=0, scales_to_zero=True)


@pytest.mark.parametrize(
    ("fleet", "groups", "rules", "seconds", "expected"),
    [
        pytest.param(BUSY, 3, RULES, 14.0, (3, "Steady"), id="one evaluation is not enough"),
        pytest.param(BUSY, 3, RULES, 16.0, (4, "Out"), id="two are"),
        pytest.param(BUSY, 3, replace(RULES, max_groups=3), 60.0, (3, "Steady"), id="the bound holds"),
        pytest.param(BUSY, 3, replace(RULES, up_stabilization_s=60.0), 58.0, (3, "Steady"), id="not before its time"),
        pytest.param(BUSY, 3, replace(RULES, up_stabilization_s=60.0), 62.0, (4, "Out"), id="after its time"),
        pytest.param(BUSY, 4, RULES, 900.0, (4, "Steady"), id="groups without a place cause no more"),
        pytest.param(BUSY, 1, RULES, 0.0, (3, "Panic"), id="panic at once"),
        pytest.param(BUSY, 1, replace(RULES, up_max_step=1), 0.0, (2, "Panic"), id="by no more than a step"),
        pytest.param(CALM, 3, RULES, 58.0, (3, "Steady"), id="not stable yet"),
        pytest.param(CALM, 3, RULES, 62.0, (2, "In"), id="a minute if streams move"),
        pytest.param(replace(CALM, polled=2), 3, RULES, 900.0, (3, "Steady"), id="one of two routers answers"),
        pytest.param(SILENT_GROUPS, 3, RULES, 900.0, (3, "Steady"), id="two of three groups report no load"),
        pytest.param(CALM, 3, replace(RULES, can_move_streams=False), 290.0, (3, "Steady"), id="else five, not yet"),
        pytest.param(CALM, 3, replace(RULES, can_move_streams=False), 302.0, (2, "In"), id="else five"),
        pytest.param(CALM, 3, replace(RULES, down_stabilization_s=0.0), 0.0, (2, "In"), id="as the spec says"),
        pytest.param(CALM, 30, replace(RULES, max_groups=40, down_stabilization_s=0.0), 0.0, (27, "In"), id="a tenth"),
        pytest.param(
            CALM, 30, replace(RULES, max_groups=40, down_stabilization_s=0.0, down_max_step=1), 0.0, (29, "In"), id="or a step"
        ),
        pytest.param(CALM, 3, replace(RULES, min_groups=3), 900.0, (3, "Steady"), id="the minimum"),
        pytest.param(IDLE, 1, RULES, 900.0, (1, "Steady"), id="idle, but not to zero"),
        pytest.param(IDLE, 1, ZERO, 0.0, (0, "Zero"), id="idle"),
        pytest.param(IDLE, 2, replace(ZERO, idle_s=1001.0), 0.0, (2, "Steady"), id="not idle for long enough"),
        pytest.param(EMPTY, 0, ZERO, 100.0, (0, "Steady"), id="no request at zero"),
        pytest.param(HELD, 0, ZERO, 0.0, (1, "Wake"), id="a request wakes"),
        pytest.param(CALM, 0, ZERO, 0.0, (1, "Wake"), id="a request that a draining group serves wakes"),
        pytest.param(EMPTY, 0, RULES, 0.0, (1, "Bounds"), id="below the minimum"),
        pytest.param(BUSY, 30, RULES, 0.0, (20, "Bounds"), id="above the maximum"),
        pytest.param(fleet_of(polled=2), 5, RULES, 900.0, (5, "Hold"), id="no reports"),
        pytest.param(fleet_of(summary(rate=9.0), polled=3), 5, RULES, 900.0, (5, "Hold"), id="one of three routers answers"),
        pytest.param(fleet_of(polled=2), 0, RULES, 0.0, (1, "Bounds"), id="no reports, out of bounds"),
        pytest.param(fleet_of(polled=2), 2, replace(RULES, fallback=5), 44.0, (2, "Hold"), id="no reports for a short time"),
        pytest.param(fleet_of(polled=2), 2, replace(RULES, fallback=5), 45.0, (5, "Fallback"), id="no reports: fallback"),
        pytest.param(fleet_of(), 2, replace(RULES, fallback=5), 45.0, (5, "Fallback"), id="no router: fallback"),
        pytest.param(fleet_of(polled=2), 7, replace(RULES, fallback=5), 900.0, (7, "Hold"), id="never to fewer"),
        pytest.param(
            fleet_of(polled=2), 2, replace(RULES, max_groups=3, fallback=5), 45.0, (3, "Fallback"), id="within the bounds"
        ),
        pytest.param(fleet_of(polled=2), 0, replace(ZERO, fallback=2), 45.0, (2, "Fallback"), id="from zero"),
        pytest.param(fleet_of(summary(group(step_model=[]), rate=9.0)), 1, RULES, 60.0, (1, "Unmeasured"), id="no step measured"),
    ],
)
def test_decision_table(fleet: Fleet, groups: int, rules: ScalingRules, seconds: float, expected: tuple[int, str]) -> None:
    decision = steps(fleet, groups, rules, seconds)
    assert (decision.groups, decision.verdict) == expected, decision
    assert decision.why or decision.verdict == "Steady"


def test_queue_adds_needed_groups_once_step_times_are_known() -> None:
    history, _ = evaluate(
        ScaleHistory(),
        ScaleInputs(now_s=0.0, groups=1, serving=frozenset("a"), fleet=fleet_of(summary(group("a"), rate=1.0))),
        ZERO,
    )
    long = fleet_of(summary(held=90, queued=90, queued_tokens=250_000))
    assert steps(long, 0, ZERO, 0.0, history).groups == 4


def test_growth_is_bounded_per_15_seconds() -> None:
    flood = fleet_of(summary(*(group(name) for name in "abc"), rate=rate_for(300.0)))
    history, count, counts = ScaleHistory(), 3, []
    for now in range(0, 60, 2):
        history, decision = evaluate(
            history,
            ScaleInputs(now_s=float(now), groups=count, serving=frozenset("abc"), fleet=flood),
            replace(RULES, max_groups=1000),
        )
        count = decision.groups
        counts.append(count)
    assert counts[0] == 7 and all(later <= max(2 * former, former + 4) for former, later in zip(counts, counts[7:], strict=False))
    assert counts[-1] > 40


def test_recent_change_of_groups_delays_decisions() -> None:
    history, _ = evaluate(ScaleHistory(), ScaleInputs(now_s=0.0, groups=3, serving=frozenset("abc"), fleet=CALM), RULES)
    history, first = evaluate(history, ScaleInputs(now_s=61.0, groups=3, serving=frozenset("ab"), fleet=CALM), RULES)
    assert (first.groups, "just changed" in first.why) == (3, True)
    for now in (76.0, 92.0):
        history, decision = evaluate(history, ScaleInputs(now_s=now, groups=3, serving=frozenset("ab"), fleet=CALM), RULES)
    assert decision.verdict == "In"


def test_growth_from_arrivals_continues_after_a_change() -> None:
    """A queue may be left by the groups that changed, so it does not count."""
    queue = fleet_of(summary(*(group(name, backlog_s=11.0) for name in "abc"), rate=rate_for(0.4)))
    verdicts = []
    for fleet in (BUSY, queue):
        history, first = evaluate(ScaleHistory(), ScaleInputs(now_s=0.0, groups=3, serving=frozenset("abc"), fleet=fleet), RULES)
        history, _ = evaluate(history, ScaleInputs(now_s=14.0, groups=3, serving=frozenset("ab"), fleet=fleet), RULES)
        history, second = evaluate(history, ScaleInputs(now_s=15.0, groups=3, serving=frozenset("ab"), fleet=fleet), RULES)
        history, later = evaluate(history, ScaleInputs(now_s=46.0, groups=3, serving=frozenset("ab"), fleet=fleet), RULES)
        verdicts.append((first.verdict, second.verdict, later.verdict))
    assert verdicts == [("Steady", "Out", "Steady"), ("Steady", "Steady", "Out")]


def test_panic_from_arrivals_continues_after_a_change() -> None:
    history, _ = evaluate(ScaleHistory(), ScaleInputs(now_s=0.0, groups=1, serving=frozenset("ab"), fleet=CALM), RULES)
    history, panic = evaluate(history, ScaleInputs(now_s=3.0, groups=1, serving=frozenset("a"), fleet=BUSY), RULES)
    assert (panic.groups, panic.verdict) == (3, "Panic")


def test_call_between_evaluations_repeats_the_last_decision() -> None:
    history, first = evaluate(ScaleHistory(), ScaleInputs(now_s=0.0, groups=3, serving=frozenset("a"), fleet=BUSY), RULES)
    again, second = evaluate(history, ScaleInputs(now_s=1.0, groups=3, serving=frozenset("a"), fleet=BUSY), RULES)
    assert (second.verdict, second.why, second.needed) == ("Steady", first.why, first.needed)
    assert again.evidence == history.evidence


def reversals(changes: list[Change]) -> int:
    """Returns how often the direction changed."""
    up = [change.after > change.before for change in changes]
    return sum(a != b for a, b in pairwise(up))


@pytest.mark.parametrize("period_s", [10.0, 30.0, 60.0])
def test_waves_shorter_than_the_stabilisation_are_ridden_out(period_s: float) -> None:
    service = SimulatedService(square(rate_for(1.0), rate_for(4.0), period_s), groups=2).run(HOUR)
    assert len(service.changes) <= 5 and reversals(service.changes) <= 2, service.changes
    assert not [change for change in service.changes if change.at_s > HOUR / 2], service.changes
    assert 4 <= service.wanted <= 6


@pytest.mark.parametrize("period_s", [120.0, 300.0, 600.0])
def test_longer_waves_are_followed_in_bounded_steps(period_s: float) -> None:
    service = SimulatedService(square(rate_for(1.0), rate_for(4.0), period_s), groups=2).run(HOUR)
    periods = HOUR / period_s
    assert len(service.changes) <= 8 * periods and reversals(service.changes) <= 2 * periods, service.changes
    assert all(2 <= change.after <= 10 for change in service.changes)
    shrinking = [change.at_s for change in service.changes if change.after < change.before]
    assert all(later - former >= 59 for former, later in pairwise(shrinking))


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.75, 1.5, 2.2, 5.6])
def test_a_steady_load_does_not_flap(busy: float) -> None:
    """Noise may add a group once, but must not cause reversals."""
    service = SimulatedService(lambda _: rate_for(busy), groups=max(1, round(busy / 0.75)), seed=int(busy * 10)).run(HOUR)
    assert len(service.changes) <= 2 and reversals(service.changes) == 0, service.changes


def test_blackout_holds_the_count_until_it_ends() -> None:
    def rate(now_s: float) -> float:
        return rate_for(1.0 if now_s < 600 else 5.0)

    service = SimulatedService(rate, groups=2, reports=lambda now_s, summary: None if 550 <= now_s < 1150 else summary).run(1140)
    assert service.changes == [change for change in service.changes if change.at_s <= 550 + 46], service.changes
    assert service.decisions[-1].verdict == "Hold" and "routers answered" in service.decisions[-1].why
    before = service.wanted
    service.run(120)
    assert service.wanted > before


class FaultyGroup:
    """Replaces fields of one group in a router's summary."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name, self.fields = name, fields

    def __call__(self, now_s: float, summary: RouterSummary) -> RouterSummary:
        groups = [
            GroupSummary(**{f: getattr(g, f) for f in g.__struct_fields__} | self.fields) if g.group == self.name else g
            for g in summary.groups
        ]
        return RouterSummary(**{f: getattr(summary, f) for f in summary.__struct_fields__} | {"groups": groups})


@pytest.mark.parametrize(
    "faults",
    [
        {"pressure": 1e9, "backlog_s": 1e9, "running": 10**9, "itl_s": 1e9, "speed": 1e9},
        {"step_model": [1e6, 1e6, 0.0, 1e6, 1e6]},
        {"pressure": 0.0, "backlog_s": 0.0, "running": 0, "itl_s": 0.0, "speed": 1e-9, "step_model": [1e-9, 0.0, 0.0, 0.0, 0.0]},
        {"pressure": -1.0, "speed": -3.0, "total_pages": 0},
    ],
    ids=["overloaded", "slow steps", "idle and fast", "nonsense"],
)
def test_inconsistent_group_changes_the_count_by_two_at_most(faults: dict[str, Any]) -> None:
    correct = SimulatedService(lambda _: rate_for(2.5), groups=4, seed=1).run(HOUR / 2)
    faulty = SimulatedService(lambda _: rate_for(2.5), groups=4, seed=1, reports=FaultyGroup("g1", faults)).run(HOUR / 2)
    assert abs(faulty.wanted - correct.wanted) <= 2
    assert len(faulty.changes) <= 4 and reversals(faulty.changes) <= 1, faulty.changes
    assert faulty.wanted >= 3


def test_flapping_group_neither_flaps_count_nor_stops_growth() -> None:
    def serving(now_s: float, names: frozenset[str]) -> frozenset[str]:
        return names - {"g0"} if now_s % 40 < 20 else names

    steady = SimulatedService(lambda _: rate_for(2.0), groups=4, serving=serving).run(HOUR / 2)
    assert len(steady.changes) <= 3 and reversals(steady.changes) <= 1, steady.changes
    growing = SimulatedService(lambda now_s: rate_for(2.0 if now_s < 600 else 5.0), groups=4, serving=serving).run(900)
    assert growing.wanted >= 7


def test_count_goes_from_zero_up_and_back_to_zero() -> None:
    def rate(now_s: float) -> float:
        return 0.0 if now_s < 100 or now_s > 900 else rate_for(1.2)

    service = SimulatedService(rate, groups=0, rules=replace(RULES, min_groups=0, scales_to_zero=True)).run(2 * HOUR / 3)
    verdicts = [change.verdict for change in service.changes]
    assert service.changes[0].before == 0 and verdicts[0] == "Wake" and service.changes[0].at_s < 110
    assert max(change.after for change in service.changes) >= 2
    assert (service.wanted, verdicts[-1], service.changes[-1].after) == (0, "Zero", 0)
    assert verdicts.count("Wake") == verdicts.count("Zero") == 1


def test_group_that_a_request_woke_stays_until_idle_again() -> None:
    """The router of the request may end, and the others were idle for an hour."""
    history, woken = evaluate(ScaleHistory(), ScaleInputs(now_s=0.0, groups=0, serving=frozenset(), fleet=HELD), ZERO)
    assert (woken.groups, woken.verdict) == (1, "Wake")
    idle = fleet_of(summary(group("a", streams=0, running=0), idle_s=3600.0))
    rules = replace(ZERO, idle_s=900.0)
    for now_s, expected in ((5.0, (1, "Steady")), (899.0, (1, "Steady")), (900.0, (0, "Zero"))):
        inputs = ScaleInputs(now_s=now_s, groups=1, serving=frozenset("a"), fleet=idle)
        history, decision = evaluate(history, inputs, rules)
        assert (decision.groups, decision.verdict) == expected, now_s


def test_a_slow_ramp_is_met_before_it_arrives() -> None:
    """Growth of 2.5 % every 15 s is expected, with groups that start in three minutes."""

    def rate(now_s: float) -> float:
        return rate_for(8.0) * float(1.025 ** (max(now_s - 600, 0) / 15))

    service = SimulatedService(rate, groups=11, rules=replace(RULES, max_groups=200), cold_start_s=180.0).run(1500)
    assert any("growing" in change.why for change in service.changes), service.changes


@pytest.mark.parametrize("seed", range(4))
def test_a_wave_is_met_before_it_arrives(seed: int) -> None:
    """The load rises 4.5 times in ten minutes, with groups that start in one. Capacity is short for at most 16 s."""

    def busy(now_s: float) -> float:
        return 0.5 * (5.5 - 3.5 * math.cos(2 * math.pi * max(now_s - 300, 0) / 1200))

    service = SimulatedService(lambda now_s: rate_for(busy(now_s)), groups=2, cold_start_s=60.0, seed=seed)
    short_s = 0
    while service.now_s < 1500:
        service.step()
        short_s += 2 * (busy(service.now_s) > len(service.serving))
    assert short_s <= 16, service.changes
    assert max(change.after for change in service.changes) <= 9 and reversals(service.changes) <= 2, service.changes


numbers = st.floats(-1e12, 1e12)
counts = st.integers(-(10**9), 10**9)
wild_groups = st.builds(
    GroupSummary, group=st.sampled_from("abc"), revision=st.just("r"),
    state=st.sampled_from(["fresh", "degraded", "suspect", "dead"]), draining=st.booleans(), streams=counts, running=counts,
    waiting=counts, pressure=numbers, backlog_s=numbers, itl_s=numbers, speed=numbers, live_tokens=counts, total_pages=counts,
    page_size=counts, step_model=st.one_of(st.just(COEFFICIENTS), st.lists(numbers, max_size=6)),
)  # fmt: skip
wild_traffic = st.builds(
    Traffic, window_s=st.sampled_from([6.0, 60.0, 300.0]), arrivals=counts, prompt=numbers, prompt_squared=numbers,
    missed=numbers, output=numbers, scv=numbers,
)  # fmt: skip
wild_summaries = st.builds(
    RouterSummary, router=st.just("r"), groups=st.lists(wild_groups, max_size=3), traffic=st.lists(wild_traffic, max_size=3),
    queued=counts, queued_tokens=counts, held=counts, idle_s=numbers, ttft=st.just(Histogram()), itl=st.just(Histogram()),
)  # fmt: skip
any_rules = st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans(), st.sampled_from([None, 1, 3])).map(
    lambda parts: replace(
        RULES,
        min_groups=parts[0] if parts[2] else max(parts[0], 1),
        max_groups=max(1, parts[0]) + parts[1],
        scales_to_zero=parts[2],
        up_max_step=parts[3],
    )
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.lists(wild_summaries, max_size=2), min_size=1, max_size=5), any_rules, st.integers(0, 40))
def test_any_reports_keep_count_in_bounds_and_steps_small(
    reports: list[list[RouterSummary]], rules: ScalingRules, groups: int
) -> None:
    history = ScaleHistory()
    for turn, summaries in enumerate(reports):
        inputs = ScaleInputs(now_s=16.0 * turn, groups=groups, serving=frozenset("ab"), fleet=fleet_of(*summaries, polled=2))
        history, decision = evaluate(history, inputs, rules)
        assert rules.min_groups <= decision.groups <= rules.max_groups
        assert evaluate(history, inputs, rules)[1].groups in (groups, decision.groups)
        if decision.verdict != "Bounds":
            assert decision.groups <= max(2 * groups, groups + 4)
        if rules.up_max_step and decision.verdict in ("Out", "Panic"):
            assert decision.groups <= groups + rules.up_max_step
        if not summaries:
            assert decision.verdict in ("Hold", "Bounds")
        groups = decision.groups
