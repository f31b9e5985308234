"""The program with two stages answers like one rank, and comes back when a rank was killed or stopped."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.system.test_hung_rank import BODIES, TOKENS, answers, incarnation, model, ranks_of, readiness, runtime, wait_until

__all__ = ["model"]
pytestmark = pytest.mark.system


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_two_stages_answer_like_one_rank_and_come_back(model: Path, blow: signal.Signals) -> None:
    with runtime("one", model, "--dtype", "float64") as one:
        plain = answers(one)
    with runtime("two", model, "--dtype", "float64", "--pipeline-parallel-size", "2") as two:
        undisturbed = answers(two)
        assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * len(BODIES)
        assert [a.text for a in undisturbed] == [a.text for a in plain]
        memory = httpx.get(f"{two.base_url}/v1/metrics", timeout=10).json()["memory"]
        assert len(memory) == 2
        hit: list[int] = []

        def strike(chunks: int) -> None:
            if chunks > 5 and not hit:
                hit.append(ranks_of(two)[1])
                os.kill(hit[0], blow)

        broken = answers(two, strike)
        assert ["rank 1" in (a.error or "") for a in broken] == [True] * len(BODIES)
        wait_until(lambda: readiness(two).status_code == 200)
        assert incarnation(two) == 2
        assert hit[0] not in ranks_of(two)
        assert [a.text for a in answers(two)] == [a.text for a in plain]
