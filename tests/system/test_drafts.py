"""The program with a draft, or an exit, answers as without, counts what became of it, and serves without one that cannot load."""

import asyncio
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, free_port, running, serving
from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, RouterSummary
from tests.cluster.service import metric, stream_all
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.rank.drafting.test_drafting_programs import other_words
from tests.system.test_hung_rank import BODIES, incarnation, model, readiness, runtime, wait_until
from tests.system.test_openai import router_flags

__all__ = ["model"]
pytestmark = pytest.mark.system
BY_DRAFT = "--dtype float64 --speculative-control fixed --speculative-method draft --speculative-draft-model".split()
BY_EXIT = "--dtype float64 --speculative-control fixed --speculative-method self_draft --speculative-exit".split()


@pytest.fixture(scope="module")
def first_layers(model: Path) -> tuple[Path, Path]:
    """A model whose first layers know much of what it will say, and their exit."""
    target = save_target(model.parent / "target", max_position_embeddings=2048)
    return target, save_exit(target, model.parent / "exit.safetensors")


def texts_of(program: Program) -> list[str]:
    answers = asyncio.run(stream_all(program.base_url, [{**body, "max_tokens": 60} for body in BODIES]))
    assert [answer.error for answer in answers] == [None] * len(BODIES)
    return [answer.text for answer in answers]


def told(program: Program, name: str) -> float:
    return metric(httpx.get(f"{program.base_url}/metrics", timeout=10).text, name)


def draft_lost(router: Program, token: str) -> str:
    """Why its only group drafts no more, as the router tells the operator."""
    asked = msgspec.json.encode(Asked(BalancePolicy(), wait_s=0.0))
    headers = {"authorization": f"Bearer {token}"}
    answer = httpx.post(f"{router.base_url}{SUMMARY_PATH}", content=asked, headers=headers, timeout=10)
    (group,) = msgspec.json.decode(answer.content, type=RouterSummary).groups
    return group.draft_lost


def test_service_answers_equally_with_working_or_broken_draft(model: Path) -> None:
    draft = save_draft(model, model.parent / "draft")
    broken = save_draft(model, model.parent / "broken")
    (broken / "model.safetensors").write_text("no tensors")
    with runtime("plain", model, "--dtype", "float64") as plain:
        texts = texts_of(plain)
    with runtime("drafts", model, *BY_DRAFT, str(draft), "-tp", "2") as program:
        assert texts_of(program) == texts
        assert (
            0
            < told(program, "vllm:spec_decode_num_accepted_tokens_total")
            < told(program, "vllm:spec_decode_num_draft_tokens_total")
        )
        assert told(program, "phalanx_speculation_lost") == 0
        assert told(program, "phalanx_speculation_draft_seconds_total") > 0
    with runtime("without", model, *BY_DRAFT, str(broken)) as program:
        assert texts_of(program) == texts
        assert told(program, "phalanx_speculation_lost") == 1
        assert told(program, "vllm:spec_decode_num_draft_tokens_total") == 0
        assert "served without speculation: draft model" in program.log.read_text()
        with running("router", "phalanx_router", router_flags([program], model.parent / "token"), model.parent) as router:
            wait_until(lambda: "cannot be loaded" in draft_lost(router, (model.parent / "token").read_text()))


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_service_drafts_by_first_layers_through_an_exit(model: Path, first_layers: tuple[Path, Path], ranks: str) -> None:
    target, through = first_layers
    with runtime("plain", target, "--dtype", "float64") as plain:
        texts = texts_of(plain)
    with runtime("through", target, *BY_EXIT, str(through), "-tp", ranks) as program:
        assert texts_of(program) == texts
        proposed = told(program, "vllm:spec_decode_num_draft_tokens_total")
        assert 0.2 * proposed < told(program, "vllm:spec_decode_num_accepted_tokens_total") < 0.95 * proposed
        assert told(program, "phalanx_speculation_draft_seconds_total") > 0


def test_foreign_exit_keeps_the_program_unready_with_reason(model: Path, first_layers: tuple[Path, Path]) -> None:
    refused(model, "was fitted to the model", *BY_EXIT, str(first_layers[1]))


def test_foreign_draft_keeps_the_program_unready_with_reason(model: Path) -> None:
    other = other_words(save_draft(model, model.parent / "other"))
    refused(model, "has another vocabulary than the model: token 300 is '<hello>' in ", *BY_DRAFT, str(other))


def refused(model: Path, why: str, *flags: str) -> None:
    """At /readyz, which is what `Ready` and `status.groups` tell, and in its log; and start after start."""
    port = free_port()
    where = ["--kv-cache-memory-bytes", "8000000", "--port", str(port), "--host", "127.0.0.1"]
    command = [sys.executable, "-m", "phalanx_runtime", "serve", str(model), *where, *flags]
    with serving("refused", command, port, "/healthz", model.parent, ready_s=60) as program:
        seen = set[tuple[int, bool]]()

        def is_third_start() -> bool:
            answer = readiness(program)
            seen.add((answer.status_code, why in answer.text))
            return incarnation(program) > 2

        wait_until(is_third_start)
    assert {code for code, _ in seen} == {503} and (503, True) in seen
    assert why in program.log.read_text()
