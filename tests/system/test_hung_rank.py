"""A stopped rank: detected, ended with all others, and the group serves again. Real ranks, a tiny model."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.cluster.service import Answer, stream_all
from tests.polling import wait_until
from tests.slow_cases import some
from tests.system.runtimes import (
    BODIES,
    TOKENS,
    incarnation,
    metric_of,
    ranks_of,
    readiness,
    router_flags,
    runtime,
    until_linked,
)

pytestmark = pytest.mark.system
EXACT = ("--dtype", "float64")
"""Without near-ties: the requests of a step differ from run to run."""
REPORTED_CHUNKS = 100
"""Chunks between two looks at the requests that run: a fast engine sends the first chunks before its next report."""


class Stopper:
    """Stops one rank of the busiest program after some chunks."""

    def __init__(self, programs: list[Program], rank: int) -> None:
        self._programs = programs
        self._rank = rank
        self.stopped: list[int] = []
        self.program = programs[0]

    def __call__(self, chunks: int) -> None:
        if chunks % REPORTED_CHUNKS == 6 and not self.stopped:
            running = {metric_of(program, "vllm:num_requests_running"): program for program in self._programs}
            self.program = running[max(running)]  # a router may send all to one
            if max(running):
                self.stopped = ranks_of(self.program)
                os.kill(self.stopped[self._rank], signal.SIGSTOP)


def answers(program: Program, on_chunk: Callable[[int], None] = lambda chunks: None) -> list[Answer]:
    return asyncio.run(stream_all(program.base_url, BODIES, on_chunk))


def answers_over_a_stop(program: Program, stopper: Stopper) -> list[Answer]:
    """Returns the answers while a rank is stopped. On a busy machine all may be computed before the client reads."""
    found: list[Answer] = []
    for _ in range(3):
        found = answers(program, stopper)
        if stopper.stopped:
            break
    return found


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_stopped_rank_ends_streams_and_the_group_recovers(model: Path, rank: int) -> None:
    with runtime("alone", model, *EXACT, "-tp", "2") as program:
        undisturbed = answers(program)
        assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * len(BODIES)
        stopper = Stopper([program], rank)
        broken = answers_over_a_stop(program, stopper)
        assert [f"rank {rank} is hung: silent for" in (a.error or "") for a in broken] == [True] * len(BODIES)
        response = readiness(program)
        assert response.status_code == 503 and f"rank {rank} is hung" in response.json()["error"]["message"]
        assert httpx.get(f"{program.base_url}/healthz", timeout=10).status_code == 200
        wait_until(lambda: readiness(program).status_code == 200)
        assert incarnation(program) == 2
        assert not set(stopper.stopped) & set(ranks_of(program))
        assert [a.text for a in answers(program)] == [a.text for a in undisturbed]


@pytest.mark.slow
def test_routed_streams_continue_elsewhere_when_a_rank_stops(model: Path) -> None:
    with runtime("one", model, *EXACT) as one, runtime("two", model, *EXACT) as two:
        undisturbed = answers(two)
        flags = router_flags([one, two], model.parent / "token")
        with running("router", "phalanx_router", flags, model.parent) as router:
            until_linked(router, 2)
            stopper = Stopper([one, two], 0)
            survived = answers_over_a_stop(router, stopper)
            assert stopper.stopped
            assert [(a.error, a.usage) for a in survived] == [(None, TOKENS)] * len(BODIES)
            assert [a.text for a in survived] == [a.text for a in undisturbed]
            assert metric_of(router, "phalanx_router_replays_total") > 0
            wait_until(lambda: readiness(stopper.program).status_code == 200)
            assert incarnation(stopper.program) == 2
