"""bench.moves.relief ends its programs on SIGTERM."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.frame.programs import descendants


def test_sigterm_ends_the_engines_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.moves.relief", "--model", str(tmp_path), "--groups", "1"]
    with subprocess.Popen(command) as bench:
        while not (started := descendants(bench.pid)) and bench.poll() is None:
            time.sleep(0.02)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)
