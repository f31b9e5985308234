"""The program with a draft answers as without, counts what became of it, and serves without a draft that it cannot load."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.programs import Program, running
from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, RouterSummary
from tests.cluster.service import metric, stream_all
from tests.runtime.drafts import save_draft
from tests.system.test_hung_rank import BODIES, model, runtime, wait_until
from tests.system.test_openai import router_flags

__all__ = ["model"]
pytestmark = pytest.mark.system


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


def test_a_service_answers_equally_with_a_draft_and_with_one_that_is_broken(model: Path) -> None:
    draft = save_draft(model, model.parent / "draft")
    broken = save_draft(model, model.parent / "broken")
    (broken / "model.safetensors").write_text("no tensors")
    by_draft = (
        "--dtype",
        "float64",
        "--speculative-control",
        "fixed",
        "--speculative-method",
        "draft",
        "--speculative-draft-model",
    )
    with runtime("plain", model, "--dtype", "float64") as plain:
        texts = texts_of(plain)
    with runtime("drafts", model, *by_draft, str(draft), "-tp", "2") as program:
        assert texts_of(program) == texts
        assert (
            0
            < told(program, "vllm:spec_decode_num_accepted_tokens_total")
            < told(program, "vllm:spec_decode_num_draft_tokens_total")
        )
        assert told(program, "phalanx_speculation_lost") == 0
    with runtime("without", model, *by_draft, str(broken)) as program:
        assert texts_of(program) == texts
        assert told(program, "phalanx_speculation_lost") == 1
        assert told(program, "vllm:spec_decode_num_draft_tokens_total") == 0
        with running("router", "phalanx_router", router_flags([program], model.parent / "token"), model.parent) as router:
            wait_until(lambda: "cannot be loaded" in draft_lost(router, (model.parent / "token").read_text()))
