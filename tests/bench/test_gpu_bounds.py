"""Bounds and verdicts of `bench.gpu`, its budget of time, and its open loop: pure functions."""

import math
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.bounds import Figure, Outcome, Verdict, exit_code, limit_of, skip_reason, small_bound
from bench.gpu.clock import Interval, busy_share
from bench.gpu.engine_run import Step, TimedRunner, last_decodes, window_of
from bench.gpu.open_loop import TRACE_FILE, conversation, paced, steady, synthetic
from bench.gpu.report import Part, number, run_parts, to_json, to_text
from bench.gpu.sizes import Sizes
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult


@pytest.mark.parametrize(
    ("value", "bound", "is_least", "limit", "expected"),
    [
        (1.0, None, True, "", ""),
        (0.86, 0.86, True, "", "yes"),
        (0.85, 0.86, True, "", "NO"),
        (20.0, 20.0, False, "", "yes"),
        (20.1, 20.0, False, "", "NO"),
        (120.0, 100.0, False, "router 0: 0.97 CPU s/s", "limited"),
        (90.0, 100.0, False, "router 0: 0.97 CPU s/s", "yes"),
        (math.nan, 0.5, True, "", "NO"),
        (math.nan, 0.5, False, "", "NO"),
    ],
)
def test_verdict_of_a_figure(value: float, bound: float | None, is_least: bool, limit: str, expected: Verdict) -> None:
    assert Figure(name="x", value=value, bound=bound, is_least=is_least, limit=limit).verdict == expected


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(part="a"), 0),
        (Outcome(part="a", skipped="no time"), 3),
        (Outcome(part="a", skipped="no time", failed="RuntimeError"), 1),
        (Outcome(part="a", failed="RuntimeError"), 1),
        (Outcome(part="a", figures=[Figure(name="x", value=1, bound=2)]), 1),
        (Outcome(part="a", figures=[Figure(name="x", value=1, bound=2)], skipped="the time ended"), 1),
        (Outcome(part="a", figures=[Figure(name="x", value=1, bound=2, limit="client")]), 0),
        (Outcome(part="a", figures=[Figure(name="x", value=3, bound=2)]), 0),
    ],
)
def test_exit_code_separates_missed_bounds_from_skipped_parts(outcome: Outcome, expected: int) -> None:
    assert exit_code([Outcome(part="good"), outcome]) == expected


def test_small_bound_follows_the_copy_rate() -> None:
    assert small_bound(4.3e12) == pytest.approx(2200)
    assert small_bound(3.0e12) == pytest.approx(1534.9, abs=0.1)


@pytest.mark.parametrize(("spent", "needed", "skips"), [(0, 480, False), (400, 80, False), (401, 80, True), (481, 0, True)])
def test_a_part_starts_if_it_fits(spent: float, needed: float, skips: bool) -> None:
    assert bool(skip_reason(spent, needed, 480)) is skips


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({}, ""),
        ({"router 0": 0.5, "client": 0.89}, ""),
        ({"router 0": 0.95, "client": 0.91}, "router 0: 0.95 CPU s/s"),
        ({"router 0": 0.95, "rank: engine loop and device": 1.2}, "router 0: 0.95 CPU s/s"),
        ({"router 0": 0.5, "rank: engine loop and device": 1.2}, ""),
    ],
)
def test_limit_is_the_saturated_program(shares: dict[str, float], expected: str) -> None:
    assert limit_of(shares) == expected


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(3.0, 3.0)], 0.0),
        ([(0.0, 1.0)], 1.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 2.0), (1.0, 2.0)], 0.75),
        ([(0.0, 4.0), (1.0, 2.0)], 1.0),
    ],
)
def test_busy_share_covers_overlaps_once(intervals: list[Interval], expected: float) -> None:
    assert busy_share(intervals) == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1))
def test_busy_share_equals_a_count_of_slots(pairs: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + size)) for start, size in pairs]
    covered = {slot for start, size in pairs for slot in range(start, start + size)}
    total = max(end for _, end in intervals) - min(start for start, _ in intervals)
    assert busy_share(intervals) == pytest.approx(len(covered) / total if total else 0.0)


def step(ended: float, rows: int, tokens: int | None = None) -> Step:
    return Step(started=ended - 0.5, ended=ended, num_rows=rows, num_tokens=rows if tokens is None else tokens, context=10 * rows)


def test_window_is_the_last_run_of_full_decodes() -> None:
    steps = [step(1, 2), step(2, 2, 30), step(3, 1), step(4, 2), step(5, 2), step(8, 2)]
    found = last_decodes(steps, 2)
    assert [one.ended for one in found] == [4, 5, 8]
    window = window_of(found)
    assert (window.period_s, window.context, window.num_steps) == (2.0, 20.0, 2)
    with pytest.raises(RuntimeError, match="too few steps"):
        window_of(last_decodes(steps, 3))


