"""Each run searches with new seeds for a while. A counterexample fails it, with the command that repeats it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
HOURS = "0.012"
"""43 s, after which no new world begins."""
TIMEOUT_S = 900
"""A counterexample is shortened before it is printed, which takes minutes on a busy machine."""


@pytest.mark.parametrize("search", ["tests.control.search", "tests.router.search"])
def test_new_seeds_find_no_counterexample(tmp_path: Path, search: str) -> None:
    command = [sys.executable, "-m", search, "--hours", HOURS, "--jobs", "1", "--seed", str(int(time.time()))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PHALANX_TOTALS": ""}
    print(*command[1:])  # it repeats a search that does not end
    output = tmp_path / "output"
    with (
        output.open("wb") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True) as ran,
    ):
        try:
            status = ran.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)  # its workers too
            print(output.read_text())
    assert status == 0 and ", 0 counterexamples" in output.read_text()
