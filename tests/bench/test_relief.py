"""`bench.moves.relief` reads program output, sums it up and judges it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from bench.frame.client import Answer
from bench.frame.figures import median_interval
from bench.moves.relief import LONGEST_OUTPUT, MOVES, PREEMPTIONS, PROMPT_TOKENS, bodies, parser
from bench.moves.relief_claims import GAP, RATE, TPOT, TTFT, Round, judge, merged
from phalanx_router.metrics import RouterMetrics


def answer(*arrivals: float, error: str | None = None) -> Answer:
    return Answer(0.0, list(arrivals), ["x"] * len(arrivals), arrivals[-1], 64, len(arrivals), error)


def test_both_modes_get_the_same_requests() -> None:
    assert bodies(3, 20, even=False) == bodies(3, 20, even=False) != bodies(4, 20, even=False)
    assert {body["max_tokens"] for body in bodies(3, 20, even=True)} == {128}
    drawn = [body["max_tokens"] for body in bodies(3, 200, even=False)]
    assert len(set(drawn)) > 50 and all(isinstance(count, int) and 16 <= count <= LONGEST_OUTPUT for count in drawn)


def test_the_first_group_s_own_requests_always_fit_alone() -> None:
    args, page_bytes = parser().parse_args([]), 16 * 4096
    longest = -(-(PROMPT_TOKENS + LONGEST_OUTPUT) // 16)
    assert (longest, args.kv_cache_memory_bytes // page_bytes) == (54, 201)
    assert args.own_clients * longest < 201


def test_figures_are_read_from_program_output() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.move_ended("moved", "hotspot", 10, 0.1)
    assert MOVES.findall(generate_latest(registry).decode()) == [("moved", "hotspot", "1.0")]
    assert PREEMPTIONS.findall('vllm:num_preemptions_total{model_name="m"} 7.0\n') == ["7.0"]


def test_figures_are_of_all_whole_answers_of_all_rounds() -> None:
    first = Round([answer(1.0, 1.1, 1.4), answer(9.0, error="gone")], 2.0, 6.0, {"hotspot moved": 3.0})
    second = Round([answer(2.0, 2.1, 2.2)], 2.0, 2.0, {})
    figures = merged([first, second]).figures()
    assert (figures["requests"], figures["failed"], figures["preemptions"]) == (3, 1, 8)
    assert figures[RATE] == pytest.approx(6 / 4)
    assert figures[GAP] == pytest.approx(298) and figures[TTFT] == pytest.approx(1990)
    assert figures["moves hotspot moved"] == 3


def one(first_s: float, gap_s: float, preempted: float = 0.0) -> Round:
    return Round([answer(first_s, first_s + gap_s)], 1.0, preempted, {})


@pytest.mark.parametrize(
    ("preempted", "gap_s", "met"),
    [(1.0, 0.5, ["yes", "yes"]), (1.0, 1.5, ["yes", "NO"]), (3.0, 0.5, ["NO", "yes"]), (2.0, 1.0, ["NO", "NO"])],
)
def test_with_skew_moves_have_to_lower_preemptions_and_gaps(preempted: float, gap_s: float, met: list[str]) -> None:
    played = {"Off": [one(1.0, 1.0, 2.0)] * 7, "Migrate": [one(1.0, gap_s, preempted)] * 7}
    claims = judge("skewed", played)
    assert [claim.name for claim in claims] == ["preemptions", GAP] and [claim.verdict for claim in claims] == met


def test_few_rounds_prove_neither_lower_gap_nor_fewer_preemptions() -> None:
    on = [one(1.0, gap_s, count) for gap_s, count in [(0.1, 0.0)] * 2 + [(1.1, 3.0)] * 5]
    assert [claim.verdict for claim in judge("skewed", {"Off": [one(1.0, 1.0, 2.0)] * 7, "Migrate": on})] == [
        "not distinguishable"
    ] * 2


def pairs_of(ratios: list[float]) -> dict[str, list[Round]]:
    """Returns rounds with these ratios of both times."""
    return {"Off": [one(1.0, 1.0)] * len(ratios), "Migrate": [one(ratio, ratio) for ratio in ratios]}


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.04, 1.04], "yes"),
        ([1.06, 1.07, 1.08, 1.1, 1.1, 1.1, 1.2], "NO"),
        ([0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.06], "not distinguishable"),
        ([1.0] * 5, "not distinguishable"),
    ],
)
def test_even_load_needs_the_whole_interval_within_bounds(ratios: list[float], met: str) -> None:
    claims = judge("even", pairs_of(ratios))
    assert [claim.name for claim in claims] == [TTFT, TPOT, RATE] and [claim.verdict for claim in claims[:2]] == [met, met]


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20), st.floats(0.6, 1.6))
def test_bounds_from_above_and_below_mirror_each_other(ratios: list[float], bound: float) -> None:
    """A ratio is at most a bound if and only if its inverse is at least the bound's inverse."""
    above, below = median_interval(ratios), median_interval([1 / ratio for ratio in ratios])
    assume(all(abs(edge - bound) > 1e-9 for edge in (above.low, above.high)))
    assert above.verdict(bound, is_least=False) == below.verdict(1 / bound)


def test_the_command_line_has_defaults() -> None:
    args = parser().parse_args([])
    assert (args.groups, args.rounds, args.loads, args.model) == (4, 20, ["skewed", "even"], None)
