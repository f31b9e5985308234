"""GGUF files whose weights are codes of 4 bits with a table of values (MXFP4, IQ4_NL, IQ4_XS), and gpt-oss, which uses them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.checkpoint.gguf.convert import convert, model_config
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.quantization import GgufScheme
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.linear.ggml import GgmlRows
from phalanx_runtime.model.linear.grouped import GroupedProduct
from phalanx_runtime.model.linear.integer import IntStack, IntWeight
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.stored.gguf import GgufReader
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.weights import Checkpoint
from tests.runtime.checkpoint.gguf_files import (
    OSS,
    SIZES,
    TABLES,
    YARN,
    TinyGguf,
    random_blocks,
    vocabulary,
    write_gpt_oss,
    write_model,
)
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny

Array = npt.NDArray[Any]
Kind = GGMLQuantizationType
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "up"),
    [(Kind.MXFP4, None), (Kind.MXFP4, Kind.Q8_0), pytest.param(Kind.IQ4_NL, None, marks=pytest.mark.slow)],
    ids=["mxfp4", "two formats", "iq4_nl"],
)
def test_gpt_oss_gives_the_tokens_of_transformers(tmp_path: Path, kind: Kind, up: Kind | None) -> None:
    """As the file has it, on ranks with columns of all experts or whole ones, and from the folder that `convert` writes."""
    compiled("native")
    source, exact = save_tiny(tmp_path / "model", "gpt_oss"), tmp_path / "exact"
    path = write_gpt_oss(source, exact, tmp_path / "tiny.gguf", kind, up=up)
    packed = locate(str(path), cache_dir=tmp_path / "cache").dir
    outputs = generate(packed, [1], Build(kernels=Kernels(compiled=True)))
    assert len({*map(tuple, outputs)}) > 3
    expected = reference(exact, outputs)
    assert compare(expected, outputs).holds
    for is_parallel in (False, True):
        build = Build(kernels=Kernels(compiled=True), has_parallel_experts=is_parallel)
        assert compare(expected, generate(packed, [2], build)).holds, is_parallel
    assert compare(expected, generate(packed, [1], Build())).holds, "without a compiler"
    convert(path, tmp_path / "converted")
    converted, numbers = load_file(tmp_path / "converted" / "model.safetensors"), load_file(exact / "model.safetensors")
    assert converted.keys() == numbers.keys()
    assert all(torch.equal(converted[name], values) for name, values in numbers.items())
    assert compare(reference(tmp_path / "converted", outputs), outputs).holds
    assert compare(expected, generate(tmp_path / "converted", [1], Build())).holds


def test_gpt_oss_takes_the_memory_of_the_file(tmp_path: Path) -> None:
    compiled("native")
    source = save_tiny(tmp_path / "model", "gpt_oss", hidden_size=256, intermediate_size=512)
    path = write_gpt_oss(source, tmp_path / "exact", tmp_path / "tiny.gguf")
    experts = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors if "_exps.weight" in tensor.name)
    options = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(compiled=True), positions=64)
    model = open_model(locate(str(path), cache_dir=tmp_path / "cache").dir).load(SoloCollective(), options)
    others = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors) - experts
    assert model.num_bytes - others <= 1.05 * experts


def without(path: Path, out: Path, *names: str) -> Path:
    """Writes a file of gpt-oss without these tensors."""
    tensors = [tensor for tensor in read_gguf(path).tensors if not tensor.name.endswith(names)]
    kept = {one.name: np.array(one.raw.view(np.float32) if one.quantization == Kind.F32 else one.raw) for one in tensors}
    formats = {one.name: one.quantization for one in tensors}
    extra: dict[str, object] = {f"gpt-oss.{key}": value for key, value in {**OSS, "expert_feed_forward_length": 96}.items()}
    return TinyGguf("gpt-oss", pre="gpt-4o", extra=extra, content=kept, formats=formats).write(out)


@pytest.mark.parametrize(
    ("names", "converting", "loading"),
    [
        (
            ["1.ffn_up_exps.weight"],
            "tensors of model.layers.1.mlp.experts.gate_up_proj do not fit",
            "layers.1.*0.up_proj.weight is missing",
        ),
        (
            ["1.ffn_down_exps.weight"],
            "no tensors of model.layers.1.mlp.experts.down_proj",
            "layers.1.*down_proj.weight is missing",
        ),
        (["1.ffn_down_exps.bias"], "no tensors of model.layers.1.mlp.experts.down_proj_bias", "down_proj.bias is missing"),
        (["attn_q.bias"], None, "layers.0.self_attn.q_proj.bias is missing"),
        (["attn_sinks.weight"], None, "layers.0.self_attn.sinks is missing"),
    ],
    ids=["ups", "downs", "biases", "attention biases", "sinks"],
)
def test_files_that_lack_a_tensor_are_refused(tmp_path: Path, names: list[str], converting: str | None, loading: str) -> None:
    whole = write_gpt_oss(save_tiny(tmp_path / "model", "gpt_oss"), tmp_path / "exact", tmp_path / "whole.gguf")
    lacking = without(whole, tmp_path / "lacking.gguf", *names)
    options = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(), positions=64)
    with pytest.raises(ModelError, match=loading):
        open_model(locate(str(lacking), cache_dir=tmp_path / "cache").dir).load(SoloCollective(), options)
    if converting is not None:
        with pytest.raises(ModelError, match=converting):
            convert(lacking, tmp_path / "converted")


def test_gpt_oss_files_are_refused_through_transformers(tmp_path: Path) -> None:
    path = write_gpt_oss(save_tiny(tmp_path / "model", "gpt_oss"), tmp_path / "exact", tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="only the fused decoder reads gpt-oss from a GGUF file"):
        open_model(locate(str(path), cache_dir=tmp_path / "cache").dir, "transformers")


def test_messages_do_not_end_a_turn_of_gpt_oss(tmp_path: Path) -> None:
    names = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    tokens = [*vocabulary()[0], *names]
    extra: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": tokens.index("<|end|>")}
    convert(TinyGguf(extra=extra).write(tmp_path / "tiny.gguf"), tmp_path / "out")
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [1, *(tokens.index(name) for name in names[2:])]


@pytest.mark.parametrize(("arch", "is_rounded"), [("qwen2", True), ("gpt-oss", False)])
def test_yarn_is_converted(tmp_path: Path, arch: str, *, is_rounded: bool) -> None:
    """llama.cpp's other models round the bounds of its bands to whole pairs, as `transformers` does."""
    oss = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "attention.sliding_window": 24}
    scaling = {**YARN, "yarn_beta_fast": 16.0, "yarn_ext_factor": -1.0, "yarn_log_multiplier": 0.0}
    fields = {**(oss if arch == "gpt-oss" else {}), **{f"rope.scaling.{key}": value for key, value in scaling.items()}}
    extra: dict[str, object] = {f"{arch}.{key}": value for key, value in fields.items()}
    rope = model_config(read_gguf(TinyGguf(arch, extra=extra).write(tmp_path / "tiny.gguf")))["rope_parameters"]
    assert rope == {
        "rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 1.0, "truncate": is_rounded,
    }  # fmt: skip
    extra[f"{arch}.rope.scaling.yarn_log_multiplier"] = 1.0
    with pytest.raises(ModelError, match="yarn_log_multiplier cannot be converted"):
        model_config(read_gguf(TinyGguf(arch, extra=extra).write(tmp_path / "other.gguf")))


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
def test_any_part_is_exact(tmp_path: Path, kind: Kind) -> None:
    path = write_model(tmp_path / "model.gguf", {}, kind, tied=False)
    folder, name, shape = locate(str(path), cache_dir=tmp_path / "cache").dir, "model.layers.0.mlp.down_proj", (512, 1024)
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        exact = checkpoint.part(f"{name}.weight", None)
        reader = MatrixReader(checkpoint, GgufScheme("GGUF", 0.5))
        assert reader.is_stored(name)
        for start, stop in [(0, 512), (1, 8), (17, 301), (40, 41), (128, 256)]:
            rows, columns = (
                reader.rows([(name, 512, Span(start, stop))] * 2, 1024),
                reader.columns(name, shape, Span(start, stop)),
            )
            assert isinstance(rows, IntWeight) and isinstance(columns, IntWeight)
            torch.testing.assert_close(rows.dequantize(torch.float32), exact[start:stop].repeat(2, 1), rtol=1e-6, atol=0)
            torch.testing.assert_close(columns.dequantize(torch.float32), exact[:, start:stop], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [*TABLES, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gpu_keeps_blocks(tmp_path: Path, kind: Kind) -> None:
    path = write_model(tmp_path / "model.gguf", {}, kind, tied=False)
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    with FakeTensorMode(), Checkpoint(folder, torch.bfloat16, torch.device("cuda")) as checkpoint:
        reader = GgufReader(checkpoint)
        assert reader.is_stored("model.layers.0.mlp.down_proj")
        assert reader.has_rows("model.embed_tokens", is_head=True) == (kind != Kind.MXFP4)


def test_parts_of_two_formats_are_side_by_side(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", {"ffn_up": Kind.Q6_K}, Kind.IQ4_XS)
    with Checkpoint(locate(str(path), cache_dir=tmp_path / "cache").dir, torch.float32, CPU) as checkpoint:
        parts = [(f"model.layers.0.mlp.{name}_proj", 1024, Span(0, 1024)) for name in ("gate", "up")]
        weight = MatrixReader(checkpoint, GgufScheme("GGUF", 0.5)).rows(parts, 512)
    assert isinstance(weight, IntStack) and [type(part) for part in weight.parts] == [IntWeight, GgmlWeight]


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
def test_loaded_weights_take_the_memory_of_the_file(tmp_path: Path, kind: Kind) -> None:
    """A head has its own format in real files, too: an embedding is tied to it only in formats of the other kernel."""
    compiled("native")
    path = write_model(tmp_path / "model.gguf", {}, kind, tied=False)
    stored = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors)
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    for dtype in (torch.float32, torch.bfloat16):
        options = LoadOptions(dtype=dtype, device=CPU, kernels=Kernels(compiled=True), positions=64)
        model = open_model(folder).load(SoloCollective(), options)
        assert isinstance(model, Decoder) and model.num_bytes <= 1.05 * stored
        assert isinstance(model.embedding.weight, GgmlRows)
        linears = [model.head, *(one for layer in model.layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down))]
        for linear in linears:
            assert isinstance(linear, NativeLinear | NativeGated) and isinstance(linear.blocks, GroupedProduct)


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
def test_tokens_equal_those_of_the_converted_checkpoint(tmp_path: Path, kind: Kind, tied: bool) -> None:
    compiled("native")
    path = write_model(tmp_path / "model.gguf", {}, kind, tied=tied)
    convert(path, tmp_path / "converted")
    outputs = generate(tmp_path / "converted", [1], Build())
    expected = reference(tmp_path / "converted", outputs)
    folder, kernels = locate(str(path), cache_dir=tmp_path / "cache").dir, Kernels(compiled=True)
    assert tied or len({*map(tuple, outputs)}) > 3
    for ranks, stages in [(1, 1), (2, 1), (1, 2)]:
        found = generate(folder, [ranks * stages], Build(stages=stages, kernels=kernels))
        assert compare(expected, found).holds, (ranks, stages)
    assert compare(expected, generate(folder, [1], Build())).holds, "without a compiler"
    assert compare(expected, generate(folder, [1], Build(kernels=kernels, level="transformers"))).holds


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_rounding_at_load_takes_dequantised_weights(tmp_path: Path, precision: Any) -> None:
    path = write_model(tmp_path / "model.gguf", {}, Kind.IQ4_NL)
    convert(path, tmp_path / "converted")
    folder, build = locate(str(path), cache_dir=tmp_path / "cache").dir, Build(kernels=Kernels(precision=precision))
    assert generate(folder, [1], build) == generate(tmp_path / "converted", [1], build)


def spoil_first(scale: bytes) -> Callable[[Array], Array]:
    def spoil(raw: Array) -> Array:
        raw[0, : len(scale)] = np.frombuffer(scale, np.uint8)
        return raw

    return spoil


@pytest.mark.parametrize(
    ("kind", "scale"),
    [(Kind.MXFP4, b"\xff"), (Kind.IQ4_NL, b"\x00\x7e"), (Kind.IQ4_XS, b"\x00\x7c")],
    ids=lambda value: str(value),
)
def test_a_scale_that_is_not_a_number_is_refused(tmp_path: Path, kind: Kind, scale: bytes) -> None:
    content: dict[str, Any] = {
        "token_embd.weight": random_blocks(kind, (320, 512), 1),
        "output_norm.weight": np.ones(512, np.float32),
    }
    raw = random_blocks(kind, (512, 512), 2)
    content["blk.0.attn_q.weight"] = spoil_first(scale)(raw)
    extra: dict[str, object] = {f"llama.{key}": value for key, value in SIZES.items()}
    path = TinyGguf(quantization=kind, extra=extra, content=content).write(tmp_path / "model.gguf")
    with Checkpoint(locate(str(path), cache_dir=tmp_path / "cache").dir, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, GgufScheme("GGUF", 0.5))
        with pytest.raises(ModelError, match=r"q_proj.weight has a scale that is not a number"):
            reader.rows([("model.layers.0.self_attn.q_proj", 512, Span(0, 512))], 512)
    with pytest.raises(ModelError, match=r"q_proj.weight has a number that is not finite"):
        convert(path, tmp_path / "converted")
