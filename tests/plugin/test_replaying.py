"""Times, files and the simulator of a replay."""

import io
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from phalanx_kubectl.replaying import Window, parse_time, read_file, simulate, window_around
from phalanx_kubectl.transport import KubectlFailed
from tests.control.flight.recorded import fleet

NOW = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
LINES = b"".join(msgspec.json.encode(recording) + b"\n" for recording in fleet())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("11:30", datetime(2026, 3, 4, 11, 30, tzinfo=UTC)),
        ("12:00:01", datetime(2026, 3, 3, 12, 0, 1, tzinfo=UTC)),
        ("2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04:05+01:00", datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04", datetime(2026, 1, 2, 3, 4, tzinfo=UTC)),
    ],
)
def test_times_are_read_in_utc(text: str, expected: datetime) -> None:
    assert parse_time(text, NOW) == expected


@pytest.mark.parametrize("text", ["noon", "25:00", "14:05+02:00", "2026-13-01", ""])
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_time(text, NOW)


def test_windows_are_around_a_time_or_the_last_seconds() -> None:
    at = NOW.timestamp()
    assert window_around(None, 60, NOW) == Window(at - 60)
    assert window_around("12:00", 60, NOW) == Window(at - 60, at + 60)


def test_recordings_come_from_lines_or_a_report(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(LINES)
    with tarfile.open(tmp_path / "report.tar.gz", "w:gz") as archive:
        for name, content in (("chat-dump/about.json", b"{}"), ("chat-dump/recordings.jsonl", LINES)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert read_file(tmp_path / "lines") == read_file(tmp_path / "report.tar.gz") == fleet()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    (tmp_path / "text").write_text("no recording")
    for name, why in (("absent", "No such file"), ("text", "malformed"), ("empty.tar.gz", "has no recordings.jsonl")):
        with pytest.raises(KubectlFailed, match=why):
            read_file(tmp_path / name)


def test_recordings_without_requests_are_not_simulated(tmp_path: Path) -> None:
    assert (
        simulate(fleet(), tmp_path / "chart.svg") == "not simulated: 0 requests and 0 groups with measured steps are recorded\n"
    )
