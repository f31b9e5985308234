"""Faults of the show, and the two minutes in which they happen."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo.kube import kubectl

SCRIPT_S = 120.0
STOPPED_S, RUNNING_S = 0.15, 0.1
"""A slow rank stops and runs in turns."""
_SLOW = """
import os, pathlib, signal, sys, time
seconds, stopped_s, running_s = map(float, sys.argv[1:])
def ranks():
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
            if b"phalanx_runtime.rank" in (entry / "cmdline").read_bytes():
                yield int(entry.name)
pids = list(ranks())
if not pids:
    raise SystemExit("no rank")
end = time.monotonic() + seconds
try:
    while time.monotonic() < end:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """The service that faults strike. `burst` sends a number of long prompts at once."""

    namespace: str
    burst: Callable[[int], None]

    def groups(self) -> list[str]:
        """Returns the leader pods that are Ready, sorted."""
        selector = ("-l", "phalanx.dev/component=group,apps.kubernetes.io/pod-index=0")
        pods = json.loads(kubectl("get", "pods", "-n", self.namespace, *selector, "-o", "json"))["items"]
        return sorted(pod["metadata"]["name"] for pod in pods if _is_ready(pod))


def _is_ready(pod: dict[str, dict[str, list[dict[str, str]]]]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def kill_group(stage: Stage) -> str:
    """Deletes a worker pod without time to drain. Returns what was done."""
    groups = stage.groups()
    if not groups:
        return "no group is Ready"
    worker = random.choice(groups).removesuffix("-0") + "-1"
    kubectl("delete", "pod", worker, "-n", stage.namespace, "--wait=false", "--grace-period=1")
    return f"deleted {worker}"


def kill_router(stage: Stage) -> str:
    """Kills the routers. Returns what was done."""
    selector = ("-l", "phalanx.dev/component=router")
    kubectl("delete", "pod", "-n", stage.namespace, *selector, "--wait=false", "--grace-period=0", "--force")
    return "killed the router"


def slow_rank(stage: Stage, seconds: float = 25.0) -> str:
    """Stops a rank for more than half of the time. Returns after `seconds` with what was done."""
    groups = stage.groups()
    if not groups:
        return "no group is Ready"
    leader = groups[0]
    words = [str(number) for number in (seconds, STOPPED_S, RUNNING_S)]
    kubectl("exec", leader, "-n", stage.namespace, "--", "/usr/bin/python3", "-c", _SLOW, *words, check=False)
    return f"{leader} was slow for {seconds:.0f} s"


def long_prompts(stage: Stage) -> str:
    """Sends more prompts than run at once. Returns what was done."""
    stage.burst(12)
    return "sent 12 long prompts"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault `at_s` seconds after the start, and where to see its effect."""

    at_s: float
    what: str
    look: str
    cause: Callable[[Stage], str]


SCRIPT = (
    Fault(
        10,
        "a pod of a group is killed",
        "Fleet shows that the other group continues its streams; the dashboard Service shows replays",
        kill_group,
    ),
    Fault(
        45, "the router is killed", "The console reconnects, and the users resume their streams: no answer is lost", kill_router
    ),
    Fault(70, "a rank becomes slow", "Fleet shows the group as a hotspot, and that streams leave it", slow_rank),
    Fault(
        105,
        "12 long prompts arrive at once",
        "Fleet shows the batches, the dashboard Service the time to first token",
        long_prompts,
    ),
)


def play(
    stage: Stage, say: Callable[[str], None], wait: Callable[[float], None] = time.sleep, script: Sequence[Fault] = SCRIPT
) -> None:
    """Runs the script; `say` prints a line, `wait` waits for seconds."""
    began = time.monotonic()
    for fault in script:
        wait(max(0.0, began + fault.at_s - time.monotonic()))
        say(f"{fault.what}. {fault.look}")
        say(fault.cause(stage))
    wait(max(0.0, began + SCRIPT_S - time.monotonic()))
