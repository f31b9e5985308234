"""The flight recorder of a process, and its reader."""

import logging
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from phalanx_api.flight.entries import ClockOffset, Entry, Preemption, Recording, Shedding
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


def write(path: Path, *entries: Entry, size: int = BYTES) -> None:
    with closing(FileRecorder(path, size)) as recorder:
        for entry in entries:
            recorder.record(entry)


def reasons(recording: Recording) -> list[str]:
    return [timed.entry.why for timed in recording.entries if isinstance(timed.entry, Shedding)]


def test_entries_have_unix_times_and_places(tmp_path: Path) -> None:
    preemption = Preemption(at=time.monotonic(), requests=["a"], free_pages=2)
    write(tmp_path / "flight" / f"{rank_name(3)}.ring", preemption, size=RANK_BYTES)
    (recording,) = read_recordings(tmp_path / "flight", pod="g-0", group="g")
    assert (recording.kind, recording.pod, recording.group, recording.rank) == ("rank", "g-0", "g", 3)
    (timed,) = recording.entries
    assert isinstance(timed.entry, Preemption) and abs(timed.unix_s - time.time()) < 60
    assert (tmp_path / "flight" / "rank-3.ring").stat().st_size == RANK_BYTES, "the size is the bound"


def test_entries_survive_the_process(tmp_path: Path) -> None:
    write(tmp_path / "router.ring", shedding("first"), size=BYTES)
    write(tmp_path / "router.ring", shedding("second"), size=BYTES)
    (recording,) = read_recordings(tmp_path, pod="r")
    assert reasons(recording) == ["first", "second"]
    assert recording.kind == "router"


def test_another_size_starts_an_empty_ring(tmp_path: Path) -> None:
    write(tmp_path / "router.ring", shedding("first"), size=BYTES)
    write(tmp_path / "router.ring", shedding("second"), size=2 * BYTES)
    (recording,) = read_recordings(tmp_path, pod="r")
    assert len(recording.entries) == 1


def test_only_the_last_seconds_are_printed(tmp_path: Path) -> None:
    offsets = [ClockOffset(at=time.monotonic() - age_s, group="g", ahead_s=age_s) for age_s in (90.0, 80.0)]
    write(tmp_path / "router.ring", shedding("old", at=time.monotonic() - 100), *offsets, shedding("new"))
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
    write(tmp_path / f"{rank_name(1)}.ring", shedding("why"), size=BYTES)
    command = [sys.executable, "-m", program, "recording", "--seconds", "60", "--flight-recorder-dir", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert msgspec.json.decode(printed, type=Recording).rank == 1
    (tmp_path / "unreadable.ring").mkdir()
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and f"{program.replace('_', '-')} recording: " in failed.stderr


def test_a_second_writer_or_full_disk_records_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(FileRecorder(tmp_path / "router.ring", BYTES)):
        assert open_recorder(tmp_path, "router", BYTES) is NO_FLIGHT_RECORDER
    assert open_recorder(tmp_path, "large", 1 << 60) is NO_FLIGHT_RECORDER, "no disk has so much space"
    assert caplog.text.count("no flight recorder") == 2
    corrupt = bytearray(BYTES)
    corrupt[:12] = b"PLX1" + b"\xff" * 8
    (tmp_path / "corrupt.ring").write_bytes(corrupt)
    write(tmp_path / "corrupt.ring", shedding("after"))
    assert reasons(next(iter(read_recordings(tmp_path, pod="r")))) == ["after"]


def test_the_page_lists_every_entry() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flight-recorder.md").read_text().split("| entry |")[1].split("\n\n")[0]
    named = [name for row in page.splitlines()[2:] for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(kind.__struct_config__.tag for kind in get_args(Entry))
