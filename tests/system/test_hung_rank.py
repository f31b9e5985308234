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
from tests.system.runtimes import BODIES, TOKENS, incarnation, metric_of, ranks_of, readiness, router_flags, runtime

pytestmark = pytest.mark.system


class Stopper:
    """Stops one rank after some chunks."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self.stopped: list[int] = []

    def __call__(self, chunks: int) -> None:
        if chunks > 5 and not self.stopped:
            self.stopped = ranks_of(self._program)
            os.kill(self.stopped[self._rank], signal.SIGSTOP)


def answers(program: Program, on_chunk: Callable[[int], None] = lambda chunks: None) -> list[Answer]:
    return asyncio.run(stream_all(program.base_url, BODIES, on_chunk))


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
            assert metric_of(router, "phalanx_router_replays_total") > 0
            wait_until(lambda: readiness(one).status_code == 200)
            assert incarnation(one) == 2
