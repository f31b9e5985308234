"""Checkpoints in fp8 give the tokens of their dequantised weights, at each tensor-parallel size; others are refused by name."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from phalanx_runtime.checkpoint.quantization import Fp8Scheme, parse_quantization
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.gpu import PackedTritonLinear
from phalanx_runtime.model.linear.linear import DenseLinear
from phalanx_runtime.model.linear.packed.weight import Fp8Weight
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from phalanx_runtime.model.linear.scaled import ScaledLinear
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.weights import Checkpoint
from tests.examples import examples
from tests.runtime.model.equal import compare
from tests.runtime.model.fp8_checkpoints import BLOCK, CONFIGS, KINDS, Kind, save_fp8, scales_of
from tests.runtime.model.reference import as_bf16, generate, reference
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import Family, save_tiny

CPU = torch.device("cpu")
SHAPE = (70, 150)
PLAIN = Kernels()
REQUESTS = [DriverRequest([3, 5, 8, 13]), DriverRequest([7])]


def tokens(folder: Path, ranks: int, kernels: Kernels = PLAIN) -> list[list[int]]:
    return on_ranks(folder, [1] * ranks, Build(kernels=kernels), lambda runner: Driver(runner).generate(REQUESTS, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_moe"], ids=["separate", "joined", "experts"])
def test_tokens_equal_those_of_dequantised_weights(tmp_path: Path, family: Family, kind: Kind) -> None:
    folder, exact = tmp_path / "fp8", tmp_path / "exact"
    save_fp8(save_tiny(tmp_path / "model", family), folder, exact, kind)
    expected = tokens(exact, 1)
    for ranks in (1, 2, 3):  # 3 ranks cut blocks
        assert tokens(folder, ranks) == expected


def test_loading_names_the_scheme(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "fp8"
    save_fp8(save_tiny(tmp_path / "model", num_hidden_layers=1), folder, tmp_path / "exact", "block")
    with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
        tokens(folder, 1)
    found = [vars(record) for record in caplog.records if record.message == "quantised checkpoint"]
    assert [(record["scheme"], record["loaded_as"]) for record in found] == [("fp8 in blocks of 32 x 32", "torch.float32")]


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fp8Scheme, torch.Tensor]:
    """A folder with the weight `w`, its scheme, and the dequantised weight."""
    folder, kind = tmp_path_factory.mktemp("weights"), request.param
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    scales, wide = scales_of(weight, kind)
    values = (weight / wide).to(torch.float8_e4m3fn)
    scheme = parse_quantization({"quantization_config": CONFIGS[kind]})
    assert isinstance(scheme, Fp8Scheme)
    save_file({"w.weight": values, f"w.{scheme.scale_names[-1]}": scales}, folder / "model.safetensors")
    return folder, scheme, values.float() * wide


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_part_is_exact(stored: tuple[Path, Fp8Scheme, torch.Tensor], data: st.DataObject) -> None:
    folder, scheme, exact = stored
    axis = data.draw(st.sampled_from([0, 1]))
    start = data.draw(st.integers(0, SHAPE[axis] - 1) | st.integers(0, SHAPE[axis] // 16 - 1).map(lambda unit: 16 * unit))
    span = Span(start, data.draw(st.integers(start + 1, SHAPE[axis])))
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, scheme)
        part = reader.columns("w", SHAPE, span) if axis else reader.rows([("w", SHAPE[0], span)] * 2, SHAPE[1])
    expected = exact[:, span.start : span.stop] if axis else torch.cat([exact[span.start : span.stop]] * 2)
    assert isinstance(part, Fp8Weight)
    assert torch.equal(part.dequantize(torch.float32), expected)
    linear, x = make_linear(part, None, Kernels(triton=True)), torch.randn(1, expected.shape[1])
    assert isinstance(linear, ScaledLinear | PackedTritonLinear) or (scheme.block is not None and span.start % 16)
    assert isinstance(make_linear(part, None, Kernels()), DenseLinear)
    if part.values.numel() < 2000:
        torch.testing.assert_close(linear(x), x @ expected.t(), rtol=1e-5, atol=1e-5)


def test_a_mix_of_fp8_and_other_weights_is_dequantised(stored: tuple[Path, Fp8Scheme, torch.Tensor], tmp_path: Path) -> None:
    folder, scheme, exact = stored
    other = torch.randn(6, SHAPE[1])
    save_file({**load_file(folder / "model.safetensors"), "v.weight": other}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        mixed = MatrixReader(checkpoint, scheme).rows([("w", 70, Span(0, 70)), ("v", 6, Span(2, 6))], SHAPE[1])
    assert isinstance(mixed, torch.Tensor) and torch.equal(mixed, torch.cat([exact, other[2:]]))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "w.weight_scale_inv or w.weight_scale is missing"),
        ({"w.weight_scale_inv": torch.ones(2, 5)}, r"has shape \[2, 5\].*fp8 in blocks of 32 x 32"),
    ],
    ids=["missing", "other shape"],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, tensors: Mapping[str, torch.Tensor], reason: str) -> None:
    save_file({"w.weight": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn), **tensors}, tmp_path / "model.safetensors")
    scheme = parse_quantization({"quantization_config": CONFIGS["block"]})
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint, pytest.raises(ModelError, match=reason):
        MatrixReader(checkpoint, scheme).columns("w", SHAPE, Span(0, 150))


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    codes = torch.zeros(SHAPE, dtype=torch.uint8)
    codes[3, 7] = 255
    save_file({"w.weight": codes.view(torch.float8_e4m3fn), "w.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    scheme = parse_quantization({"quantization_config": CONFIGS["tensor"]})
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, scheme)
        reader.columns("w", SHAPE, Span(8, 150))
        with pytest.raises(ModelError, match=r"tensor w.weight has a value that is not a number"):
            reader.rows([("w", SHAPE[0], Span(0, 4))], SHAPE[1])


def test_a_cut_block_keeps_one_scale(tmp_path: Path) -> None:
    """Blocks of 128 take 1.03 bytes per weight, and hardly more where a rank's inputs begin at any place."""
    compiled("native")
    shape = (128, 1024)
    save_file(
        {"w.weight": torch.ones(shape).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.rand(1, 8)},
        tmp_path / "model.safetensors",
    )
    scheme = parse_quantization({"quantization_config": {**CONFIGS["block"], "weight_block_size": [128, 128]}})
    with Checkpoint(tmp_path, torch.bfloat16, CPU) as checkpoint:
        for start, most in ((0, 1.0325), (341, 1.12)):
            part = MatrixReader(checkpoint, scheme).columns("w", shape, Span(start, shape[1]))
            assert isinstance(part, Fp8Weight)
            linear = make_linear(part, None, Kernels(compiled=True))
            assert linear.num_bytes < most * shape[0] * (shape[1] - start)
            x = torch.randn(2, shape[1] - start).bfloat16()
            expected = x.float() @ part.dequantize(torch.float32).t()
            torch.testing.assert_close(linear(x).float(), expected, rtol=0.01, atol=0.1)


