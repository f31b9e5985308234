"""Samples follow the distribution, depend on (seed, index, token) alone, and come from the tokens that filters keep."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx_runtime.rank.sampling.filters import SORTED_TOKENS, Draw, apply_filters, apply_temperature
from phalanx_runtime.rank.sampling.gumbel import gumbel, gumbel_from_bits, noise_bits, noise_key, sample
from tests.runtime.rank.sampling.definitions import kept_by_definition
from tests.runtime.rank.sampling.distributions import chi_square, chi_square_limit

DRAWS = 20_000
QUANTILE = 5.612
"""Upper quantile of the normal distribution at 1e-8."""


def keys_of(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([noise_key(seed, index) for seed, index in pairs], dtype=torch.int32)


@pytest.mark.parametrize("pairs", [[(7, j) for j in range(DRAWS)], [(s, 3) for s in range(DRAWS)]], ids=["one seed", "one index"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_distribution(pairs: list[tuple[int, int]], temperature: float) -> None:
    """False alarm rate 1e-8 over seeds; the seeds are fixed."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.3, 0.1, 1.4])
    tokens = sample(
        logits.expand(len(pairs), -1), [Draw(seed=seed, index=index, temperature=temperature) for seed, index in pairs]
    )
    assert chi_square(tokens, torch.softmax(logits / temperature, 0)) < chi_square_limit(len(logits) - 1, QUANTILE)


def test_samples_of_adjacent_indices_are_independent() -> None:
    """Pairs of successive samples of one seed over 4 tokens: 16 cells."""
    tokens = sample(torch.zeros(DRAWS + 1, 4), [Draw(seed=1, index=index) for index in range(DRAWS + 1)])
    pairs = [4 * tokens[2 * i] + tokens[2 * i + 1] for i in range(DRAWS // 2)]
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < chi_square_limit(15, QUANTILE)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_noise_is_finite_whatever_the_bits(bits: list[int]) -> None:
    """Infinite noise would select tokens that a grammar excludes: one sample in 440 with a vocabulary of 150,000."""
    extremes = [0, 1, -1, -2, -(2**31), -(2**31) + 64, 2**31 - 1, 2**31 - 64]
    for dtype, highest, lowest in ((torch.float32, 22.19, -2.82), (torch.float64, 22.19, -3.11)):
        noise = gumbel_from_bits(torch.tensor(extremes + bits, dtype=torch.int32), dtype)
        assert bool(noise.isfinite().all()) and float(noise.max()) < highest and float(noise.min()) > lowest


def test_masked_token_is_never_sampled_at_infinite_noise() -> None:
    """At this seed and index token 343 has the smallest bits, which float32 may round to zero."""
    scores = torch.full((1, 512), -torch.inf)
    scores[0, 5] = 1.0
    assert sample(scores, [Draw(seed=1852965621, index=0)]) == [5]


def test_gumbel_noise_is_accurate_in_both_tails() -> None:
    """float32 equals float64 where noise is large."""
    near = torch.tensor([0, 1, 5, 77, 1000, 123_457, 2**20 + 3, -(2**22), 2**30, -(2**31) + 2**20], dtype=torch.int32)
    exact = torch.tensor([-math.log(-math.log1p(-(abs(bits + 0.5) / 2**31))) for bits in near.tolist()], dtype=torch.float64)
    assert torch.allclose(gumbel_from_bits(near, torch.float64), exact, rtol=1e-9)
    assert torch.allclose(gumbel_from_bits(near, torch.float32).double(), exact, rtol=3e-6, atol=3e-6)


def test_noise_has_the_moments_of_a_gumbel() -> None:
    noise = gumbel(keys_of([(5, j) for j in range(20)]), torch.arange(50_000, dtype=torch.int32), torch.float64)
    assert torch.isfinite(noise).all()
    # Mean and variance of 10^6 samples: eight standard errors of 0.0013 and 0.0035.
    assert abs(float(noise.mean()) - 0.577216) < 0.0103
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.028


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**31), split=st.integers(1, 998))
def test_any_part_of_the_vocabulary_has_the_same_noise(seed: int, index: int, split: int) -> None:
    keys, tokens = keys_of([(seed, index), (seed, index + 1)]), torch.arange(999, dtype=torch.int32)
    parts = [noise_bits(keys, tokens[:split]), noise_bits(keys, tokens[split:])]
    assert torch.equal(torch.cat(parts, 1), noise_bits(keys, tokens))
    for dtype in (torch.float32, torch.float64):
        floats = torch.cat([gumbel(keys, tokens[:split], dtype), gumbel(keys, tokens[split:], dtype)], 1)
        assert torch.equal(floats, gumbel(keys, tokens, dtype))


