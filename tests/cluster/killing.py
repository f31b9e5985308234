"""Programs in pods that are killed: they hear nothing of it and give nothing back, and their container begins again."""

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster

_KILL = """
import os, pathlib, signal, sys, time
found = [int(one.name) for one in pathlib.Path("/proc").iterdir() if one.name.isdigit()]
others = [pid for pid in found if pid not in (1, os.getpid())]
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
"""After a second, for whatever runs in a container ends with it. Its first process ends with its program."""


def kill(cluster: Cluster, namespace: str, pod: str, word: str) -> None:
    """SIGKILL to all programs of a pod's first container whose command has this word; its container has begun again."""
    before = _starts(cluster, namespace, pod)
    cluster.kubectl("-n", namespace, "exec", pod, "--", "/usr/bin/python3", "-c", _KILL, word)
    svc.wait_for(lambda: _starts(cluster, namespace, pod) > before, 30, f"{word} in {pod} was killed")


def _starts(cluster: Cluster, namespace: str, pod: str) -> int:
    of = ("get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
    return int(cluster.kubectl("-n", namespace, *of))
