"""Samples with all parameters combined follow the distribution and depend on the request's tokens alone."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.filters import Draw, apply_filters, apply_temperature
from phalanx_runtime.rank.sampling.gumbel import sample
from phalanx_runtime.rank.sampling.logprobs import near_tie_gap
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from tests.runtime.rank.sampling.distributions import DRAWS, LOGITS, OUTPUT, PROMPT, SETTINGS, VOCAB, assert_follows, distribution
from tests.runtime.rank.sampling.sampled import SampleRequest, logits_after, run, sample_requests
from tests.slow_cases import some


@pytest.mark.parametrize("name", some(SETTINGS, *[*SETTINGS][1::3]))
def test_samples_follow_the_distribution(name: str) -> None:
    """False alarm rate 1e-6 over seeds; the seeds are fixed."""
    sampler = TorchSampler(VOCAB)
    samplings = [wire.Sampling(max_tokens=99, seed=seed, **SETTINGS[name]) for seed in range(DRAWS)]
    for row, sampling in enumerate(samplings):
        sampler.admit(NewRow(row, sampling, len(PROMPT), PROMPT + OUTPUT))
    scores = torch.tensor(LOGITS).expand(DRAWS, -1)
    tokens = sampler.sample(scores, [(row, len(OUTPUT)) for row in range(DRAWS)]).tokens
    expected = distribution(OUTPUT, samplings[0])
    assert int((expected > 0).sum()) >= 3
    assert_follows(tokens, expected)


@settings(deadline=None, max_examples=40)
@given(requests=st.lists(sample_requests, min_size=2, max_size=5), cut=st.integers(0, 11))
def test_batched_alone_and_resumed_requests_sample_equal_tokens(requests: list[SampleRequest], cut: int) -> None:
    together, failures = run(TorchSampler(16), requests, 12)
    assert failures == {}
    for request, output in zip(requests, together, strict=True):
        assert run(TorchSampler(16), [request], 12)[0] == [output], "alone"
    used = TorchSampler(16)
    run(used, [*requests, *requests], 4)  # reused rows
    partial = [output[: min(cut, len(output) - 1)] for output in together]
    assert run(used, requests, 12, partial)[0] == together, "preempted and resumed, or replayed"


def test_plain_rows_are_unaffected_by_special_ones() -> None:
    plain = [
        SampleRequest([1], wire.Sampling(max_tokens=9, seed=seed, temperature=temperature))
        for seed, temperature in ((1, 0.0), (2, 1.0), (3, 0.5))
    ]
    special = SampleRequest([1], wire.Sampling(max_tokens=9, seed=4, logit_bias={2: 100.0}))
    outputs, _ = run(TorchSampler(16), [plain[0], special, plain[1], plain[2], special], 6)
    assert [outputs[0], outputs[2], outputs[3]] == run(TorchSampler(16), plain, 6)[0]
    assert outputs[1] == outputs[4] == [2] * 6


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    sampler = TorchSampler(VOCAB)
    sampler.admit(NewRow(0, wire.Sampling(max_tokens=9, seed=5, temperature=temperature, top_p=0.9, min_p=0.1)))
    assert sampler.sample(torch.tensor([LOGITS]), [(0, 0)]).tokens == [4]


def test_min_tokens_keeps_every_end_away_until_then() -> None:
    """Without min_tokens an end would be sampled at once."""
    ends = [3, 5]
    for min_tokens in (0, 1, 4):
        sampling = wire.Sampling(
            max_tokens=9, seed=0, temperature=0.0, min_tokens=min_tokens, stop_token_ids=ends, logit_bias={3: 100.0, 5: 50.0}
        )
        (output,), _ = run(TorchSampler(16), [SampleRequest([1], sampling)], 9)
        assert output[min_tokens] == 3 and len(output) == min_tokens + 1
        assert not set(output[:min_tokens]) & set(ends)


def test_logprobs_are_of_raw_logits() -> None:
    sampler = TorchSampler(VOCAB)
    sampling = wire.Sampling(
        max_tokens=9, seed=0, temperature=0.3, top_k=1, logit_bias={2: 50.0}, repetition_penalty=1.7, logprobs=3
    )
    sampler.admit(NewRow(0, sampling, 1, [4]))
    sampler.admit(NewRow(1, wire.Sampling(max_tokens=9, seed=0)))
    scores = torch.tensor([LOGITS, LOGITS])
    sampled = sampler.sample(scores, [(0, 0), (1, 0)])
    detail, other = sampled.details
    assert sampled.tokens[0] == 2 and detail is not None and other is None
    raw = scores[0].log_softmax(0)
    assert detail.logprob == pytest.approx(float(raw[2]), abs=1e-6)
    assert detail.rank == 7
    assert detail.top_ids == [4, 7, 1]
    assert detail.top_logprobs == pytest.approx(raw[[4, 7, 1]].tolist(), abs=1e-6)
    assert detail.gap is None


def gap_of(**fields: Any) -> float:
    """Returns the near-tie gap of a sample from LOGITS."""
    sampler = TorchSampler(VOCAB)
    sampler.admit(NewRow(0, wire.Sampling(max_tokens=9, seed=5, return_gaps=True, **fields), 1, [0]))
    detail = sampler.sample(torch.tensor([LOGITS], dtype=torch.float64), [(0, 0)]).details[0]
    assert detail is not None and detail.gap is not None and detail.top_ids == []
    return detail.gap


def test_greedy_gap_is_that_of_the_two_best() -> None:
    spread = float(torch.tensor(LOGITS, dtype=torch.float64).std())
    assert gap_of(temperature=0.0) == pytest.approx(0.6 / spread)
    assert gap_of(temperature=0.0, logit_bias={7: 0.599}) == pytest.approx(0.001 / spread)
    assert gap_of(temperature=0.0, allowed_token_ids=[1, 2]) == pytest.approx(2.0 / spread)
    assert gap_of(temperature=0.0, allowed_token_ids=[1]) == math.inf


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([None, 3, 6]),
    top_p=st.sampled_from([1.0, 0.9, 0.6]),
    min_p=st.sampled_from([0.0, 0.1]),
    noise=st.sampled_from([1e-3, 1e-2, 0.1]),
)
@example(seed=1360, temperature=1.0, top_k=None, top_p=0.6, min_p=0.0, noise=0.1)  # passes another excluded token, too
def test_a_token_changes_only_where_its_gap_is_small(
    seed: int, temperature: float, top_k: int | None, top_p: float, min_p: float, noise: float
) -> None:
    """Logits changed by at most `noise` give another token only if the gap is of that size."""
    one = Draw(seed=seed, index=3, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    raw = logits_after([seed], 10)
    moved = raw + noise * (2 * torch.rand(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1)
    before, after = sample(raw.unsqueeze(0), [one]), sample(moved.unsqueeze(0), [one])
    if before != after:
        assert near_tie_gap(raw, raw, one) <= 2 * noise / float(raw.std())


def test_token_near_the_filters_edge_has_a_small_gap() -> None:
    raw = torch.tensor([2.0, 1.0, 0.999, -3.0], dtype=torch.float64)
    wins = next(seed for seed in range(1000) if sample(raw.unsqueeze(0), [Draw(seed=seed, index=0, top_k=2)]) == [1])
    assert near_tie_gap(raw, raw, Draw(seed=wins, index=0, top_k=2)) <= 0.001 / float(raw.std()) + 1e-12
    assert near_tie_gap(raw, raw, Draw(seed=wins, index=0)) != near_tie_gap(raw, raw, Draw(seed=wins, index=0, top_k=2))


FILTERS: dict[str, tuple[dict[str, Any], str, float]] = {
    "top-k": ({"top_k": 7}, "TopKLogitsWarper", 7),
    "top-p": ({"top_p": 0.83}, "TopPLogitsWarper", 0.83),
    "min-p": ({"min_p": 0.07}, "MinPLogitsWarper", 0.07),
}


@pytest.mark.parametrize(("fields", "name", "value"), FILTERS.values(), ids=FILTERS.keys())
def test_filters_keep_the_same_tokens_as_transformers(fields: dict[str, Any], name: str, value: float) -> None:
    from transformers.generation import logits_process

    raw = torch.randn(20, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    filtered = apply_temperature(raw, [Draw(seed=0, index=0)] * 20)
    apply_filters(filtered, [Draw(seed=0, index=0, **fields)] * 20)
    expected: torch.Tensor = getattr(logits_process, name)(value)(torch.zeros(20, 1, dtype=torch.int64), raw.clone())
    assert torch.equal(filtered, expected)
