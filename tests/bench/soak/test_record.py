"""The record: what a resumed run reads of a killed one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak.record import FILE, Piece, Recorder, Sample, Settings, Strike, Use, Violation, parse, read

SETTINGS = Settings("engines", 7, 3, 6, 20.0)
SAMPLE = Sample(12.5, 0, {"router a": Use("1/2", {"rss_kib": 3.0})}, {"whole": 4}, 9)
LINES = (SETTINGS, Piece(0, 0.0, 1e9), SAMPLE, Strike(13.0, 5, "pause", "router a stopped"), Violation(14.0, "lost"))


def write(folder: Path) -> bytes:
    recorder = Recorder(folder)
    for line in LINES:
        recorder.add(line)
    recorder.close()
    return (folder / FILE).read_bytes()


def test_lines_are_read_as_written(tmp_path: Path) -> None:
    write(tmp_path)
    run = read(tmp_path)
    assert run is not None
    assert (run.settings, run.samples, run.violations) == (SETTINGS, [SAMPLE], [LINES[4]])
    assert (run.seconds, run.next_strike, run.next_conversation, run.streams) == (13.0, 6, 9, {"whole": 4})


def test_folder_without_a_run_starts_one(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_record_needs_settings() -> None:
    with pytest.raises(ValueError, match="no settings"):
        parse(b"")


@given(cut=st.integers(0, 10_000))
def test_any_cut_leaves_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    content = write(folder)
    kept = content[: cut % (len(content) + 1)]
    (folder / FILE).write_bytes(kept)
    recorder = Recorder(folder)
    recorder.add(LINES[0])
    recorder.add(LINES[4])
    recorder.close()
    run = read(folder)
    assert run is not None and run.violations[-1] == LINES[4]
    assert (folder / FILE).read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
