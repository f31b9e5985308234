"""Grouped experts against the reference, on the GPU, or in the interpreter without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.experts.gpu import GroupedExperts, max_tiles, route, sort_pairs
from phalanx_runtime.model.experts.sparse import ExpertWeights, Routing, SparseMlp, stack
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.partition import Span
from tests.examples import examples
from tests.runtime.model.experts.cases import DEVICE, TOLERANCE, Noise, distinct_logits, stacked, wide_reference
from tests.runtime.model.gpu.launches import launches_of
from tests.runtime.model.reference import prompts, reference
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import save_tiny

LAUNCHES = ["phalanx::route_experts", "phalanx::sort_pairs", *["phalanx::multiply_experts"] * 2, "phalanx::combine_experts"]


@settings(max_examples=examples(20), deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 7),
    tokens=st.integers(1, 14),
    hidden=st.sampled_from([16, 48, 96]),
    inner=st.sampled_from([16, 21, 72]),
    dtype=st.sampled_from([*TOLERANCE]),
    norm_topk_prob=st.booleans(),
    has_bias=st.booleans(),
    adds=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh", "swigluoai"]),
    seed=st.integers(0, 99),
)
def test_grouped_experts_equal_the_reference(
    data: st.DataObject,
    count: int,
    tokens: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    norm_topk_prob: bool,
    has_bias: bool,
    adds: bool,
    activation: Activation,
    seed: int,
) -> None:
    noise, start = Noise(seed), data.draw(st.integers(0, count - 1))
    span = Span(start, data.draw(st.integers(start + 1, count)))
    routing = Routing(per_token=data.draw(st.integers(1, count)), norm_topk_prob=norm_topk_prob)
    weights = stacked(noise, span.size, hidden, inner, dtype, has_bias=has_bias)
    x, logits = noise(tokens, hidden + 16, dtype=dtype)[:, :hidden], distinct_logits(seed, tokens, count, dtype)
    residual = noise(tokens, hidden, dtype=dtype)
    expected = wide_reference(weights, span, routing, activation)(x.float(), logits) + (residual.float() if adds else 0)

    experts, results = GroupedExperts(weights, span, routing, activation), [residual]
    work = (lambda: experts.add_to(residual, x, logits)) if adds else (lambda: results.append(experts(x, logits)))
    assert launches_of(work) == LAUNCHES
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(results[-1].float(), expected, rtol=tolerance, atol=2 * tolerance)


def test_unsupported_steps_use_the_reference() -> None:
    routing, noise = Routing(per_token=2, norm_topk_prob=True), Noise(0)
    wide = stacked(noise, 3, 16, 16, torch.float64, has_bias=True)
    x, logits = noise(4, 16, dtype=torch.float64), distinct_logits(0, 4, 3, torch.float64)
    experts = GroupedExperts(wide, Span(0, 3), routing, "silu")
    torch.testing.assert_close(experts(x, logits).float(), wide_reference(wide, Span(0, 3), routing, "silu")(x.float(), logits))
    residual = x.clone()
    experts.add_to(residual, x, logits)
    torch.testing.assert_close(residual, x + experts(x, logits))
    narrow = GroupedExperts(stacked(noise, 3, 16, 16, torch.float32, has_bias=False), Span(0, 3), routing, "silu")
    assert narrow(x.float()[:0], logits.float()[:0]).shape == (0, 16)
    assert experts.num_launched == narrow.num_launched == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    data=st.data(), count=st.integers(1, 12), tokens=st.integers(1, 80), block=st.sampled_from([16, 64]), seed=st.integers(0, 99)
)
def test_each_pair_of_a_rank_has_one_row(data: st.DataObject, count: int, tokens: int, block: int, seed: int) -> None:
    """In tiles of one expert, in order; the tiles are as many as the device counts, and no more than the bound."""
    per_token, start = data.draw(st.integers(1, count)), data.draw(st.integers(0, count - 1))
    span = Span(start, data.draw(st.integers(start + 1, count)))
    experts = distinct_logits(seed, tokens, count, torch.float32).topk(per_token).indices.to(torch.int32)
    tiles = sort_pairs(experts, span, block)
    numbers, used = experts.flatten().tolist(), int(tiles.count)
    rows = tiles.pairs.tolist()[:used]
    for tile, expert in zip(rows, tiles.experts.tolist(), strict=False):
        held = [pair for pair in tile if pair >= 0]
        assert held and held == sorted(held) and tile == held + [-1] * (block - len(held))
        assert {numbers[pair] for pair in held} == {span.start + expert}
    placed = [pair for tile in rows for pair in tile if pair >= 0]
    assert sorted(placed) == [pair for pair, number in enumerate(numbers) if span.start <= number < span.stop]
    assert len(tiles.pairs) == max_tiles(len(numbers), span.size, block) >= used


def test_bound_of_tiles_is_the_worst_routing() -> None:
    """All experts but one have one row."""
    for num_pairs, num_experts, block in [(1, 128, 16), (8, 128, 16), (130, 4, 64), (4096, 8, 64)]:
        alone = min(num_experts, num_pairs) - 1
        assert max_tiles(num_pairs, num_experts, block) == alone + -(-(num_pairs - alone) // block)
    assert max_tiles(0, 4, 16) == 0


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_routing_prefers_lower_numbers_of_equal_logits(norm_topk_prob: bool) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0, -2.0]], device=DEVICE).bfloat16()
    chosen = route(logits, Routing(per_token=3, norm_topk_prob=norm_topk_prob))
    assert chosen.experts.tolist() == [[1, 2, 0]]
    shares = torch.softmax(logits.float(), -1)[0, [1, 2, 0]]
    torch.testing.assert_close(chosen.weights[0], shares / shares.sum() if norm_topk_prob else shares)


def test_decoder_with_grouped_experts_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """With the kernels of attention and between linears, decode steps replayed from graphs."""
    folder = save_tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)

    tensors = load_file(folder / "model.safetensors")

    def stored(layer: int, number: int) -> ExpertWeights:
        name = f"model.layers.{layer}.mlp.experts.{number}"
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return ExpertWeights(gate_up=torch.cat((gate, up)).to(DEVICE), down=down.to(DEVICE))

    def work(runner: Any) -> tuple[list[list[int]], int]:
        grouped = []
        for index, layer in enumerate(runner.model.layers):
            if isinstance(layer.down, SparseMlp):
                weights = stack((stored(index, number) for number in range(4)), 4)
                grouped.append(GroupedExperts(weights, Span(0, 4), Routing(per_token=2, norm_topk_prob=True), "silu"))
                assert grouped[-1].num_bytes == layer.down.experts.num_bytes
                layer.down.experts = grouped[-1]
        requests = [DriverRequest(prompt) for prompt in prompts()[:2]]
        return Driver(runner).generate(requests, 3), sum(experts.num_launched for experts in grouped)

    outputs, num_launched = on_ranks(folder, [1], Build(device_rows=2, device=str(DEVICE)), work)
    assert num_launched >= 5 * 3
    expected = [stream.tokens for stream in reference(folder, [*outputs, *([0] for _ in prompts()[2:])])]
    assert outputs == expected[:2]


def test_triton_attention_with_sinks_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    attention = TritonAttention()
    requests = [DriverRequest(prompt) for prompt in prompts()[3:]]
    build = Build(attention=attention, device=str(DEVICE))
    outputs = on_ranks(folder, [1], build, lambda runner: Driver(runner).generate(requests, 3, chunk=30))
    assert attention.num_computed == 2 * sum(len(request.prompt) + 2 for request in requests)
    expected = [stream.tokens for stream in reference(folder, [*([0] for _ in prompts()[:3]), *outputs])]
    assert outputs == expected[3:]
