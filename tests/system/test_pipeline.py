"""The program with two stages: answers equal those of one rank, and it recovers from a killed or stopped rank."""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import Program, free_port
from tests.cluster.service import Answer, stream_all
from tests.polling import wait_until
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import BODIES, incarnation, ranks_of, readiness, runtime

pytestmark = pytest.mark.system
TOKENS = 300


def answers(program: Program, on_chunk: Callable[[int], None] = lambda chunks: None, tokens: int = TOKENS) -> list[Answer]:
    return asyncio.run(stream_all(program.base_url, [{**body, "max_tokens": tokens} for body in BODIES], on_chunk))


def test_two_stages_answer_like_one_rank_and_recover(model: Path) -> None:
    with runtime("one", model, "--dtype", "float64") as one:
        plain = answers(one)
    with runtime("two", model, "--dtype", "float64", "--pipeline-parallel-size", "2") as two:
        undisturbed = answers(two)
        assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * len(BODIES)
        assert [a.text for a in undisturbed] == [a.text for a in plain]
        memory = httpx.get(f"{two.base_url}/v1/metrics", timeout=10).json()["memory"]
        assert [account["logits_sampler_bytes"] > 0 for account in memory] == [False, True]
        for number, (rank, sig) in enumerate([(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)], 2):
            signalled: list[int] = []

            def send_signal(chunks: int, rank: int = rank, sig: signal.Signals = sig, signalled: list[int] = signalled) -> None:
                if chunks > 5 and not signalled:
                    signalled.append(ranks_of(two)[rank])
                    os.kill(signalled[0], sig)

            broken = answers(two, send_signal, 5 * TOKENS)  # all still run
            assert [f"rank {rank}" in (a.error or "") for a in broken] == [True] * len(BODIES)
            wait_until(lambda: readiness(two).status_code == 200)
            assert incarnation(two) == number
            assert signalled[0] not in ranks_of(two)
        assert [a.text for a in answers(two)] == [a.text for a in plain]


def test_stages_in_two_pods_answer_like_one_rank(model: Path) -> None:
    exact = ("--dtype", "float64")
    with runtime("alone", model, *exact) as alone:
        plain = answers(alone)
    flags = (*exact, "-pp", "2", "--nnodes", "2", "--master-port", str(free_port()))
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        pods = [runtime(f"pod{pod}", model, *flags, "--node-rank", str(pod)) for pod in range(2)]
        leader, _ = pool.map(stack.enter_context, pods)
        assert [a.text for a in answers(leader)] == [a.text for a in plain]


@pytest.mark.slow
def test_mixture_on_two_stages_equals_one_rank(tmp_path: Path, model: Path) -> None:
    """Through `transformers`, split by its list of layers; the second rank samples and compiles grammars."""
    (tmp_path / "token").write_text((model.parent / "token").read_text())
    mixture = save_tiny(tmp_path / "mixture", "qwen2_moe", max_position_embeddings=512)
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    bodies = [{"prompt": f"prompt {i}", "max_tokens": 60, "temperature": i / 2, "seed": i} for i in range(3)]
    bodies += [{**body, "response_format": form} for body in bodies]

    def complete_all(*flags: str) -> list[str]:
        with runtime("mixture", mixture, "--dtype", "float64", *flags) as program:
            responses = [httpx.post(f"{program.base_url}/v1/completions", json=body, timeout=60) for body in bodies]
        assert [response.status_code for response in responses] == [200] * len(bodies), responses[-1].text
        return [response.json()["choices"][0]["text"] for response in responses]

    texts = complete_all("-pp", "2")
    assert texts == complete_all()
    assert all(text.startswith("{") for text in texts[3:])
