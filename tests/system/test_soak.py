"""A soak of real processes that is killed in the middle and resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak.record import read
from tests.polling import wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]
LIMIT_S = 600.0


def write_trace(path: Path) -> Path:
    """Returns a trace of 50 conversations of two turns."""
    sizes = [(1000 * number, 1300, [0, number, -number]) for number in range(1, 51)]
    sizes += [(at + 60_000, 1600, [0, number, rest]) for at, _, (_, number, rest) in sizes]
    rows = [dict(timestamp=at, input_length=size, output_length=150, hash_ids=blocks) for at, size, blocks in sizes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def soak(folder: Path, minutes: float, *more: str) -> "subprocess.Popen[bytes]":
    flags = ["--folder", str(folder), "--minutes", str(minutes), "--groups", "2", "--clients", "4", "--fault-every", "1"]
    return subprocess.Popen([sys.executable, "-m", "bench.soak", *flags, "--seed", "3", *more], stdout=subprocess.DEVNULL)


def command(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_soak_resumes_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    trace = write_trace(tmp_path / "trace.jsonl")
    with soak(tmp_path, 30, "--trace", str(trace)) as first:
        try:
            wait_until(lambda: (run := read(tmp_path)) and len(run.strikes) > 2 and run.streams.get("whole", 0) > 3, LIMIT_S)
        finally:
            first.kill()
    killed = read(tmp_path)
    with soak(tmp_path, 0.3) as second:
        second.wait(LIMIT_S)
    run = read(tmp_path)
    assert killed is not None and run is not None
    assert len(run.pieces) == 2 and run.pieces[1].at_s == pytest.approx(killed.seconds, abs=1)
    assert run.settings == killed.settings and run.settings.trace == str(trace)
    assert [strike.number for strike in run.strikes] == list(range(len(run.strikes)))
    assert run.streams["whole"] > killed.streams["whole"] and run.next_conversation > killed.next_conversation
    assert run.violations == [] and not run.streams.get("lost") and not run.streams.get("changed")
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in command(path)]
    assert "in 2 pieces" in (tmp_path / "report.md").read_text()
