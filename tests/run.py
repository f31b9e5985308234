"""`make test`: check, then the tests in a real cluster; ends with the count of passed, failed and skipped tests by reason.

Standard library only: it runs before anything is installed. CLUSTER=current uses the cluster of the current kubeconfig,
CLUSTER=none runs no cluster test and says so. Where no cluster can run, all the rest runs and the exit status is 1.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable

from tests.examples import ALL_EXAMPLES

ROOT = pathlib.Path(__file__).resolve().parents[1]
NO_CLUSTER_HERE = 3
"""Exit status of `python3 -m tests.cluster` when this machine cannot run one; it has printed why."""


def run(*command: str, title: str | None = None) -> int:
    """Exit status of a command that prints as it goes."""
    if title:
        print(f"\n== {title}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def count(report: pathlib.Path) -> collections.Counter[str]:
    """passed, failed and `skipped: reason` of a JUnit report; empty when pytest wrote none."""
    found: collections.Counter[str] = collections.Counter()
    if not report.exists():
        return found
    for case in ET.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            found[f"skipped: {skipped.get('message', 'no reason given')}"] += 1
        else:
            found["failed" if case.find("failure") is not None or case.find("error") is not None else "passed"] += 1
    return found


def failures(report: pathlib.Path) -> list[str]:
    """`class::test: first line of the message` of each failed test of a JUnit report, so that the end of a log names them."""
    if not report.exists():
        return []
    lines = []
    for case in ET.parse(report).getroot().iter("testcase"):
        for wrong in [*case.findall("failure"), *case.findall("error")]:
            message = (wrong.get("message") or "no message").splitlines()[0]
            lines.append(f"{case.get('classname')}::{case.get('name')}: {message[:300]}")
    return lines


def program_files() -> list[str]:
    """Files with tests of whole programs. They are collected alone, because the collection of all tests takes a minute."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.system" in path.read_text()]


def program_tests(slow: bool) -> list[str]:
    """Words behind `python` that run the tests of whole programs, and with `slow` the slow tests of all files, one after another.

    Two files of whole programs run at a time: a program waits for another most of the time. The tests of a file share programs.
    """
    how = ["-m", "pytest", "-v", "--durations=20"]
    if slow:  # some take all cores or much memory
        return [*how, "-m", "(system or slow) and not cluster and not gpu"]
    return [*how, "-m", "system and not slow and not cluster and not gpu", "-n", "2", "--dist", "loadfile", *program_files()]


def cluster_tests(python: str, report: pathlib.Path, slow: bool, call: Callable[..., int] = run) -> list[str]:
    """What went wrong in the cluster stage: one line per failure. `call` runs a command and gives its exit status."""
    mode = os.environ.get("CLUSTER", "")
    if mode == "none":
        print("\n== no cluster tests: CLUSTER=none", flush=True)
        return []
    pytest = [
        python,
        "-m",
        "pytest",
        "tests/cluster",
        "-m",
        "cluster" if slow else "cluster and not slow",
        "-v",
        "--durations=20",
    ]
    pytest += [f"--junit-xml={report}"]
    if mode == "current":
        status = call(*pytest, title="tests in the cluster of the current kubeconfig")
        return [f"cluster tests: exit status {status}"] if status else []
    was_up = call(sys.executable, "-m", "tests.cluster", "status", title="a real cluster") == 0
    try:
        status = call(sys.executable, "-m", "tests.cluster", "up", "--images")
        if status == NO_CLUSTER_HERE:
            return ["cluster tests did not run: no cluster can run here (see the line above)"]
        if status:
            return [f"the cluster did not come up: exit status {status}"]
        status = call(sys.executable, "-m", "tests.cluster", "run", *pytest, title="tests in the cluster")
        return [f"cluster tests: exit status {status}"] if status else []
    finally:
        if not was_up:  # one that somebody uses stays
            call(sys.executable, "-m", "tests.cluster", "down")


def main() -> int:
    """Exit status: 0 only if every stage ran and passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="slow scenarios too")
    slow = parser.parse_args().all
    if os.environ.get("CLUSTER", "") not in ("", "current", "none"):
        print(f"CLUSTER={os.environ['CLUSTER']!r}: expected current, none or nothing", file=sys.stderr)
        return 2
    if slow:
        os.environ[ALL_EXAMPLES] = "1"
    began = time.monotonic()
    venv = subprocess.run([sys.executable, "tools/bootstrap.py", "dev"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if venv.returncode:
        return venv.returncode
    python = f"{venv.stdout.strip().splitlines()[-1]}/bin/python"
    with tempfile.TemporaryDirectory() as folder:
        unit, long, real = (pathlib.Path(folder, f"{stage}.xml") for stage in ["unit", "long", "cluster"])
        wrong = [] if run("make", "check", f"PYTEST_ARGS=--junit-xml={unit}", title="make check") == 0 else ["make check failed"]
        status = run(python, *program_tests(slow), f"--junit-xml={long}", title="whole programs on this machine")
        wrong += [f"tests of whole programs: exit status {status}"] if status else []
        wrong += cluster_tests(python, real, slow)
        total = count(unit) + count(long) + count(real)
        wrong += [line for report in [unit, long, real] for line in failures(report)]
    print(f"\n== {time.monotonic() - began:.0f} s")
    skipped = {reason: n for reason, n in total.items() if reason.startswith("skipped: ")}
    for line in [*(f"{n} {reason}" for reason, n in sorted(skipped.items())), *(f"FAILED: {line}" for line in wrong)]:
        print(line)
    print(f"{total['passed']} passed, {total['failed']} failed, {sum(skipped.values())} skipped", flush=True)
    return 1 if wrong or total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
