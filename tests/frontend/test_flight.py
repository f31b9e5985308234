"""The flight recorder of a process, and its reader."""

import logging
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from phalanx_api.flight.entries import Preemption, Recording, Shedding
from phalanx_api.flight.ring import RingWriter
from phalanx_frontend.flight import (
    NO_FLIGHT_RECORDER,
    RANK_BYTES,
    FileRecorder,
    open_recorder,
    print_recordings,
    rank_name,
    read_recordings,
)

BYTES = 1 << 16


def shedding(why: str, at: float | None = None) -> Shedding:
    return Shedding(at=time.monotonic() if at is None else at, requests=1, why=why)


def reasons(recording: Recording) -> list[str]:
    return [timed.entry.why for timed in recording.entries if isinstance(timed.entry, Shedding)]


def test_entries_have_unix_times_and_places(tmp_path: Path) -> None:
    open_recorder(tmp_path / "flight", rank_name(3), RANK_BYTES).record(
        Preemption(at=time.monotonic(), requests=["a"], free_pages=2)
    )
    (recording,) = read_recordings(tmp_path / "flight", pod="g-0", group="g")
    assert (recording.kind, recording.pod, recording.group, recording.rank) == ("rank", "g-0", "g", 3)
    (timed,) = recording.entries
    assert isinstance(timed.entry, Preemption) and abs(timed.unix_s - time.time()) < 60
    assert (tmp_path / "flight" / "rank-3.ring").stat().st_size == RANK_BYTES, "the size is the bound"


def test_entries_survive_the_process_and_the_next_one_continues(tmp_path: Path) -> None:
    FileRecorder(tmp_path / "router.ring", BYTES).record(shedding("first"))
    FileRecorder(tmp_path / "router.ring", BYTES).record(shedding("second"))
    (recording,) = read_recordings(tmp_path, pod="r")
    assert reasons(recording) == ["first", "second"]
    assert recording.kind == "router"


def test_another_size_starts_an_empty_ring(tmp_path: Path) -> None:
    FileRecorder(tmp_path / "router.ring", BYTES).record(shedding("first"))
    FileRecorder(tmp_path / "router.ring", 2 * BYTES).record(shedding("second"))
    (recording,) = read_recordings(tmp_path, pod="r")
    assert len(recording.entries) == 1


def test_only_the_last_seconds_are_printed(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path / "router.ring", BYTES)
    recorder.record(shedding("old", at=time.monotonic() - 100))
    recorder.record(shedding("new"))
    (line,) = print_recordings(tmp_path, pod="r", seconds=50)
    assert [
        timed.entry.why for timed in msgspec.json.decode(line, type=Recording).entries if isinstance(timed.entry, Shedding)
    ] == ["new"]
    assert not list(print_recordings(None, pod="r"))


def test_records_of_another_version_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "router.ring"
    buffer = bytearray(BYTES)
    RingWriter(memoryview(buffer), lambda: 0.0).append(msgspec.msgpack.encode(["of_tomorrow", 1.0]))
    path.write_bytes(buffer)
    (tmp_path / "rank-0.ring").write_bytes(b"torn")
    torn, recording = sorted(read_recordings(tmp_path, pod="r"), key=lambda found: found.kind)
    assert (recording.entries, recording.unknown) == ([], 1) and not torn.entries


def test_an_unwritable_folder_costs_only_the_recorder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert open_recorder(tmp_path / "file", "router", BYTES) is NO_FLIGHT_RECORDER
    assert "no flight recorder" in caplog.text
    assert open_recorder(None, "router", BYTES) is NO_FLIGHT_RECORDER


@pytest.mark.parametrize("program", ["phalanx_router", "phalanx_runtime"])
def test_both_programs_print_the_folder_of_their_pod(program: str, tmp_path: Path) -> None:
    FileRecorder(tmp_path / f"{rank_name(1)}.ring", BYTES).record(shedding("why"))
    command = [sys.executable, "-m", program, "recording", "--seconds", "60", "--flight-recorder-dir", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert msgspec.json.decode(printed, type=Recording).rank == 1
    (tmp_path / "unreadable.ring").mkdir()
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and f"{program.replace('_', '-')} recording: " in failed.stderr
