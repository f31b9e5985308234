"""Replays recordings: reads them from a cluster or a bug report, and runs the simulator of the source tree."""

import importlib.util
import math
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import msgspec

from phalanx_api.flight.entries import Recording
from phalanx_kubectl.dump import RECORDINGS
from phalanx_kubectl.transport import KubectlFailed

SIMULATOR = "bench.simulate.recorded"
TIMEOUT_S = 600.0
NOT_REPLAYABLE = 3
"""Exit status of the simulator without requests or groups."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time to replay, in Unix seconds."""

    start_s: float = 0.0
    end_s: float = math.inf


def window_around(text: str | None, seconds: float, now: datetime) -> Window:
    """Returns the time from `seconds` before to `seconds` after a time; without one, the last `seconds`. Raises ValueError."""
    if text is None:
        return Window(now.timestamp() - seconds)
    at_s = parse_time(text, now).timestamp()
    return Window(at_s - seconds, at_s + seconds)


def parse_time(text: str, now: datetime) -> datetime:
    """Returns a time: RFC 3339, or HH:MM or HH:MM:SS in UTC, at most one day before `now`. Raises ValueError."""
    if ":" in text and "T" not in text and "-" not in text:
        clock = time.fromisoformat(text)
        if clock.tzinfo is not None:
            raise ValueError(f"{text} has no date, so it is in UTC")
        at = datetime.combine(now.date(), clock, UTC)
        return at if at <= now else at - timedelta(days=1)
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def read_file(path: Path) -> list[Recording]:
    """Returns the recordings of a bug report or of a file with a JSON line each. Raises KubectlFailed."""
    try:
        lines = (_from_report(path) if tarfile.is_tarfile(path) else path.read_bytes()).splitlines()
        return [msgspec.json.decode(line, type=Recording) for line in lines if line]
    except (OSError, EOFError, msgspec.MsgspecError, tarfile.TarError, zlib.error) as error:
        raise KubectlFailed(f"{path}: {error}") from error


def _from_report(path: Path) -> bytes:
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(f"/{RECORDINGS}") else None
            if file is not None:
                return file.read()
    raise KubectlFailed(f"{path} has no {RECORDINGS}")


def simulate(recordings: Sequence[Recording], plot: Path | None) -> str:
    """Returns the table of the simulator, which writes the chart to `plot`. Raises KubectlFailed if it fails."""
    if importlib.util.find_spec("bench") is None or importlib.util.find_spec(SIMULATOR) is None:
        return "the simulator is in the source tree: there, python -m phalanx_kubectl replay compares policies\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RECORDINGS
        file.write_bytes(b"".join(msgspec.json.encode(recording) + b"\n" for recording in recordings))
        chart = [] if plot is None else ["--plot", str(plot)]
        command = [sys.executable, "-m", SIMULATOR, str(file), *chart]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise KubectlFailed(f"the simulation did not end within {TIMEOUT_S:.0f} s: choose a shorter --window") from error
    if done.returncode == NOT_REPLAYABLE:
        return f"not simulated: {done.stderr.strip()}\n"
    if done.returncode:
        raise KubectlFailed(
            f"the simulation failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no reason'}"
        )
    return done.stdout + ("" if plot is None else f"{plot}: the time to first token over time\n")
