"""The program with a draft model or an exit: equal answers, counts of draft tokens, and a draft that cannot load."""

import asyncio
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, free_port, running, serving
from phalanx_api import labels
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from tests.cluster.service import stream_all
from tests.polling import wait_until
from tests.runtime.drafts import change_token, save_draft, save_exit, save_target
from tests.system.runtimes import BODIES, incarnation, metric_of, readiness, router_flags, runtime, until_idle

pytestmark = pytest.mark.system
BY_DRAFT = "--dtype float64 --speculative-control fixed --speculative-method draft --speculative-draft-model".split()
BY_EXIT = "--dtype float64 --speculative-control fixed --speculative-method self_draft --speculative-exit".split()


@pytest.fixture(scope="module")
def first_layers(model: Path) -> tuple[Path, Path]:
    """A model whose first layers predict many of its tokens, and their exit."""
    target = save_target(model.parent / "target", max_position_embeddings=2048)
    return target, save_exit(target, model.parent / "exit.safetensors")


def texts_of(program: Program) -> list[str]:
    answers = asyncio.run(stream_all(program.base_url, [{**body, "max_tokens": 60} for body in BODIES]))
    assert [answer.error for answer in answers] == [None] * len(BODIES)
    return [answer.text for answer in answers]


def draft_lost(router: Program, token: str) -> str:
    """Draft failure of the only group, as reported to the operator."""
    body = msgspec.json.encode(SummaryRequest(BalancePolicy(), wait_s=0.0))
    headers = {"authorization": f"Bearer {token}"}
    answer = httpx.post(f"{router.base_url}{SUMMARY_PATH}", content=body, headers=headers, timeout=10)
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
        until_idle(program, 0)
        assert (
            0
            < metric_of(program, "vllm:spec_decode_num_accepted_tokens_total")
            < metric_of(program, "vllm:spec_decode_num_draft_tokens_total")
        )
        assert metric_of(program, "phalanx_speculation_lost") == 0
        assert metric_of(program, "phalanx_speculation_draft_seconds_total") > 0
    with runtime("without", model, *BY_DRAFT, str(broken)) as program:
        assert texts_of(program) == texts
        until_idle(program, 0)
        assert metric_of(program, "phalanx_speculation_lost") == 1
        assert metric_of(program, "vllm:spec_decode_num_draft_tokens_total") == 0
        assert "served without speculation: draft model" in program.log.read_text()
        with running("router", "phalanx_router", router_flags([program], model.parent / "token"), model.parent) as router:
            wait_until(lambda: "cannot be loaded" in draft_lost(router, (model.parent / "token").read_text()))


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_service_drafts_by_first_layers_through_an_exit(model: Path, first_layers: tuple[Path, Path], ranks: str) -> None:
    target, exit_file = first_layers
    with runtime("plain", target, "--dtype", "float64") as plain:
        texts = texts_of(plain)
    with runtime("exit", target, *BY_EXIT, str(exit_file), "-tp", ranks) as program:
        assert texts_of(program) == texts
        until_idle(program, 0)
        proposed = metric_of(program, "vllm:spec_decode_num_draft_tokens_total")
        assert 0.2 * proposed < metric_of(program, "vllm:spec_decode_num_accepted_tokens_total") < 0.95 * proposed
        assert metric_of(program, "phalanx_speculation_draft_seconds_total") > 0


def test_foreign_exit_keeps_the_program_unready_with_reason(model: Path, first_layers: tuple[Path, Path]) -> None:
    check_refused(model, "was fitted to the model", *BY_EXIT, str(first_layers[1]))


def test_foreign_draft_keeps_the_program_unready_with_reason(model: Path) -> None:
    other = change_token(save_draft(model, model.parent / "other"))
    check_refused(model, "has another vocabulary than the model: token 300 is '<hello>' in ", *BY_DRAFT, str(other))


def check_refused(model: Path, why: str, *flags: str) -> None:
    """Checks that /readyz and the log of a pod report `why` at each of several starts."""
    port = free_port()
    fixed = ["--kv-cache-memory-bytes", "8000000", "--port", str(port), "--host", "127.0.0.1"]
    pod = ["env", f"{labels.ENV_POD_INDEX}=0"]  # elsewhere the first failure ends the program
    command = [*pod, sys.executable, "-m", "phalanx_runtime", "serve", str(model), *fixed, *flags]
    with serving("refused", command, port, "/healthz", model.parent, ready_s=60) as program:
        answers = set[tuple[int, bool]]()

        def is_third_start() -> bool:
            answer = readiness(program)
            answers.add((answer.status_code, why in answer.text))
            return incarnation(program) > 2

        wait_until(is_third_start)
    assert {code for code, _ in answers} == {503} and (503, True) in answers
    assert why in program.log.read_text()