def test_fp8_without_a_config_is_refused(tmp_path: Path) -> None:
    save_file({"w.weight": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint, pytest.raises(ModelError, match="stored as F8_E4M3"):
        MatrixReader(checkpoint, None).columns("w", SHAPE, Span(0, 150))


COMPRESSED: dict[str, Any] = CONFIGS["tensor"]


def weights(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return {**COMPRESSED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "hqq"}, "hqq is not supported"),
        ({"bits": 4}, "without quant_method"),
        ([4], "expected an object"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 e5m2 is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"block size \[128\] is not supported"),
        ({**COMPRESSED, "format": "naive-quantized"}, "compressed-tensors naive-quantized is not supported"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups without weights"),
        ({**COMPRESSED, "config_groups": {"group_0": {"weights": None}}}, "config_groups without weights"),
        (weights(num_bits=4), r"4 bits \(float\) by tensor are not supported"),
        (weights(type="int"), r"8 bits \(int\) by tensor are not supported"),
        (weights(strategy="group"), "by group are not supported"),
    ],
)
def test_another_scheme_is_refused_by_name(tmp_path: Path, config: Any, reason: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    raw |= {"intermediate_size": 96, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ModelError, match=reason):
        open_model(tmp_path)


def test_groups_of_several_block_sizes_are_refused() -> None:
    mixed = {**COMPRESSED["config_groups"], **CONFIGS["compressed block"]["config_groups"]}
    groups = {"a": mixed["group_0"], "b": COMPRESSED["config_groups"]["group_0"]}
    with pytest.raises(ModelError, match="several block sizes"):
        parse_quantization({"quantization_config": {**COMPRESSED, "config_groups": groups}})


def test_a_quantised_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    save_fp8(save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "fp8", tmp_path / "exact", "channel")
    with pytest.raises(ModelError, match="int4: the checkpoint is quantised already"):
        tokens(tmp_path / "fp8", 1, Kernels(precision="int4"))


@pytest.mark.parametrize("kernels", [PLAIN, Kernels(compiled=True)], ids=["torch", "compiled"])
@pytest.mark.parametrize(
    ("family", "groups"),
    [("qwen3", [(1, 1), (3, 1)]), ("deepseek_v3", [(1, 1), (2, 1), (1, 2)])],
    ids=["fused", "experts and latents through transformers"],
)
def test_blocks_give_the_tokens_of_transformers(
    tmp_path: Path, family: str, groups: list[tuple[int, int]], kernels: Kernels
) -> None:
    """Three ranks cut blocks."""
    save_fp8(save_tiny(tmp_path / "model", family), tmp_path / "fp8", tmp_path / "exact", "block")
    for ranks, stages in groups:
        outputs = generate(tmp_path / "fp8", [ranks * stages], Build(stages=stages, kernels=kernels))
        assert compare(reference(tmp_path / "exact", outputs), outputs).holds, (ranks, stages)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.norm.weight", torch.float8_e5m2),
        ("model.layers.1.mlp.experts.down_proj", torch.float8_e4m3fn),
        ("model.layers.1.mlp.experts.2.down_proj.weight", torch.float8_e5m2),
    ],
)
def test_codes_that_nothing_reads_are_refused(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Their scales would be left out. Experts may be stored in one tensor, or in a dtype that the scheme has not."""
    save_fp8(save_tiny(tmp_path / "model", "qwen2_moe"), tmp_path / "fp8", tmp_path / "exact", "block")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    experts = [part for part in tensors if ".layers.1.mlp.experts." in part and part.endswith("down_proj.weight")]
    exact = load_file(tmp_path / "exact" / "model.safetensors") | {
        "model.layers.1.mlp.experts.down_proj": torch.stack([tensors.pop(part).float() for part in experts])
    }
    tensors |= {part: exact[part] for part in experts if "experts.down_proj" not in name}
    save_file({**tensors, name: exact[name].to(dtype)}, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {name} is stored as F8_E[45]M[32]: its quantisation is not supported"):
        generate(tmp_path / "fp8", [1], Build(level="transformers"))


@pytest.mark.parametrize(
    ("family", "kind", "block", "most"),
    [
        ("llama", "block", (128, 128), 1.03),
        ("qwen2_moe", "block", (128, 128), 1.03),
        ("llama", "block", BLOCK, 1.125),
        ("llama", "channel", BLOCK, 1.05),
    ],
)
def test_weights_in_memory_take_the_bytes_of_the_file(
    tmp_path: Path, family: str, kind: Kind, block: tuple[int, int], most: float
) -> None:
    """Each output has a scale of 4 bytes for a block of inputs."""
    compiled("native")
    experts = {} if family == "llama" else {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    source = as_bf16(save_tiny(tmp_path / "model", family, hidden_size=256, intermediate_size=512, **experts))
    save_fp8(source, tmp_path / "fp8", tmp_path / "exact", kind, block)
    options = LoadOptions(dtype=torch.bfloat16, device=CPU, kernels=Kernels(compiled=True), positions=64)
    loaded = open_model(tmp_path / "fp8").load(SoloCollective(), options).num_bytes
    assert loaded <= most * sum(tensor.nbytes for tensor in load_file(tmp_path / "fp8" / "model.safetensors").values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_account_counts_every_weight_once(tmp_path: Path, precision: Literal["bf16", "fp8"], tied: bool) -> None:
    """With `fp8` the head is rounded too, and a tied embedding stays beside it."""
    folder = tmp_path / "fp8"
    save_fp8(save_tiny(tmp_path / "model", tie_word_embeddings=tied), folder, tmp_path / "exact", "block")
    options = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(precision=precision, triton=True), positions=64)
    model = open_model(folder).load(SoloCollective(), options)
    assert isinstance(model, Decoder) and isinstance(model.embedding.weight, torch.Tensor)
    linears = [linear for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    expected = sum(linear.num_bytes for linear in linears if linear is not None) + (2 * len(model.layers) + 1) * 64 * 4
    expected += model.embedding.weight.nbytes + (0 if tied and precision == "bf16" else model.head.num_bytes)
    assert model.num_bytes == expected
    dense = open_model(tmp_path / "exact").load(SoloCollective(), replace(options, kernels=PLAIN))
    assert model.num_bytes < dense.num_bytes


def test_a_gated_layer_of_fp8_is_exact() -> None:
    values = torch.randn(32, 16).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values=values, scales=torch.rand(32, 1), group=16, dtype=torch.float32)
    x, expected = torch.randn(1, 16), weight.dequantize(torch.float32)
    gates, ups = (x @ expected.t()).chunk(2, 1)
    for kernels in (Kernels(), Kernels(compiled=True), Kernels(triton=True)):
        gated = make_gated(weight, None, "silu", kernels)
        torch.testing.assert_close(gated(x), torch.nn.functional.silu(gates) * ups, rtol=1e-4, atol=1e-4)


def test_blocks_have_the_size_of_the_config() -> None:
    scheme = parse_quantization({"quantization_config": CONFIGS["block"]})
    assert isinstance(scheme, Fp8Scheme) and scheme.block == BLOCK and scheme.name == "fp8 in blocks of 32 x 32"
    assert parse_quantization({"quantization_config": None}) is None