class PlannedRunner:
    """A StepRunner without a model."""

    pool, depth = PoolShape(9, 4), 1

    def start(self, plan: StepPlan) -> None:
        self._step = plan.step

    def finish(self) -> StepResult:
        return StepResult(step=self._step, tokens=[])


def test_decodes_at_the_end_are_counted() -> None:
    runner, found = TimedRunner(PlannedRunner()), []
    for at, counts in enumerate([[5], [1], [1], [1, 1], [1, 1], [1, 7], [1]]):
        rows = list(range(len(counts)))
        tokens = [0] * sum(counts)
        runner.start(
            StepPlan(step=at, admitted=[], rows=rows, starts=[3 for _ in rows], counts=counts, pages=[], tokens=tokens, draws=[])
        )
        runner.finish()
        found.append(runner.num_decodes)
    assert found == [0, 1, 2, 1, 2, 0, 1]
    assert [one.context for one in runner.steps] == [8, 4, 4, 8, 8, 14, 4]


def figures(name: str) -> Iterator[Figure]:
    yield Figure(name=name, value=0.5, unit="share", bound=0.8, predicted=0.9)


def failing() -> Iterator[Figure]:
    yield Figure(name="before", value=1.0)
    raise RuntimeError("the device is lost")


def test_parts_run_within_the_budget_and_keep_their_figures() -> None:
    times = count(0, 10)
    parts = [Part("a", 5, lambda: figures("x")), Part("b", 5, failing), Part("c", 60, lambda: figures("y"))]
    outcomes = list(run_parts(parts, 100, lambda: next(times)))
    assert [(one.part, len(one.figures), bool(one.skipped), bool(one.failed)) for one in outcomes] == [
        ("a", 1, False, False),
        ("b", 1, False, True),
        ("c", 0, True, False),
    ]
    text = to_text(outcomes)
    assert "b: failed: RuntimeError: the device is lost" in text
    assert "a: x misses its bound" in text
    assert "c: skipped: 50 s of 100 s are spent, and it takes about 60 s" in text
    assert to_json(outcomes, {"device": "none"})["exit"] == 1


def test_time_before_the_parts_is_spent_too() -> None:
    [outcome] = run_parts([Part("a", 60, lambda: figures("x"))], 100, lambda: 50.0, started_s=0.0)
    assert outcome.skipped == "50 s of 100 s are spent, and it takes about 60 s"


def endless() -> Iterator[Figure]:
    yield Figure(name="before", value=1.0)
    while True:
        pass


def test_a_part_ends_with_the_budget() -> None:
    [outcome] = run_parts([Part("a", 0, endless)], 0.05)
    assert len(outcome.figures) == 1 and outcome.skipped and outcome.is_good


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(0.8612, "share", "86.1%"), (12345.6, "tok/s", "12,346 tok/s"), (123.45, "us", "123.5 us"), (1.234, "", "1.23")],
)
def test_numbers_have_their_unit(value: float, unit: str, expected: str) -> None:
    assert number(value, unit) == expected


@given(count=st.integers(2, 40), rate=st.floats(0.5, 500))
def test_paced_requests_have_the_rate(count: int, rate: float) -> None:
    found = paced(synthetic(count), rate)
    assert found[0].at_s == 0
    assert found[-1].at_s == pytest.approx((count - 1) / rate)
    assert all(later.at_s >= sooner.at_s for sooner, later in pairwise(found))


def test_steady_requests_have_the_rate() -> None:
    found = steady(1000.0, 10.0, 32, 16)
    assert 9_500 < len(found) < 10_500
    assert {(one.input_tokens, one.output_tokens) for one in found} == {(32, 16)}


def test_conversation_is_read_where_a_trace_is(tmp_path: Path) -> None:
    _, name = conversation(3, 100, tmp_path / "empty")
    assert name.startswith("synthetic")
    (tmp_path / "shared" / "traces").mkdir(parents=True)
    lines = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,39,109\n"
    (tmp_path / "shared" / "traces" / TRACE_FILE).write_text(lines)
    found, name = conversation(9, 100, tmp_path)
    assert name == TRACE_FILE
    assert [(one.input_tokens, one.output_tokens) for one in found] == [(100, 44), (39, 50)]


def test_default_sizes_are_those_of_the_bounds() -> None:
    sizes = Sizes()
    assert (sizes.batches, sizes.context, sizes.prefill, sizes.rate) == ((1, 64, 256), 512, 2048, 1000.0)
    assert sizes.bound(0.5) == 0.5
