"""Missed bounds of the operator benchmark."""

from typing import Any

import pytest

from bench.control_scale.bounds import missed


def stage(services: int, *, p99: float = 0.8, cpu: float = 90.0, rss: float = 80.0, idle: float = 0.01) -> dict[str, Any]:
    return {
        "services": services,
        "last_set_s": {"p50": 0.3, "p99": p99, "max": p99},
        "operator_cpu_ms_per_service": cpu,
        "operator_rss_mib": rss,
        "operator_idle_share_of_a_core": idle,
    }


def result(*stages: dict[str, Any], rate: float = 1.0, resumed: float = 2.0, overtaken: float = 9.5) -> dict[str, Any]:
    return {"rate": rate, "stages": list(stages) or [stage(50), stage(100)], "resumed_s": resumed, "overtaken_s": overtaken}


@pytest.mark.parametrize(
    ("figures", "violations"),
    [
        (result(), []),
        (result(stage(50, p99=1.99, cpu=100.0, rss=299.9, idle=0.0999), resumed=10.0, overtaken=10.0), []),
        (result(stage(50, p99=2.0), stage(100)), ["2.0 s to the last StatefulSet at p99, under 2 (with 50 services)"]),
        (result(stage(50, p99=30.0), rate=5.0), []),
        (
            result(stage(50), stage(100, cpu=107.0), stage(150, cpu=101.0)),
            ["107.0 ms of CPU a service, at most 100 (with 100 services)"],
        ),
        (result(stage(50, rss=300.0)), ["300.0 MiB resident, under 300 (with 50 services)"]),
        (result(stage(50, idle=0.1)), ["0.1 of a core when idle, under 0.1 (with 50 services)"]),
        (result(resumed=10.1), ["10.1 s until a change is followed when the leader is stopped, at most 10"]),
        (result(overtaken=13.2), ["13.2 s until a change is followed when the leader is killed, at most 10"]),
        (result(stage(50, cpu=60.0), stage(100, cpu=90.0), stage(150, cpu=78.0)), []),
        (
            result(stage(50, cpu=60.0), stage(100, cpu=78.1)),
            ["78.1 ms of CPU a service with 100, 60.0 with 50: at most 1.3 times that"],
        ),
    ],
    ids=[
        "all hold",
        "all only just",
        "slow in one stage",
        "slow when services come faster",
        "too much CPU",
        "too much memory",
        "busy at rest",
        "resumes late",
        "overtakes late",
        "linear",
        "not linear",
    ],
)
def test_each_missed_bound_is_reported_with_its_figure(figures: dict[str, Any], violations: list[str]) -> None:
    assert missed(figures) == violations


def test_every_bound_has_a_line_of_its_own() -> None:
    figures = result(stage(50), stage(100, p99=9.0, cpu=200.0, rss=400.0, idle=0.5), resumed=11.0, overtaken=11.0)
    assert len(missed(figures)) == 7
