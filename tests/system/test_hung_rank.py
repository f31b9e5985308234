"""A rank that is stopped, not dead: noticed, ended with all others, and the group serves again. Real ranks, a tiny model."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.cluster.service import Answer, metric, stream_all
from tests.runtime.tiny import save_tiny
from tests.system.test_openai import router_flags

pytestmark = pytest.mark.system
TOKENS = 900
DEADLINE_S = 60.0
"""Longest wait for anything; a hung rank is noticed after 5 s and a tiny model loads in a few."""
BODIES = [
    {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "prompt": f"prompt {i}", "temperature": 0} for i in range(4)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    folder = tmp_path_factory.mktemp("hung")
    (folder / "token").write_text("a-service-token")
    return save_tiny(folder / "tiny", max_position_embeddings=2048)


@contextmanager
def runtime(name: str, model: Path, *flags: str) -> Iterator[Program]:
    fixed = ["--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file", str(model.parent / "token")]
    with running(name, "phalanx_runtime", ["serve", str(model), *fixed, *flags], model.parent) as program:
        yield program


def ranks_of(program: Program) -> list[int]:
    """Process ids of the ranks, in the order of their start, which is that of their numbers."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split() if folder.name.isdecimal() else []
            command = (folder / "cmdline").read_text() if stat else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat and int(stat[1]) == program.process.pid and "phalanx_runtime.rank" in command:
            found.append(int(folder.name))
    return sorted(found)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def readiness(program: Program) -> httpx.Response:
    return httpx.get(f"{program.base_url}/readyz", timeout=10)


def incarnation(program: Program) -> int:
    return int(httpx.get(f"{program.base_url}/v1/health", timeout=10).json()["incarnation"])


class Stopper:
    """Stops one rank once some chunks have come."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self.stopped: list[int] = []

    def __call__(self, chunks: int) -> None:
        if chunks > 5 and not self.stopped:
            self.stopped = ranks_of(self._program)
            os.kill(self.stopped[self._rank], signal.SIGSTOP)


def answers(program: Program, at: Callable[[int], None] = lambda chunks: None) -> list[Answer]:
    return asyncio.run(stream_all(program.base_url, BODIES, at))


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_ends_streams_and_the_group_recovers(model: Path, rank: int) -> None:
    with runtime("alone", model, "-tp", "2") as program:
        undisturbed = answers(program)
        assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * len(BODIES)
        stopper = Stopper(program, rank)
        broken = answers(program, stopper)
        assert [f"rank {rank} is hung: silent for" in (a.error or "") for a in broken] == [True] * len(BODIES)
        response = readiness(program)
        assert response.status_code == 503 and f"rank {rank} is hung" in response.json()["error"]["message"]
        assert httpx.get(f"{program.base_url}/healthz", timeout=10).status_code == 200
        wait_until(lambda: readiness(program).status_code == 200)
        assert incarnation(program) == 2
        assert not set(stopper.stopped) & set(ranks_of(program))
        assert [a.text for a in answers(program)] == [a.text for a in undisturbed]


def test_routed_streams_continue_elsewhere_when_a_rank_stops(model: Path) -> None:
    with runtime("one", model) as one, runtime("two", model) as two:
        undisturbed = answers(two)
        flags = router_flags([one, two], model.parent / "token")
        with running("router", "phalanx_router", flags, model.parent) as router:
            stopper = Stopper(one, 0)
            survived = answers(router, stopper)
            assert stopper.stopped
            assert [(a.error, a.usage) for a in survived] == [(None, TOKENS)] * len(BODIES)
            assert [a.text for a in survived] == [a.text for a in undisturbed]
            assert metric(httpx.get(f"{router.base_url}/metrics", timeout=10).text, "phalanx_router_replays_total") > 0
            wait_until(lambda: readiness(one).status_code == 200)
            assert incarnation(one) == 2
