"""`make test` counts what ran and never passes by skipping."""

import sys
from pathlib import Path

import pytest

from bench.frame.programs import own_ports
from tests import run

MARK = "pytest.mark." + "system"
REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><skipped message="no GPU"/></testcase><testcase name="c"><skipped message="no GPU"/></testcase>
<testcase classname="tests.a" name="d"><failure message="x&#10;long"/></testcase>
<testcase classname="tests.a" name="e"><error message="y"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_by_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert run.count(report) == {"passed": 1, "failed": 2, "skipped: no GPU": 2}


def test_a_report_names_each_failed_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert run.failures(report) == ["tests.a::d: x", "tests.a::e: y"]
    assert run.failures(tmp_path / "none.xml") == []


def test_a_stage_without_a_report_counts_nothing(tmp_path: Path) -> None:
    assert not run.count(tmp_path / "none.xml")


def test_cluster_stage_is_skipped_only_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLUSTER", "none")
    assert run.cluster_tests(sys.executable, tmp_path / "report.xml", slow=False) == []
    monkeypatch.setenv("CLUSTER", "")
    refuse = lambda *command, title=None: run.NO_CLUSTER_HERE  # noqa: E731
    assert run.cluster_tests(sys.executable, tmp_path / "report.xml", slow=False, call=refuse) == [
        "cluster tests did not run: no cluster can run here (see the line above)"
    ]


def test_whole_programs_are_collected_from_their_files() -> None:
    marked = {str(path.relative_to(run.ROOT)) for path in (run.ROOT / "tests").rglob("*.py") if MARK in path.read_text()}
    assert marked == set(run.program_files()) > {"tests/system/test_openai.py", "tests/bench/test_answers.py"}
    assert set(run.program_tests(slow=False)) > marked and not set(run.program_tests(slow=True)) & marked


def test_workers_give_their_programs_other_ports() -> None:
    """The programs of a worker have its variables too."""
    shares = [set(own_ports({"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": "2"})) for number in range(2)]
    assert shares[0] | shares[1] == set(own_ports({})) and not shares[0] & shares[1]
