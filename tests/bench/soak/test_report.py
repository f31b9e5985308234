"""The report of a run that is made up."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.soak.record import Piece, Run, Sample, Settings, Strike, Use, Violation
from bench.soak.report import failures, trends_of, write_report

SETTINGS = Settings("engines", 7, 3, 6, 20.0)


def run_of(growth: float, metric: str = "rss_kib") -> Run:
    """Half an hour of one router, of which a metric grows by `growth` per sample."""
    samples = [
        Sample(
            5.0 * number, number // 200, {"router <a>": Use(f"{number // 200}", values(number, growth, metric))}, {"whole": 3}, 1
        )
        for number in range(400)
    ]
    pieces = [Piece(0, 0.0, 0.0), Piece(1, 1000.0, 0.0)]
    return Run(SETTINGS, pieces, samples, [Strike(7.0, 0, "pause", "stopped")], [], {"whole": 3})


def values(number: int, growth: float, metric: str) -> dict[str, float]:
    flat = {"rss_kib": 1000.0 + number % 3, "descriptors": 20.0, "log_bytes": 10.0 * number, "disk_pages": 3.0}
    return flat | {metric: flat[metric] + growth * number}


def test_flat_run_has_no_failure(tmp_path: Path) -> None:
    assert write_report(tmp_path, run_of(0), 60) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Failures: none." in text and "in 2 pieces" in text and "1 pause" in text
    assert text.count("no slope distinguishable from zero") == 2
    assert json.loads((tmp_path / "report.json").read_text())["failures"] == []
    assert len(ElementTree.fromstring((tmp_path / "plot.svg").read_text())) > 20


@pytest.mark.parametrize("metric", ["rss_kib", "descriptors"])
def test_growing_metric_is_a_failure(tmp_path: Path, metric: str) -> None:
    assert write_report(tmp_path, run_of(0.5, metric), 60) == 1
    assert "GROWS" in (tmp_path / "report.md").read_text()


def test_log_volume_is_shown_and_not_judged() -> None:
    log = next(trend for trend in trends_of(run_of(0), 60) if trend.metric == "log_bytes")
    assert log.slope.per_hour == pytest.approx(7200) and log.words == ""


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (replace(run_of(0), streams={"whole": 3, "lost": 1}), "1 streams lost"),
        (replace(run_of(0), streams={"whole": 3, "changed": 2}), "2 streams changed"),
        (replace(run_of(0), streams={}), "no stream was whole"),
        (replace(run_of(0), violations=[Violation(9.0, "a page is held")]), "9 s: a page is held"),
    ],
)
def test_loss_is_a_failure(run: Run, failure: str) -> None:
    assert failure in failures(run, [])
