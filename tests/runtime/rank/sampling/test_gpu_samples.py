"""Samples of the Triton kernels equal those of the torch reference, near-ties aside."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.filters import Draw, apply_temperature, make_draw, threshold_distances
from phalanx_runtime.rank.sampling.gpu.row_state import RowState
from phalanx_runtime.rank.sampling.gpu.sample import make_workspace, sample_rows
from phalanx_runtime.rank.sampling.gpu.triton_rows import gumbel_noise, noise_bits, scaled_logits
from phalanx_runtime.rank.sampling.gpu.triton_thresholds import GATHERED
from phalanx_runtime.rank.sampling.gumbel import gumbel_from_bits, mixed_seed, noise_key
from phalanx_runtime.rank.sampling.gumbel import noise_bits as reference_bits
from tests.examples import examples
from tests.runtime.rank.sampling.definitions import kept_by_definition
from tests.runtime.rank.sampling.gpu_cases import DEVICE, NEAR_TIE, Rows


@triton.jit  # type: ignore[untyped-decorator]
def _store_noise(seeds, indices, bits, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    draw = tl.program_id(0)
    token = tl.arange(0, COUNT)
    found = noise_bits(tl.load(seeds + draw), tl.load(indices + draw), token)
    tl.store(bits + draw * COUNT + token, found.to(tl.int32, bitcast=True))
    tl.store(noise + draw * COUNT + token, gumbel_noise(found))


@triton.jit  # type: ignore[untyped-decorator]
def _store_scaled(  # type: ignore[no-untyped-def]
    logits,
    floats,
    integers,
    counts,
    bias,
    masks,
    index,
    scaled,
    vocab_size,
    FEATURES: tl.constexpr,
    COUNT: tl.constexpr,
):
    token = tl.arange(0, COUNT)
    state = (floats, integers, counts, bias, masks)
    tl.store(scaled + token, scaled_logits(logits, state, 0, index, token, vocab_size=vocab_size, FEATURES=FEATURES))


@triton.jit  # type: ignore[untyped-decorator]
def _transform_bits(bits, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(noise + place, gumbel_noise(tl.load(bits + place).to(tl.uint32, bitcast=True)))


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4))
def test_noise_has_the_bits_of_the_reference(pairs: list[tuple[int, int]]) -> None:
    count = 1024
    bits = torch.empty(len(pairs), count, dtype=torch.int32, device=DEVICE)
    noise = torch.empty(len(pairs), count, device=DEVICE)
    seeds = torch.tensor([mixed_seed(seed) for seed, _ in pairs], dtype=torch.int64, device=DEVICE)
    indices = torch.tensor([index for _, index in pairs], dtype=torch.int32, device=DEVICE)
    _store_noise[(len(pairs),)](seeds, indices, bits, noise, COUNT=count)
    keys = torch.tensor([noise_key(seed, index) for seed, index in pairs], dtype=torch.int32)
    expected = reference_bits(keys, torch.arange(count, dtype=torch.int32))
    assert torch.equal(bits.cpu(), expected)
    torch.testing.assert_close(noise.cpu(), gumbel_from_bits(expected, torch.float32), rtol=3e-6, atol=3e-6)


def test_noise_is_finite_and_accurate_in_both_tails() -> None:
    near = [0, 1, -1, -2, 5, 77, 1000, 123_457, 2**20 + 3, -(2**22), 2**30, 2**31 - 2**20, -(2**31) + 2**20]
    bits = torch.tensor([*near, 2**31 - 1, -(2**31), 2**31 - 64], dtype=torch.int32)
    noise = torch.empty(len(bits), device=DEVICE)
    _transform_bits[(1,)](bits.to(DEVICE), noise, COUNT=len(bits))
    assert bool(noise.isfinite().all())
    torch.testing.assert_close(noise.cpu(), gumbel_from_bits(bits, torch.float32), rtol=3e-6, atol=3e-6)
    exact = gumbel_from_bits(bits[: len(near)], torch.float64)
    torch.testing.assert_close(noise.cpu()[: len(near)].double(), exact, rtol=3e-6, atol=3e-6)


top_k = st.sampled_from([1, 7, 40, 90, 5000])
top_p = st.sampled_from([0.95, 0.8, 0.5, 0.01])
min_p = st.sampled_from([0.02, 0.9])
cuts: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"top_k": top_k}),
    st.fixed_dictionaries({"top_p": top_p}),
    st.fixed_dictionaries({"top_k": top_k, "top_p": top_p}),
    st.fixed_dictionaries({}, optional={"top_k": top_k, "top_p": top_p, "min_p": min_p}),
)
chances: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63 - 1), "temperature": st.sampled_from([0.6, 1.0, 2.5])}
)
processors = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.6]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {3: 4.5, 99: -2.0}]),
        "bad_words": st.sampled_from([[], [[1], [2]]]),
        "min_tokens": st.integers(0, 2),
        "allowed_token_ids": st.sampled_from([None, [7], list(range(0, 100, 3))]),
    }
)
samplings = st.builds(
    lambda chance, cuts, processors: wire.Sampling(max_tokens=20, stop_token_ids=[0, 3], **{**chance, **cuts, **processors}),
    chances,
    cuts,
    st.just({}) | st.just({"temperature": 0.0}) | processors,
)


@dataclass(frozen=True)
class Logits:
    """Random logits of standard deviation `scale`. Multiples of `step`, if positive, have many ties."""

    seed: int
    scale: float
    step: float
    dtype: torch.dtype

    def make(self, draws: int, vocab_size: int, shift: int = 0) -> Tensor:
        """Returns [draws, vocab_size]."""
        chance = torch.Generator().manual_seed(self.seed + shift)
        logits = torch.randn(draws, vocab_size, generator=chance) * self.scale
        return ((logits / self.step).round() * self.step if self.step else logits).to(self.dtype)


logits_of = st.builds(
    Logits,
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.05, 0.5, 3.0]),
    step=st.sampled_from([0.0, 0.0, 0.25, 4.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
shapes = st.sampled_from([(100, 64), (127, 1024), (1000, 1024), (3000, 1024)])
rooms = st.sampled_from([16, 1 << 14])


@pytest.mark.no_cover
@settings(max_examples=examples(15), deadline=None)
@given(st.lists(samplings, min_size=2, max_size=3), shapes, rooms, logits_of)
def test_samples_equal_the_reference(
    samplings: list[wire.Sampling], shape: tuple[int, int], num_candidates: int, source: Logits
) -> None:
    """Two steps of all rows, so that tokens of the first are counted for penalties on the device."""
    vocab_size, block = shape
    rows = Rows(vocab_size, samplings, block=block, num_candidates=num_candidates)
    order = list(range(len(samplings)))[::-1]
    for index in range(2):
        logits = source.make(len(order), vocab_size, index)
        before = logits.clone()
        tokens = rows.check(logits, order, [index] * len(order))
        assert torch.equal(logits, before)
        assert [int(rows.state.last_tokens[row]) for row in order] == tokens


@pytest.mark.no_cover
@settings(max_examples=examples(30), deadline=None)
@given(chances, cuts, shapes, rooms, logits_of)
def test_thresholds_keep_the_tokens_of_the_definition(
    chance: dict[str, Any], cuts: dict[str, Any], shape: tuple[int, int], num_candidates: int, source: Logits
) -> None:
    sampling = wire.Sampling(max_tokens=20, **chance, **cuts)
    draw = make_draw(sampling, 0)
    rows = Rows(shape[0], [sampling], block=shape[1], num_candidates=num_candidates)
    logits = source.make(1, shape[0])
    token = rows.sampled(logits, [0], [0])[0]
    scaled = apply_temperature(logits, [draw])[0]
    threshold = rows.workspace.thresholds[0].cpu() if draw.is_filtered else -torch.inf
    kept = set(torch.nonzero(scaled >= threshold).flatten().tolist())
    assert token in kept
    distances = threshold_distances(scaled.double(), draw)
    for other in kept ^ kept_by_definition(scaled.double().tolist(), draw):
        assert distances[other] < NEAR_TIE * scaled.std()


@pytest.mark.parametrize("num_candidates", [16, 1 << 14])
def test_thresholds_are_exact_where_values_are_dense(num_candidates: int) -> None:
    """More than 16 candidates in the interval of the cut: with room for 16, they are searched among all tokens."""
    cuts: list[dict[str, Any]] = [{"top_k": 40}, {"top_k": 90}, {"top_p": 0.8}, {"top_p": 0.3}, {"top_k": 90, "top_p": 0.4}]
    samplings = [wire.Sampling(max_tokens=1, seed=row, **cut) for row, cut in enumerate(cuts)]
    rows = Rows(1000, samplings, num_candidates=num_candidates)
    logits = Logits(seed=1, scale=0.05, step=0.0, dtype=torch.float32).make(len(cuts), 1000)
    rows.sampled(logits, list(range(len(cuts))), [0] * len(cuts))
    assert int(rows.workspace.tallies[: len(cuts), GATHERED.value].min()) > 16
    for row, sampling in enumerate(samplings):
        kept = set(torch.nonzero(logits[row] >= rows.workspace.thresholds[row].cpu()).flatten().tolist())
        assert kept == kept_by_definition(logits[row].double().tolist(), make_draw(sampling, 0))


@settings(max_examples=examples(25), deadline=None)
@given(chances, processors, st.integers(0, 3), logits_of)
def test_processed_logits_equal_the_reference(
    chance: dict[str, Any], processors: dict[str, Any], index: int, source: Logits
) -> None:
    vocab_size, count = 100, 128
    sampling = wire.Sampling(max_tokens=20, stop_token_ids=[0, 3], **{**chance, **processors})
    rows = Rows(vocab_size, [sampling])
    for token in (5, 5, 6):
        rows.sampled(torch.where(torch.arange(vocab_size) == token, 1e6, 0.0)[None], [0], [index])
        rows.reference[0].append(int(rows.state.last_tokens[0]))
    logits, scaled = source.make(1, vocab_size), torch.empty(count, device=DEVICE)
    slots = (rows.state.counts, rows.state.bias, rows.state.masks)
    features = int(rows.state.features)
    wide = [rows.state.integers if slot.tensor is None else slot.tensor for slot in slots]
    _store_scaled[(1,)](
        logits.to(DEVICE),
        rows.state.floats,
        rows.state.integers,
        *wide,
        index,
        scaled,
        vocab_size=vocab_size,
        FEATURES=features,
        COUNT=count,
    )
    expected = apply_temperature(rows.processed(logits, [0], [index]), [make_draw(sampling, index)])[0]
    torch.testing.assert_close(scaled[:vocab_size].cpu(), expected, rtol=1e-6, atol=1e-6)
    assert bool((scaled[vocab_size:] == -torch.inf).all())


def test_masked_token_is_never_sampled_at_infinite_noise() -> None:
    """At this seed and index token 343 has the smallest bits, which float32 may round to zero."""
    scores = torch.full((1, 512), -torch.inf)
    scores[0, 5] = 1.0
    assert Rows(512, [wire.Sampling(max_tokens=1, seed=1852965621)]).sampled(scores, [0], [0]) == [5]


@pytest.mark.parametrize("top_k", [None, 3])
def test_impossible_rows_and_padding_give_minus_one(top_k: int | None) -> None:
    rows = Rows(100, [wire.Sampling(max_tokens=1, seed=1, temperature=1.0, top_k=top_k)], block=64)
    rows.state.last_tokens.fill_(9)
    logits = torch.full((2, 100), -torch.inf)
    assert rows.sampled(logits, [0, -1], [0, 0]) == [-1, -1]
    assert rows.state.last_tokens.tolist() == [0, 9, 9]


def test_greedy_rows_take_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [70, 71, 140]] = 2.0
    assert Rows(200, [wire.Sampling(max_tokens=1, seed=1, temperature=0.0)], block=64).sampled(logits, [0], [0]) == [70]


def test_draws_of_one_row_are_not_final() -> None:
    """Positions after draft tokens: nothing is written but the tokens."""
    sampling = wire.Sampling(max_tokens=9, seed=4)
    rows = Rows(100, [sampling], block=64)
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    tokens = rows.sampled(logits, [0, 0, 0], [4, 5, 6], is_final=False)
    assert int(rows.state.last_tokens[0]) == 0
    assert [rows.check(logits[at : at + 1], [0], [4 + at])[0] for at in range(3)] == tokens


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_sampling_on_a_gpu_reads_nothing_back() -> None:
    """With fake tensors a value read by the host and a mix of devices raise. One operator runs."""
    sampling = wire.Sampling(max_tokens=9, seed=4, top_k=5, presence_penalty=1.0, logit_bias={3: 1.0}, allowed_token_ids=[1, 3])
    with FakeTensorMode():
        device = torch.device("cuda")
        state = RowState(1000, 4, device, num_slots=4)
        state.counts.take(1), state.bias.take(1), state.masks.take(2)
        workspace = make_workspace(1000, 8, device)
        logits, tokens = (
            torch.empty(3, 1000, dtype=torch.bfloat16, device=device),
            torch.empty(3, dtype=torch.int64, device=device),
        )
        rows, indices = (torch.empty(3, dtype=torch.int32, device=device) for _ in range(2))
        with _Calls() as calls:
            sample_rows(logits, rows, indices, state, tokens, workspace=workspace)
        assert calls.names == ["phalanx::sample_rows"]
        with pytest.raises(ValueError, match="mixes tensors on"):
            sample_rows(logits, rows, torch.empty(3, dtype=torch.int32), state, tokens, workspace=workspace)
    assert RowState(1000, 2, DEVICE).admit(NewRow(0, sampling))


def test_other_logits_are_refused() -> None:
    rows = Rows(100, [wire.Sampling(max_tokens=1, seed=1)])
    for logits in (torch.zeros(1, 100, dtype=torch.float64), torch.zeros(100, 1).T.expand(1, 100)[:, ::2], torch.zeros(1, 99)):
        with pytest.raises(ValueError, match="logits of"):
            rows.sampled(logits, [0], [0])


def test_ties_at_the_cut_are_all_kept() -> None:
    """Top-k counts exactly k of equal tokens in its mass, and keeps them all."""
    sampling = wire.Sampling(max_tokens=1, seed=3, top_k=2, top_p=0.6)
    rows = Rows(100, [sampling], block=64)
    logits = torch.full((1, 100), -9.0)
    logits[0, [3, 50, 99]] = torch.tensor([1.0, 0.5, 0.5])
    rows.sampled(logits, [0], [0])
    kept = kept_by_definition(logits[0].tolist(), Draw(seed=3, index=0, top_k=2, top_p=0.6))
    assert float(rows.workspace.thresholds[0]) == min(float(logits[0, token]) for token in kept)
