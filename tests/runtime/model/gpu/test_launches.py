"""Launches of a decoder layer of real shapes in bf16, counted on fake tensors of a GPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.attention.page_format import FORMATS, PageFormat
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.decoder.decoder import Layer
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.linear.gpu import PackedTritonLinear
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.packed.pack import pack
from phalanx_runtime.model.linear.packed.weight import Format
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.memory.kv_cache import make_caches
from tests.runtime.model.gpu.fakes import CUDA, PAGE, empty, fake_batch, fake_decoder, fake_rounding
from tests.runtime.model.gpu.launches import NoWaits, launches_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 1024,
}
QWEN3_06B = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    **LLAMA_8B,
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
}
QWEN3_30B = {
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
DECODES = [(300, 1), (20, 1), (700, 1)]
CHUNKS = [(0, 200), (256, 90)]
STEPS = {"decode": DECODES, "mixed": [*DECODES, *CHUNKS], "prefill": CHUNKS}


def layer_launches(
    raw: dict[str, Any],
    runs: list[tuple[int, int]],
    world_size: int,
    quantized: Format | None = None,
    format: PageFormat | None = None,
    is_calibrated: bool = False,
) -> Counter[str]:
    """Launches of three layers less those of two."""
    config = parse_config(raw)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        decoder = fake_decoder(config, world_size)
        layers, kv_heads = decoder.layers, decoder.shard.kv_heads.size
        if quantized is not None:
            layers = [quantized_layer(layer, config, 2 * decoder.shard.mlp.size, quantized) for layer in layers]
        batch = fake_batch(runs, kv_heads)
        roundings = (fake_rounding(kv_heads, config.head_dim),) * 3 if is_calibrated else ()
        kv = KvLayout(kv_heads, (config.head_dim,) * 3, (None,) * 3, roundings=roundings)
        caches = make_caches(kv, 64, PAGE, torch.bfloat16, CUDA, format)

        def run(num_layers: int) -> Counter[str]:
            x = empty(len(batch.tokens), config.hidden_size)
            decoder.layers = layers[:num_layers]
            return Counter(launches_of(lambda: decoder.hidden(batch, caches[:num_layers], x)))

        run(1)  # makes what the layers of a batch share
        return run(3) - run(2)


def quantized_layer(layer: Layer, config: ModelConfig, gate_up: int, kind: Format) -> Layer:
    """Returns the layer with linears of the same shapes."""

    def linear(weight: torch.Tensor) -> PackedTritonLinear:
        return PackedTritonLinear(pack(weight, kind), None)

    qkv, o, down = (linear(known.weight) for known in (layer.qkv, layer.o, layer.down) if isinstance(known, DenseLinear))
    gated = PlainGated(linear(empty(gate_up, config.hidden_size)), config.activation, TritonOps().gate)
    return replace(layer, qkv=qkv, o=o, down=down, gate_up=gated)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_a_quantised_linear_is_one_launch(kind: Format, step: str) -> None:
    found = layer_launches({**LLAMA_8B, "hidden_size": 1024, "intermediate_size": 2048}, STEPS[step], 1, kind)
    assert found["phalanx::multiply_packed"] == 4
    assert not {name for name in found if name.startswith("aten::")}
    assert found.total() <= 10


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("raw", [LLAMA_8B, QWEN3_06B, GEMMA2_2B], ids=["llama-8b", "qwen3-0.6b", "gemma2-2b"])
def test_a_layer_needs_ten_launches(raw: dict[str, Any], world_size: int, step: str) -> None:
    found = layer_launches(raw, STEPS[step], world_size)
    linear_adds = raw["architectures"] != ["Gemma2ForCausalLM"] and world_size == 1
    expected = {
        "phalanx::add_norm": 2,
        "phalanx::gate": 1,
        "phalanx::prepare_heads": 1,
        "phalanx::paged_attention": 1,
        "phalanx::merge_splits": int(step != "prefill"),
        "aten::mm": 2 if linear_adds else 4,
        "aten::addmm_": 2 if linear_adds else 0,
    }
    assert found == Counter(expected)
    assert found.total() <= 10


@pytest.mark.parametrize("raw", [LLAMA_8B, QWEN3_06B], ids=["llama-8b", "qwen3-0.6b"])
def test_a_layer_of_a_single_row_needs_seven_launches(raw: dict[str, Any]) -> None:
    expected = {
        "phalanx::multiply_row": 4,
        "phalanx::prepare_heads": 1,
        "phalanx::paged_attention": 1,
        "phalanx::merge_splits": 1,
    }
    assert layer_launches(raw, DECODES[:1], 1) == Counter(expected)
    assert "phalanx::multiply_row" not in layer_launches(raw, DECODES[:1], 2)
    assert "phalanx::multiply_row" not in layer_launches(GEMMA2_2B, DECODES[:1], 1)
    assert "phalanx::multiply_row" not in layer_launches(raw, DECODES[:1], 1, "int8")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("raw", [LLAMA_8B, GEMMA2_2B], ids=["llama-8b", "gemma2-2b"])
def test_only_calibrated_pages_need_further_launches(raw: dict[str, Any], name: str, step: str) -> None:
    plain, small = (layer_launches(raw, STEPS[step], 1, format=format) for format in (None, FORMATS[name]))
    assert small - plain == Counter({"phalanx::compress_heads": 1})
    assert plain - small == Counter({"phalanx::prepare_heads": 1})
    calibrated = layer_launches(raw, STEPS[step], 1, format=FORMATS[name], is_calibrated=True)
    assert small <= calibrated
    assert calibrated - small == Counter({"phalanx::round_in_turn": 1, "phalanx::restore_heads": 1})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_with_experts_needs_thirteen_launches(world_size: int, step: str) -> None:
    """The router is a linear; the sum of the experts adds to the residual on one rank."""
    found = layer_launches(QWEN3_30B, STEPS[step], world_size)
    expected = {
        "phalanx::add_norm": 2,
        "phalanx::prepare_heads": 1,
        "phalanx::paged_attention": 1,
        "phalanx::merge_splits": int(step != "prefill"),
        "phalanx::route_experts": 1,
        "phalanx::sort_pairs": 1,
        "phalanx::multiply_experts": 2,
        "phalanx::combine_experts": 1,
        "aten::mm": 1 + world_size,
        "aten::addmm_": 2 - world_size,
    }
    assert found == +Counter(expected)
    assert found.total() <= 13


def test_views_and_allocations_are_no_launches() -> None:
    def work() -> None:
        x = torch.empty(4, 6)
        x.view(3, 8)[:, :2].t().chunk(2)
        x.reshape(24).add_(1)
        x.t().reshape(24)
        torch.zeros(3)

    assert launches_of(work) == ["aten::add_", "aten::clone", "aten::zeros"]


def test_copies_that_wait_for_the_device_are_found() -> None:
    def on_gpu() -> torch.Tensor:
        return torch.tensor([1]).to("cuda", non_blocking=True)

    waits: list[Callable[[], object]] = [
        lambda: torch.tensor([1]).to("cuda"),
        lambda: on_gpu().copy_(torch.tensor([2])),
        lambda: on_gpu().cpu(),
    ]
    with FakeTensorMode(), NoWaits():
        on_gpu().copy_(torch.tensor([2]), non_blocking=True)
        for wait in waits:
            with pytest.raises(AssertionError, match="waits for the device"):
                wait()
