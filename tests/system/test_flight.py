"""Flight recorders of real programs, fetched by the plugin: a group of two ranks, a group of one, a router, and a move."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, running
from phalanx_api import labels
from phalanx_api.flight.entries import ClockOffset, Dispatch, GroupSize, MoveEnd, PageTransfer, RankStep, RequestEnd
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, SummaryRequest
from phalanx_kubectl.perfetto import trace
from phalanx_kubectl.recordings import ServicePod, fetch
from phalanx_kubectl.transport import Lines
from tests.plugin.trace_rules import problems
from tests.polling import until
from tests.router.clients import ReceivedStream, read
from tests.system.runtimes import router_flags, until_linked

pytestmark = pytest.mark.system
MARKER = "zebra"
BODY = {
    "model": "tiny",
    "prompt": f"{MARKER} " * 20,
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
    "skip_special_tokens": False,
}


@dataclass(frozen=True, slots=True)
class LocalPods:
    """Implements Kubectl: a pod is a folder of recordings on this machine."""

    folder: Path

    def read(self, *arguments: str) -> str:
        pod, program = arguments[1], arguments[arguments.index("--") + 1].replace("-", "_")
        command = [sys.executable, "-m", program, *arguments[arguments.index("--") + 2 :]]
        environment = os.environ | {labels.ENV_FLIGHT_RECORDER: str(self.folder / pod), labels.ENV_GROUP: pod}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def run_attached(self, *arguments: str) -> int:
        raise NotImplementedError

    def follow(self, *arguments: str) -> Lines:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two groups and a router, with the folders of their recorders."""

    router: Program
    folder: Path
    token: str


@pytest.fixture(scope="module")
def fleet(long_model: Path) -> Iterator[Fleet]:
    folder, token = long_model.parent / "flight", long_model.parent / "token"

    def flags(pod: str) -> list[str]:
        return ["--flight-recorder-dir", str(folder / pod)]

    serve = [
        "serve",
        str(long_model),
        "--served-model-name",
        "tiny",
        "--kv-cache-memory-bytes",
        "16000000",
        "--token-file",
        str(token),
    ]
    with ExitStack() as stack:
        one = stack.enter_context(running("one", "phalanx_runtime", [*serve, "-tp", "2", *flags("one")], long_model.parent))
        two = stack.enter_context(running("two", "phalanx_runtime", [*serve, *flags("two")], long_model.parent))
        router = running("router", "phalanx_router", [*router_flags([one, two], token), *flags("router")], long_model.parent)
        fleet = Fleet(stack.enter_context(router), folder, token.read_text())
        until_linked(fleet.router, 2)
        yield fleet


async def evacuate(fleet: Fleet, group: str, number: int) -> list[str]:
    """Returns the groups with streams after an order to move them off a group."""
    policy = BalancePolicy(number=number, evacuate=[group] if group else [])
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        headers = {"authorization": f"Bearer {fleet.token}"}
        response = await http.post(
            fleet.router.base_url + SUMMARY_PATH, content=msgspec.json.encode(SummaryRequest(policy, 0.0)), headers=headers
        )
    return [found["group"] for found in response.json()["groups"] if found["streams"]]


async def moved_stream(fleet: Fleet) -> None:
    received = ReceivedStream({}, {})
    reading = asyncio.create_task(read(fleet.router.base_url, BODY, received))
    await until(lambda: received.num_chars > 50)
    (before,) = await evacuate(fleet, "", 1)

    async def has_moved() -> bool:
        assert not received.is_done, "the stream was too short"
        return await evacuate(fleet, before, 2) not in ([], [before])

    await until(has_moved)
    await reading


def test_recordings_of_a_moved_stream_are_one_trace(fleet: Fleet) -> None:
    asyncio.run(moved_stream(fleet))
    pods = [ServicePod("router", "router", ""), ServicePod("one", "group", ""), ServicePod("two", "group", "")]
    warnings: list[str] = []
    recordings = fetch(LocalPods(fleet.folder), pods, warnings.append, 600.0)
    assert not warnings
    assert [(found.kind, found.group, found.rank) for found in recordings] == [
        ("router", "", 0),
        ("rank", "one", 0),
        ("rank", "one", 1),
        ("rank", "two", 0),
    ]
    kinds = [Counter(type(timed.entry) for timed in found.entries) for found in recordings]
    assert kinds[0][Dispatch] == kinds[0][MoveEnd] == kinds[0][RequestEnd] == 1
    assert kinds[0][ClockOffset] >= 2 and kinds[0][GroupSize] >= 2
    assert kinds[1][RankStep] == kinds[2][RankStep] > 0 and kinds[3][RankStep] > 0, "every rank has all its steps"
    (ended,) = [timed.entry for timed in recordings[0].entries if isinstance(timed.entry, MoveEnd)]
    assert ended.outcome == "moved"
    phases = {timed.entry.phase for found in recordings for timed in found.entries if isinstance(timed.entry, PageTransfer)}
    assert {"MoveOut", "Prepare", "Prepared", "Frozen", "Arrived", "Release"} <= phases or ended.transfer == "recompute"
    drawn = trace(recordings)
    assert problems(drawn) == []
    (begin,) = [event for event in drawn["traceEvents"] if event["ph"] == "b" and event.get("cat") == "move"]
    at_groups = [
        event["ts"] for event in drawn["traceEvents"] if event.get("args", {}).get("move") == ended.move and event["ph"] == "i"
    ]
    late_us = 2e6  # on a busy machine a group handles the last frame after the router has recorded the end
    assert all(begin["ts"] - 5e4 <= at <= begin["ts"] + ended.seconds * 1e6 + late_us for at in at_groups), "one clock"
    assert MARKER not in json.dumps(drawn)
    for ring in fleet.folder.rglob("*.ring"):
        assert MARKER.encode() not in ring.read_bytes()
