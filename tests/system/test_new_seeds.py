"""Each run searches with new seeds for a while. A counterexample fails it, with the command that repeats it."""

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.system
HOURS = "0.012"
"""43 s, then what has begun ends."""
TIMEOUT_S = 900
"""A counterexample is shortened first, on a busy machine."""


@pytest.mark.parametrize("search", ["tests.control.search", "tests.router.search"])
def test_new_seeds_find_no_counterexample(search: str) -> None:
    command = [sys.executable, "-m", search, "--hours", HOURS, "--jobs", "1", "--seed", str(int(time.time()))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PHALANX_TOTALS": ""}
    print(*command[1:])  # a search that does not end is repeated by it
    ran = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
    print(ran.stdout)
    assert ran.returncode == 0 and "0 counterexamples" in ran.stdout, ran.stdout[-3000:]
