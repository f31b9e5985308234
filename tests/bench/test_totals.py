"""Totals of searches and fuzzing over many runs."""

from pathlib import Path

import pytest

from bench import totals
from bench.totals import Batch, main, read, record, sums, table, totals_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_TOTALS", str(tmp_path / "cache" / "totals.jsonl"))
    return tmp_path / "cache" / "totals.jsonl"


def test_batches_of_many_runs_are_summed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("operator search", {"worlds": 50, "looks": 700}, wall_s=9.0, cpu_s=3.6)
    record("operator search", {"worlds": 49, "looks": 600}, wall_s=9.0, cpu_s=3.6, failures=1)
    record("fuzz gguf", {"cases": 1000}, wall_s=1.0, cpu_s=36.0)
    with file.open("ab") as opened:
        opened.write(b'{"kind": "operator sea')  # a run was killed
    total = sums(read(file))["operator search", ""]
    assert (total.counts, total.failures, total.cpu_s) == ({"worlds": 99, "looks": 1300}, 1, 7.2)
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "| operator search |  | 99 worlds, 1,300 looks | 1 | 0.00 | 100,000 worlds | 2.0 |" in shown
    assert "| fuzz gguf |  | 1,000 cases | 0 | 0.01 | 100,000 cases | 1.0 |" in shown


def test_commits_are_separate_and_files_of_machines_merge(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    record("soak engines", {"wall hours": 1.5}, wall_s=5400, cpu_s=9000)
    other.write_bytes(file.read_bytes())
    assert totals.merge(file, other) == 0
    other.write_bytes(other.read_bytes().replace(b"1.5", b"2.5"))
    assert main(["--add", str(other), "--by-commit"]) == 0
    assert "4 wall hours" in capsys.readouterr().out
    batches = [Batch("fleet search", commit, 0.0, 0.0, 0.0, {"fleets": 1}) for commit in ("a", "b", "a")]
    assert table(sums(batches, by_commit=True)).count("| fleet search |") == 2


def test_tests_record_nothing() -> None:
    """They run kept counterexamples and planted faults, in programs too."""
    record("operator search", {"worlds": 1}, wall_s=1.0, cpu_s=1.0)
    assert totals_file() is None
