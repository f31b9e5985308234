"""Weights of GGUF files in the kernels of GPUs, in the interpreter without one, against what the library `gguf` dequantises."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.experts.sparse import SparseMlp
from phalanx_runtime.model.ggml.codes import LAYOUTS
from phalanx_runtime.model.ggml.weight import KINDS, GgmlPart, GgmlWeight
from phalanx_runtime.model.kernels.variant import observed_launches
from phalanx_runtime.model.linear.gpu import ArrangedLinear, PackedRows, PackedTritonLinear
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated, StackedLinear
from phalanx_runtime.model.linear.packed import pack as packing
from phalanx_runtime.model.linear.packed.pack import pack_ggml
from phalanx_runtime.model.linear.packed.weight import GGML
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.stored.gguf import GgufReader
from phalanx_runtime.model.weights import Checkpoint
from phalanx_runtime.rank.kernels.warmup import quantized_variants
from tests.examples import examples
from tests.runtime.checkpoint.gguf_files import random_blocks, write_model
from tests.runtime.model.gpu.launches import launches_of
from tests.slow_cases import some

Kind = GGMLQuantizationType
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ORDERED = sorted(LAYOUTS)
QUICK = tuple(kind for kind in ORDERED if kind not in (Kind.Q2_K, Kind.Q5_K, Kind.IQ4_XS))
"""The others take the interpreter ten to twenty seconds each."""
TRITON = Kernels(triton=True)
MIXES = {
    "Q4_K_M": ({"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K, "output": Kind.Q6_K}, Kind.Q4_K),
    "Q8_0": ({}, Kind.Q8_0),
    "mixed": ({"attn_v": Kind.Q3_K, "ffn_up": Kind.Q5_1, "token_embd": Kind.Q5_K, "output": Kind.Q4_0}, Kind.Q2_K),
}


def weight_of(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> GgmlWeight:
    raw = torch.from_numpy(random_blocks(kind, (outputs, inputs), seed)).to(DEVICE)
    return GgmlWeight(parts=(GgmlPart(kind, raw),), inputs=inputs, dtype=torch.float32)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> None:
    """`terms`: sums of the absolute products, whose float32 roundings do not shrink when they cancel."""
    assert bool(((actual.double() - expected).abs() <= expected.abs() * 2e-6 + terms * 2**-22 + 1e-30).all())


def test_each_format_of_the_file_is_packed() -> None:
    assert KINDS < LAYOUTS.keys() and {kind.name.lower() for kind in LAYOUTS} == GGML.keys()


@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
def test_packed_weights_have_exactly_their_values(kind: Kind) -> None:
    weight = weight_of(kind, 7, 768)
    found = pack_ggml(weight)
    assert torch.equal(found.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert found.num_bytes <= 1.05 * weight.num_bytes
    assert found.layout.row_sizes(768) == (found.words.shape[1], found.scales.shape[1])


@pytest.mark.parametrize("kind", some(ORDERED, *QUICK), ids=lambda kind: kind.name)
@settings(max_examples=examples(6), deadline=None)
@given(
    rows=st.sampled_from([1, 2, 3, 6, 17]),
    outputs=st.integers(1, 40),
    blocks=st.integers(1, 5) | st.just(17),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_equal_those_of_dequantised_weights(
    kind: Kind, rows: int, outputs: int, blocks: int, biased: bool, seed: int
) -> None:
    weight = weight_of(kind, outputs, blocks * GGML_QUANT_SIZES[kind][0], seed)
    bias = noise(seed + 1, outputs) if biased else None
    x, residual = noise(seed + 2, rows, weight.inputs), noise(seed + 3, rows, outputs)
    exact = DenseLinear(weight.dequantize(torch.float64), None if bias is None else bias.double())(x.double())
    terms = x.double().abs() @ weight.dequantize(torch.float64).abs().T * (4 if kind in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K) else 1)
    linear, results = make_linear(weight, bias, TRITON), list[torch.Tensor]()
    assert launches_of(lambda: results.append(linear(x))) == ["phalanx::multiply_packed"]
    close(results[0], exact, terms)
    linear.add_to(added := residual.clone(), x)
    close(added, exact + residual.double(), terms)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_0], ids=lambda kind: kind.name)
def test_columns_of_a_rank_may_begin_within_a_block(kind: Kind) -> None:
    whole = weight_of(kind, 5, 768)
    size = GGML_QUANT_SIZES[kind][0]
    cut = replace(whole, inputs=768 - size, skipped=size // 2)
    linear = make_linear(cut, None, TRITON)
    assert isinstance(linear, ArrangedLinear) and linear.variants(torch.float32, add=True)
    for rows in (1, 6):
        x, residual = noise(rows, rows, cut.inputs), noise(9, rows, 5)
        expected = x @ cut.dequantize(torch.float32).T
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-3)
        linear.add_to(added := residual.clone(), x)
        torch.testing.assert_close(added, residual + expected, rtol=1e-4, atol=1e-3)


def test_packed_linears_free_the_bytes_of_the_file() -> None:
    whole = weight_of(Kind.Q4_K, 5, 768)
    weights, found = [whole, replace(whole, inputs=512, skipped=128)], weakref.ref(whole.parts[0].raw)
    linears = [make_linear(weight, None, TRITON) for weight in weights]
    del whole, weights
    gc.collect()
    assert len(linears) == 2 and found() is None


def test_large_weights_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(Kind.Q6_K, 13, 512)
    expected = pack_ggml(weight)
    monkeypatch.setattr(packing, "PACKED_AT_ONCE", 1500)  # two rows
    found = pack_ggml(weight)
    assert torch.equal(found.words, expected.words) and torch.equal(found.scales, expected.scales)


def test_blocks_go_to_the_device_of_the_checkpoint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", {}, Kind.Q4_K)
    folder, name, shape = locate(str(path), cache_dir=tmp_path / "cache").dir, "model.layers.0.mlp.down_proj", (512, 1024)
    with FakeTensorMode(), Checkpoint(folder, torch.bfloat16, torch.device("cuda")) as checkpoint:
        weight = GgufReader(checkpoint).read(name, shape, Span(0, 512), Span(0, 1024))
        assert isinstance(weight, GgmlWeight)
        linear = make_linear(weight, None, TRITON)
        assert isinstance(linear, PackedTritonLinear) and linear.weight.words.is_cuda and linear.weight.scales.is_cuda
    with FakeTensorMode(), Checkpoint(folder, torch.float64, torch.device("cuda")) as checkpoint:
        assert not GgufReader(checkpoint).is_stored(name), "kernels have no float64"


def test_parts_of_several_formats_are_multiplied_one_by_one() -> None:
    parts = tuple(part for kind in (Kind.Q4_K, Kind.Q6_K) for part in weight_of(kind, 8, 256).parts)
    weight, bias = GgmlWeight(parts=parts, inputs=256, dtype=torch.float32), noise(1, 16)
    linear, x = make_linear(weight, bias, TRITON), noise(2, 3, 256)
    assert isinstance(linear, StackedLinear) and len(linear.linears) == 2
    torch.testing.assert_close(linear(x), x @ weight.dequantize(torch.float32).T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
def test_rows_of_an_embedding_are_dequantised(kind: Kind, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 9, 4352)
    table, index = PackedRows(pack_ggml(weight), dtype), torch.tensor([8, 0, 3, 3], device=DEVICE)
    expected = weight.dequantize(torch.float32)[index]
    relative = 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(table.index_select(0, index).float(), expected, rtol=relative, atol=1e-6)
    assert table.index_select(0, index[:0]).shape == (0, 4352)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MIXES)
def test_loaded_models_take_the_memory_of_the_file(tmp_path: Path, name: str, tied: bool) -> None:
    path = write_model(tmp_path / "model.gguf", *MIXES[name], tied=tied)
    stored = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors)
    model = load(path, tmp_path)
    assert model.num_bytes <= 1.06 * stored, "arrivals of splits, and padding, of tiny weights"
    assert isinstance(model.embedding.weight, PackedRows)
    if tied:
        assert isinstance(model.head, PackedTritonLinear) and model.head.weight is model.embedding.weight.weight
    listed = quantized_variants(model, torch.float32, 1)
    with FakeTensorMode(allow_non_fake_inputs=True), observed_launches() as found:
        for rows in (1, 2, 5, 300):
            model.embedding(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
            x = torch.empty(rows, model.config.hidden_size, device=DEVICE)
            model.head(x)
            for layer in model.layers:
                layer.qkv(x)
                layer.o.add_to(x, torch.empty(rows, 512, device=DEVICE))
                assert isinstance(layer.gate_up, PlainGated) and not isinstance(layer.down, SparseMlp)
                layer.gate_up.linear(x)
                layer.down.add_to(x, torch.empty(rows, 1024, device=DEVICE))
    assert {variant.name for variant in found} == {"multiply_rows", "multiply_tiles", "read_rows"}
    assert set(found) <= set(listed)


def load(path: Path, cache: Path) -> Decoder:
    options = LoadOptions(dtype=torch.float32, device=DEVICE, kernels=TRITON, positions=64)
    model = open_model(locate(str(path), cache_dir=cache / "cache").dir).load(SoloCollective(), options)
    assert isinstance(model, Decoder)
    return model
