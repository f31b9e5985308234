"""The report of a run that is made up."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.soak.record import Piece, Run, Sample, Settings, Strike, Use, Violation
from bench.soak.report import failures, new_failures, new_slopes, trends_of, write_report

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
    assert write_report(tmp_path, run_of(0), trends_of(run_of(0), 60), 60) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Failures: none." in text and "in 2 pieces" in text and "1 pause" in text
    assert text.count("no slope distinguishable from zero") == 2
    assert json.loads((tmp_path / "report.json").read_text())["failures"] == []
    assert len(ElementTree.fromstring((tmp_path / "plot.svg").read_text())) > 20


@pytest.mark.parametrize("metric", ["rss_kib", "descriptors"])
def test_growing_metric_is_a_failure(tmp_path: Path, metric: str) -> None:
    run = run_of(0.5, metric)
    assert write_report(tmp_path, run, trends_of(run, 60), 60) == 1
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


def test_piece_counts_the_failures_that_it_adds() -> None:
    """Clients record a violation for a lost stream, which is one failure."""
    lost, empty = replace(run_of(0), streams={"whole": 3, "lost": 1}, violations=[Violation(9.0, "lost")]), Run(SETTINGS)
    none = dict.fromkeys(new_failures(lost, lost, 60)[0], 0)
    assert new_failures(empty, lost, 60) == (none | {"streams lost": 1, "violations": 1}, 1)
    later = replace(lost, streams={"whole": 4, "lost": 1, "changed": 2, "without reference": 3})
    assert new_failures(lost, later, 60) == (none | {"streams changed": 2, "streams without reference": 3}, 5)


def test_slope_that_grew_before_is_not_new() -> None:
    growing, flat = run_of(0.5), run_of(0)
    trends = trends_of(growing, 60)
    assert [new_slopes(former, trends, 60) for former in (Run(SETTINGS), flat, growing)] == [1, 1, 0]
    assert new_slopes(growing, trends_of(flat, 60), 60) == 0


def test_piece_without_a_whole_stream_has_failed() -> None:
    """One that ended within the warm-up was interrupted."""
    empty, run = Run(SETTINGS), replace(run_of(0), streams={})
    assert new_failures(empty, run, 60)[1] == 1 == new_failures(empty, run, 60)[0]["pieces without a whole stream"]
    assert new_failures(empty, run, 2000)[1] == 0
