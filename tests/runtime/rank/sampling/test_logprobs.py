"""Logprobs equal those of `transformers`: of output and prompt tokens, in chunks, on one rank and on two."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api.wire import TokenDetail
from phalanx_runtime.rank.sampling import logprobs
from phalanx_runtime.rank.sampling.logprobs import token_details
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, save_tiny

WIDE = Build(dtype=torch.float64)
TOP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("logprobs") / "model", "qwen3")


@cache
def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=rng).tolist() for size in (1, 9, 23)]


@torch.inference_mode()
def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Returns log_softmax of the logits of transformers after each token."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()
    logprobs: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return logprobs


def assert_detail(detail: TokenDetail | None, token: int, row: torch.Tensor, top: int = TOP) -> None:
    assert detail is not None
    assert detail.logprob == pytest.approx(float(row[token]), abs=1e-5)
    assert detail.rank == int((row > row[token]).sum())
    best = row.topk(top)
    assert detail.top_ids == best.indices.tolist()
    assert detail.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    assert detail.gap is None


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize(("pods", "chunk"), [([1], 1000), ([1], 4), ([2], 4), ([1], 1)])
def test_prompt_logprobs_are_those_of_transformers(
    folder: Path, pods: list[int], chunk: int, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_CHUNK_LOGITS", rows_per_chunk * VOCAB_SIZE)
    requests = [DriverRequest(prompt, more={"prompt_logprobs": TOP}) for prompt in prompts()] + [DriverRequest(prompts()[1])]

    def work(runner: Any) -> list[dict[int, TokenDetail]]:
        driver = Driver(runner)
        driver.generate(requests, 2, chunk, lag=1)
        return [driver.prompt_details(row) for row in range(len(requests))]

    found = on_ranks(folder, pods, WIDE, work)
    assert found[-1] == {}, "not requested"
    for prompt, details in zip(prompts(), found, strict=False):
        assert sorted(details) == list(range(1, len(prompt)))
        rows = expected(folder, prompt)
        for position, detail in details.items():
            assert_detail(detail, prompt[position], rows[position - 1])


def test_resumed_request_repeats_no_prompt_logprobs(folder: Path) -> None:
    requests = [DriverRequest(prompts()[1], more={"prompt_logprobs": 0}, delivered=(5,))]

    def work(runner: Any) -> dict[int, TokenDetail]:
        driver = Driver(runner)
        driver.generate(requests, 3)
        return driver.prompt_details(0)

    assert on_ranks(folder, [1], WIDE, work) == {}


def test_details_are_equal_for_any_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    whole = token_details(logits, [1] * 7, list(range(7)))
    monkeypatch.setattr(logprobs, "MAX_CHUNK_LOGITS", 22)
    assert token_details(logits, [1] * 7, list(range(7))) == whole
    assert token_details(logits, [1] * 3, [5, 0, 2], [5, 0, 2]) == [whole[5], whole[0], whole[2]]
    assert [len(detail.top_ids) for detail in whole] == list(range(7))
    assert token_details(logits[:1], [1], [50])[0].top_ids == logits[0].argsort(descending=True).tolist()
    assert token_details(logits.bfloat16(), [1] * 7, [0] * 7)[0].logprob == pytest.approx(whole[0].logprob, abs=0.05)
