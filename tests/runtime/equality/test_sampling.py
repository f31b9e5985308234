"""A request gets equal tokens alone, batched, in other steps, on two ranks, preempted and replayed. In float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.requests import FIELDS, NUM_TOKENS, ROOMY, SHAPES, assert_equal, requests
from tests.runtime.ranks import PAGE_SIZE, Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("equality") / "model", "qwen2")


def answers(folder: Path, submitted: list[wire.Request], limits: Limits = ROOMY, pods: tuple[int, ...] = (1,)) -> list[Served]:
    return on_ranks(folder, pods, Build(torch.float64, num_pages=200), lambda runner: serve(runner, submitted, limits))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """Answers of each request alone."""
    return [answers(folder, [request])[0] for request in requests()]


@pytest.mark.parametrize("limits", SHAPES.values(), ids=SHAPES.keys())
def test_other_step_sizes_sample_equal_tokens(folder: Path, plain: list[Served], limits: Limits) -> None:
    assert len({tuple(one.tokens) for one in plain}) == len(FIELDS), "the requests differ"
    assert_equal(answers(folder, requests(), limits), plain)


def test_two_ranks_sample_equal_tokens(folder: Path, plain: list[Served]) -> None:
    assert_equal(answers(folder, requests(), pods=(2,)), plain)


def test_preempted_requests_sample_equal_tokens(folder: Path, plain: list[Served]) -> None:
    def work(runner: ModelRunner) -> tuple[list[Served], int]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64)), len(
            counter.admitted
        )

    served, num_admitted = on_ranks(folder, (1,), Build(torch.float64, num_pages=11), work)
    assert num_admitted > len(FIELDS), "requests were preempted"
    assert 11 * PAGE_SIZE < sum(len(one.prompt) + NUM_TOKENS for one in requests())
    assert_equal(served, plain)


@pytest.mark.parametrize("delivered", [1, 5, 13])
def test_replayed_requests_sample_equal_tokens(folder: Path, plain: list[Served], delivered: int) -> None:
    replayed = [
        wire.Request(id=one.id, epoch=2, prompt=one.prompt, delivered=whole.tokens[:delivered], sampling=one.sampling)
        for one, whole in zip(requests(), plain, strict=True)
        if len(whole.tokens) > delivered
    ]
    assert len(replayed) >= 6
    rest = {one.id: answer for one, answer in zip(replayed, answers(folder, replayed), strict=True)}
    for number, whole in enumerate(plain):
        if str(number) in rest:
            assert rest[str(number)].tokens == whole.tokens[delivered:]
            assert rest[str(number)].finish == whole.finish


def test_prompt_logprobs_come_once_and_equal_other_steps(folder: Path) -> None:
    submitted = requests(prompt_logprobs=1)
    whole = answers(folder, submitted)
    for limits in SHAPES.values():
        for one, answer, same in zip(submitted, answers(folder, submitted, limits), whole, strict=True):
            assert sorted(answer.prompt_details) == list(range(1, len(one.prompt)))
            for position, detail in answer.prompt_details.items():
                assert detail.logprob == pytest.approx(same.prompt_details[position].logprob, abs=1e-9)


def test_preempted_prompt_is_reported_once(folder: Path) -> None:
    """Decoding requests take the pages of one with a long prompt in chunks."""
    short = [
        wire.Request(
            id=str(n),
            epoch=1,
            prompt=[n, 1],
            delivered=[],
            sampling=wire.Sampling(max_tokens=40, seed=n, temperature=0.0, return_gaps=True),
        )
        for n in range(3)
    ]
    long = wire.Request(
        id="long",
        epoch=1,
        prompt=[n % 200 for n in range(60)],
        delivered=[],
        sampling=wire.Sampling(max_tokens=4, seed=9, temperature=0.0, prompt_logprobs=1),
    )

    def work(runner: ModelRunner) -> tuple[list[Served], list[NewRow]]:
        counter = CountingRunner(runner)
        return serve(
            counter, [*short, long], Limits(max_model_len=72, max_num_seqs=4, max_num_batched_tokens=5)
        ), counter.admitted

    (*others, answer), admitted = on_ranks(folder, (1,), Build(torch.float64, num_pages=14), work)
    assert [len(new.history) for new in admitted if new.num_prompt == 60] == [60, 60], "preempted before its first token"
    assert all(one.finish == "length" and len(one.tokens) == 40 for one in others)
    [alone] = answers(folder, [long])
    assert sorted(answer.prompt_details) == [*range(1, 60)]
    assert answer.tokens == alone.tokens
    for position, detail in answer.prompt_details.items():
        assert detail.logprob == pytest.approx(alone.prompt_details[position].logprob, abs=1e-9)


@pytest.mark.parametrize("prompt_logprobs", [None, 0], ids=["shared prompt", "prompt logprobs of each"])
def test_siblings_sample_the_same_as_alone(folder: Path, prompt_logprobs: int | None) -> None:
    """n = 4: four requests of one prompt share its pages, except with prompt logprobs."""
    prompt = requests()[7].prompt
    fields: dict[str, Any] = {"presence_penalty": 0.5, "prompt_logprobs": prompt_logprobs}
    siblings = [
        wire.Request(
            id=str(seed),
            epoch=1,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=NUM_TOKENS, seed=seed, temperature=1.0, **fields),
        )
        for seed in range(4)
    ]

    def work(runner: ModelRunner) -> tuple[list[Served], int]:
        counter = CountingRunner(runner)
        return serve(counter, siblings, ROOMY), counter.num_computed

    together, num_computed = on_ranks(folder, (1,), Build(torch.float64, num_pages=200), work)
    assert [answer.tokens for answer in together] == [answers(folder, [sibling])[0].tokens for sibling in siblings]
    assert len({tuple(answer.tokens) for answer in together}) == 4
    whole = 4 * (len(prompt) + NUM_TOKENS - 1)
    shared = 3 * (len(prompt) // PAGE_SIZE) * PAGE_SIZE
    assert num_computed == whole if prompt_logprobs is not None else num_computed <= whole - shared
    positions = [] if prompt_logprobs is None else [*range(1, len(prompt))]
    assert [sorted(answer.prompt_details) for answer in together] == [positions] * 4
