"""bench.relief reads what programs show, and sums it up."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bench.client import Answer
from bench.relief import LONGEST_OUTPUT, MOVES, PREEMPTIONS, Round, bodies, parser, summed
from phalanx_router.metrics import RouterMetrics


def answer(*arrivals: float, error: str | None = None) -> Answer:
    return Answer(0.0, list(arrivals), ["x"] * len(arrivals), arrivals[-1], 64, len(arrivals), error)


def test_both_modes_get_the_same_requests() -> None:
    assert bodies(3, 20, even=False) == bodies(3, 20, even=False) != bodies(4, 20, even=False)
    assert {body["max_tokens"] for body in bodies(3, 20, even=True)} == {128}
    drawn = [body["max_tokens"] for body in bodies(3, 200, even=False)]
    assert len(set(drawn)) > 50 and all(isinstance(count, int) and 16 <= count <= LONGEST_OUTPUT for count in drawn)


def test_what_programs_show_is_found() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.move_over("moved", "hotspot", 10, 0.1)
    assert MOVES.findall(generate_latest(registry).decode()) == [("moved", "hotspot", "1.0")]
    assert PREEMPTIONS.findall('vllm:num_preemptions_total{model_name="m"} 7.0\n') == ["7.0"]


def test_figures_are_means_over_rounds_of_whole_answers() -> None:
    first = Round([answer(1.0, 1.1, 1.4), answer(9.0, error="gone")], 2.0, 6.0, {"hotspot moved": 3.0})
    second = Round([answer(2.0, 2.1, 2.2)], 2.0, 2.0, {})
    figures = summed({"Off": [first, second]})["Off"]
    assert figures["preemptions"] == 4 and figures["failed"] == 0.5 and figures["tokens/s"] == 1.5
    assert figures["longest gap p99, ms"] == pytest.approx(200) and figures["ttft p99, ms"] == pytest.approx(1500)
    assert figures["moves hotspot moved"] == 1.5


def test_the_command_line_has_defaults() -> None:
    args = parser().parse_args(["model"])
    assert (args.groups, args.rounds, args.even) == (4, 3, False)
