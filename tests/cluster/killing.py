"""Kills programs in pods without a warning. Their containers restart."""

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster

_KILL = """
import os, pathlib, signal, sys, time
pids = [int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit()]
others = [pid for pid in pids if pid not in (1, os.getpid())]
programs = [pid for pid in others if sys.argv[1].encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
if not programs:
    raise SystemExit("no such program")
if os.fork():
    raise SystemExit(0)
os.closerange(0, 3)
time.sleep(1)
for pid in programs:
    os.kill(pid, signal.SIGKILL)
"""
"""Waits a second: exec ends with the container, and the container ends with its program."""


def kill(cluster: Cluster, namespace: str, pod: str, word: str) -> None:
    """Sends SIGKILL to programs in a pod's first container with `word` in their command, and waits for its restart."""
    before = _starts(cluster, namespace, pod)
    cluster.kubectl("-n", namespace, "exec", pod, "--", "/usr/bin/python3", "-c", _KILL, word)
    svc.wait_for(lambda: _starts(cluster, namespace, pod) > before, 30, f"{word} in {pod} is killed")


def _starts(cluster: Cluster, namespace: str, pod: str) -> int:
    query = ("get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
    return int(cluster.kubectl("-n", namespace, *query))
