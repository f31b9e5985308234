"""Quantised linears launch variants that are listed from their weights, on fake tensors."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.config import parse_config
from phalanx_runtime.model.decoder.decoder import Layer
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.kernels.variant import observed_launches
from phalanx_runtime.model.linear.gpu import PackedTritonLinear
from phalanx_runtime.model.linear.linear import DenseLinear, Linear, PlainGated
from phalanx_runtime.model.linear.packed.pack import pack
from phalanx_runtime.model.linear.packed.weight import Format
from phalanx_runtime.model.linear.scaled import make_triton_linear
from phalanx_runtime.rank.kernels.warmup import quantized_variants
from tests.runtime.model.gpu.fakes import PAGE, empty, fake_batch, fake_decoder
from tests.runtime.rank.device.fake_decoders import DTYPE
from tests.runtime.rank.kernels.config import BASE

ROWS = (1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 300, 1100)


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantised_linears_launch_listed_variants(kind: Format, world_size: int) -> None:
    """Steps of any number of rows: without tensor cores, in tiles with and without splits, and with rounded activations."""
    config = parse_config({**BASE, "architectures": ["Qwen2ForCausalLM"]})  # with biases of queries, keys and values
    decoder = fake_decoder(config, world_size)
    decoder.layers = [scaled_layer(layer, kind) for layer in decoder.layers]
    decoder.head = make_triton_linear(empty(decoder.shard.vocab.size, config.hidden_size), None, kind)
    expected = quantized_variants(decoder, DTYPE, world_size)
    caches = [
        LayerCache(*(empty(64, decoder.shard.kv_heads.size, PAGE, config.head_dim) for _ in range(2))) for _ in decoder.layers
    ]
    with observed_launches() as found:
        for rows in ROWS:
            batch = fake_batch([(5, 1)] * rows, decoder.shard.kv_heads.size)
            decoder.hidden(batch, caches, empty(rows, config.hidden_size))
            decoder.logits(empty(rows, config.hidden_size))
    launched = [variant for variant in found if variant.name in ("multiply_rows", "multiply_tiles", "quantize_rows")]
    assert set(launched) <= set(expected)
    assert {variant.name for variant in launched} == {variant.name for variant in expected}


def scaled_layer(layer: Layer, kind: Format) -> Layer:
    """Returns the layer with quantised linears."""

    def quantized(linear: Linear) -> Linear:
        assert isinstance(linear, DenseLinear)
        return make_triton_linear(linear.weight, linear.bias, kind)

    assert isinstance(layer.gate_up, PlainGated)
    gated = PlainGated(quantized(layer.gate_up.linear), layer.gate_up.activation, TritonOps().gate)
    return replace(layer, qkv=quantized(layer.qkv), o=quantized(layer.o), down=quantized(layer.down), gate_up=gated)


@pytest.mark.parametrize("outputs", [64, 300])
def test_narrow_weights_list_splits_of_many_rows(outputs: int) -> None:
    """Few blocks of outputs are split even with thousands of rows."""
    linear = PackedTritonLinear(pack(empty(outputs, 4096), "int4"), None)
    expected = linear.variants(DTYPE, add=False)
    with observed_launches() as found:
        for rows in (1100, 2100, 4200, 8400, 20_000):
            linear(empty(rows, 4096))
    assert set(found) <= set(expected) and len(set(found)) > 2
