"""GGUF files that are read as they are: what stays packed, its memory, and parts equal to those of the converted checkpoint."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from phalanx_runtime.checkpoint.folder import GGUF_FILE
from phalanx_runtime.checkpoint.gguf.convert import convert
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.checkpoint.quantization import GgufScheme, parse_quantization
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.linear.ggml import GgmlProduct, GgmlRows
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.weights import Checkpoint
from phalanx_runtime.progress import WeightProgress
from tests.runtime.checkpoint.gguf_files import TinyGguf, write_model
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build

Kind = GGMLQuantizationType
CPU = torch.device("cpu")


MIXES = {
    "Q4_K_M": ({"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K, "output": Kind.Q6_K}, Kind.Q4_K),
    "Q8_0": ({}, Kind.Q8_0),
    "Q2_K": ({"attn_v": Kind.Q3_K, "token_embd": Kind.Q5_0, "output": Kind.Q6_K}, Kind.Q2_K),
    "gate": ({"ffn_gate": Kind.Q5_1}, Kind.Q5_K),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MIXES)
def test_loaded_weights_take_the_memory_of_the_file(tmp_path: Path, name: str, tied: bool) -> None:
    compiled("native")
    path = write_model(tmp_path / "model.gguf", *MIXES[name], tied=tied)
    stored = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors)
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    for dtype in (torch.float32, torch.bfloat16):
        options = LoadOptions(dtype=dtype, device=CPU, kernels=Kernels(compiled=True), positions=64)
        model = open_model(folder).load(SoloCollective(), options)
        assert isinstance(model, Decoder) and model.num_bytes <= 1.05 * stored
        assert isinstance(model.embedding.weight, GgmlRows) and is_packed(model.head)
        for layer in model.layers:
            gated = layer.gate_up if name != "gate" else getattr(layer.gate_up, "linear", None)
            assert all(map(is_packed, (layer.qkv, layer.o, gated, layer.down)))


def is_packed(linear: object) -> bool:
    return isinstance(linear, NativeLinear | NativeGated) and isinstance(linear.blocks, GgmlProduct)


@pytest.mark.parametrize("name", MIXES)
def test_tokens_equal_those_of_the_converted_checkpoint(tmp_path: Path, name: str) -> None:
    compiled("native")
    path = write_model(tmp_path / "model.gguf", *MIXES[name], tied=name != "gate")
    convert(path, tmp_path / "converted")
    expected = reference(tmp_path / "converted", generate(tmp_path / "converted", [1], Build()))
    folder, kernels = locate(str(path), cache_dir=tmp_path / "cache").dir, Kernels(compiled=True)
    for ranks, stages in [(1, 1), (2, 1), (1, 2)]:
        outputs = generate(folder, [ranks * stages], Build(stages=stages, kernels=kernels))
        assert compare(expected, outputs).holds, (ranks, stages)
    assert compare(expected, generate(folder, [1], Build())).holds, "without a compiler"


def test_parts_equal_those_of_the_converted_checkpoint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", *MIXES["Q4_K_M"], tied=False)
    convert(path, tmp_path / "converted")
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    with Checkpoint(folder, torch.float32, CPU) as packed, Checkpoint(tmp_path / "converted", torch.float32, CPU) as plain:
        assert sorted(packed.names()) == sorted(plain.names())
        for name in plain.names():
            shape = plain.shape(name)
            assert packed.shape(name) == shape and packed.stored_dtype(name) == plain.stored_dtype(name) == "F32"
            assert torch.equal(packed.part(name, None), plain.part(name, None))
            if len(shape) == 2:
                size, rows, columns = (shape[0], shape[1]), Span(3, 77), Span(5, 300)
                assert torch.equal(packed.rows(name, size, rows), plain.rows(name, size, rows))
                assert torch.equal(packed.columns(name, size, columns), plain.columns(name, size, columns))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_progress_counts_bytes_of_the_file(tmp_path: Path, precision: Literal["bf16", "int8"]) -> None:
    """Of tensors that stay packed, and of those that are dequantised."""
    path = write_model(tmp_path / "model.gguf", *MIXES["gate"], tied=False)
    stored = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors)
    progress, kernels = WeightProgress(), Kernels(precision=precision)
    options = LoadOptions(dtype=torch.float32, device=CPU, kernels=kernels, positions=64, progress=progress)
    open_model(locate(str(path), cache_dir=tmp_path / "cache").dir).load(SoloCollective(), options)
    assert progress.done_bytes == stored < progress.total_bytes == path.stat().st_size


def test_biases_have_the_order_of_their_rows(tmp_path: Path) -> None:
    """Llama's queries and keys are interleaved, with their biases."""
    content: dict[str, Any] = {"token_embd.weight": np.ones((269, 64), np.float32), "output_norm.weight": np.ones(64, np.float32)}
    for name, size in (("attn_q", 64), ("attn_k", 32)):
        numbers = np.arange(size, dtype=np.float32)
        content |= {f"blk.0.{name}.weight": numbers[:, None].repeat(64, 1), f"blk.0.{name}.bias": numbers}
    path = TinyGguf(content=content).write(tmp_path / "model.gguf")
    convert(path, tmp_path / "converted")
    for folder in (locate(str(path), cache_dir=tmp_path / "cache").dir, tmp_path / "converted"):
        with Checkpoint(folder, torch.float32, CPU) as checkpoint:
            for name, size in (("q_proj", 64), ("k_proj", 32)):
                stem, part = f"model.layers.0.self_attn.{name}", Span(3, 21)
                rows = checkpoint.rows(f"{stem}.weight", (size, 64), part)[:, 0]
                assert rows.tolist()[:6] == [6, 8, 10, 12, 14, 1]
                assert torch.equal(checkpoint.vector(f"{stem}.bias", size, part), rows)


def test_rounding_at_load_takes_dequantised_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", *MIXES["Q8_0"])
    convert(path, tmp_path / "converted")
    folder, build = locate(str(path), cache_dir=tmp_path / "cache").dir, Build(kernels=Kernels(precision="int8"))
    assert generate(folder, [1], build) == generate(tmp_path / "converted", [1], build)


def test_transformers_compute_with_dequantised_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", *MIXES["Q4_K_M"])
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    convert(path, tmp_path / "converted")
    outputs = generate(folder, [1], Build(level="transformers", kernels=Kernels(compiled=True)))
    assert compare(reference(tmp_path / "converted", outputs), outputs).holds


def test_hash_differs_by_content(tmp_path: Path) -> None:
    hashes = set()
    for name, kind in (("a", Kind.Q8_0), ("b", Kind.Q4_0)):
        path = write_model(tmp_path / f"{name}.gguf", {}, kind)
        folder = locate(str(path), cache_dir=tmp_path / "cache").dir
        hashes |= {model_hash(folder, "float32", None), model_hash(folder, "float32", None)}
    assert len(hashes) == 2


def test_scheme_names_the_formats(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", *MIXES["Q4_K_M"])
    folder = locate(str(path), cache_dir=tmp_path / "cache").dir
    scheme = parse_quantization(json.loads((folder / "config.json").read_text()))
    assert isinstance(scheme, GgufScheme) and scheme.name == "GGUF, Q4_K, Q6_K"
    assert 4.5 / 8 < scheme.bytes_per_weight < 6.6 / 8 and (folder / GGUF_FILE).is_symlink()
    with pytest.raises(ModelError, match="gguf without formats and bytes_per_weight"):
        parse_quantization({"quantization_config": {"quant_method": "gguf"}})