def test_sample_is_independent_of_its_batch() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    draws = [
        Draw(seed=1, index=0),
        Draw(seed=1, index=1, temperature=0.0),
        Draw(seed=2, index=0, temperature=0.5, top_k=5),
        Draw(seed=3, index=9, temperature=1.5, top_p=0.8),
        Draw(seed=4, index=4, temperature=1.0, min_p=0.1),
        Draw(seed=1, index=0, temperature=0.0),
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(draws)]
    assert together == sample(logits, draws)
    assert together[1] == int(logits[1].argmax())


def test_seeds_and_indices_give_different_samples() -> None:
    keys = {noise_key(seed, index) for seed in (0, 1, 2**63, 2**64 - 1) for index in range(1000)}
    assert len(keys) == 4000


def kept(scaled: Tensor, draw: Draw) -> set[int]:
    filtered = scaled.clone().unsqueeze(0)
    apply_filters(filtered, [draw])
    return set(torch.isfinite(filtered[0]).nonzero().flatten().tolist())


@settings(deadline=None, max_examples=150)
@given(
    scores=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=30, unique=True),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.123, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_filters_keep_the_tokens_of_their_definition(scores: list[float], top_k: int | None, top_p: float, min_p: float) -> None:
    one = Draw(seed=0, index=0, temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p)
    # No value of the strategies equals a threshold, where float64 rounding would decide.
    assert kept(torch.tensor(scores, dtype=torch.float64), one) == kept_by_definition(scores, one)


def test_a_flat_distribution_is_sorted_beyond_the_first_candidates() -> None:
    size = 4 * SORTED_TOKENS
    scores = torch.arange(size, dtype=torch.float64) * 1e-6
    assert len(kept(scores, Draw(seed=0, index=0, top_p=0.9))) == pytest.approx(0.9 * size, abs=5)
    assert len(kept(scores, Draw(seed=0, index=0, top_p=0.9, top_k=2 * SORTED_TOKENS))) == pytest.approx(
        1.8 * SORTED_TOKENS, abs=5
    )
    assert len(kept(scores, Draw(seed=0, index=0, top_p=0.1))) == pytest.approx(0.1 * size, abs=5)


def test_ties_at_a_cut_stay_together() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert kept(scores, Draw(seed=0, index=0, top_k=2)) == {0, 1, 2}
    assert kept(scores, Draw(seed=0, index=0, top_p=0.01)) == {0, 1, 2}


@pytest.mark.parametrize(("top_p", "tokens"), [(0.5, {0}), (0.75, {0, 1}), (0.875, {0, 1, 2, 3})])
def test_top_p_keeps_no_token_beyond_an_exact_mass(top_p: float, tokens: set[int]) -> None:
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=dtype).log()
        assert kept(scores, Draw(seed=0, index=0, top_p=top_p)) == tokens


def test_low_precision_logits_are_widened() -> None:
    assert (
        apply_temperature(torch.ones(1, 4, dtype=torch.bfloat16), [Draw(seed=0, index=0, temperature=0.5)]).dtype == torch.float32
    )
    assert (
        apply_temperature(torch.ones(1, 4, dtype=torch.float64), [Draw(seed=0, index=0, temperature=0.5)]).dtype == torch.float64
    )
