"""MXFP4, NVFP4 and bitsandbytes give the tokens of their dequantised weights, in the memory of their files."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.checkpoint.quantization import parse_quantization
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.weights import Checkpoint
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import as_bf16, generate, reference
from tests.runtime.model.table_checkpoints import KINDS, MXFP4, NVFP4, bits4, pack_mxfp4, save_tables
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
SHAPE = (72, 96)
COMPILED = Build(kernels=Kernels(compiled=True))
SCHEMES = {
    "nvfp4": "NVFP4, 4 bits in groups of 16 inputs",
    "nf4": "bitsandbytes nf4, 4 bits",
    "nf4 nested": "bitsandbytes nf4, 4 bits, double quantised",
    "nf4 across rows": "bitsandbytes nf4, 4 bits",
    "bnb fp4": "bitsandbytes fp4, 4 bits",
    "int8": "bitsandbytes, 8 bits with scales per output",
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_transformers(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """On one rank, two ranks and two stages; the log names the scheme."""
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    save_tables(save_tiny(tmp_path / "model", "qwen3"), folder, exact, *KINDS[name])
    with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
        for ranks, build in [(1, Build()), (1, COMPILED), (2, COMPILED), (2, replace(COMPILED, stages=2))]:
            outputs = generate(folder, [ranks], build)
            assert compare(reference(exact, outputs), outputs).holds, (ranks, build.stages, build.kernels)
    found = {vars(record)["scheme"] for record in caplog.records if record.message == "quantised checkpoint"}
    assert found == {SCHEMES[name]}


@pytest.mark.parametrize("name", ["nvfp4", "nf4 nested"])
def test_models_of_transformers_keep_their_codes(tmp_path: Path, name: str) -> None:
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    save_tables(save_tiny(tmp_path / "model", "qwen2_moe"), folder, exact, *KINDS[name])
    for ranks in (1, 2):
        outputs = generate(folder, [ranks], replace(COMPILED, level="transformers"))
        assert compare(reference(exact, outputs), outputs).holds, ranks


def test_mxfp4_is_refused_through_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    save_tables(save_tiny(tmp_path / "model", "gpt_oss"), folder, tmp_path / "exact", MXFP4, pack_mxfp4)
    with pytest.raises(ModelError, match="only the fused decoder loads MXFP4"):
        open_model(folder, "transformers")


@pytest.mark.parametrize("is_parallel", [False, True], ids=["columns", "whole experts"])
def test_experts_of_gpt_oss_keep_their_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_parallel: bool) -> None:
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    save_tables(save_tiny(tmp_path / "model", "gpt_oss"), folder, exact, MXFP4, pack_mxfp4)
    build = Build(kernels=Kernels(compiled=True), has_parallel_experts=is_parallel)
    for ranks, stages in ((1, 1), (2, 1), (2, 2), (4, 2)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
            outputs = generate(folder, [ranks], replace(build, stages=stages))
        assert compare(reference(exact, outputs), outputs).holds, (ranks, stages)
        found = [vars(record)["loaded_as"] for record in caplog.records if record.message == "quantised checkpoint"]
        assert found == ["4 bits"] * ranks


@pytest.mark.parametrize("name", KINDS)
def test_any_part_is_exact(tmp_path: Path, name: str) -> None:
    config, pack = KINDS[name]
    tensors, exact = pack(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
    save_file({f"w.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, parse_quantization({"quantization_config": config}))
        for start, stop in [(0, 72), (1, 8), (17, 71), (40, 41)]:
            rows, columns = reader.rows([("w", 72, Span(start, stop))] * 2, 96), reader.columns("w", SHAPE, Span(start, stop))
            assert isinstance(rows, IntWeight) and isinstance(columns, IntWeight)
            torch.testing.assert_close(rows.dequantize(torch.float32), exact[start:stop].repeat(2, 1), rtol=1e-6, atol=0)
            torch.testing.assert_close(columns.dequantize(torch.float32), exact[:, start:stop], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "name", "most"),
    [
        ("qwen3", "nvfp4", 1.05),
        ("qwen3", "nf4", 1.05),
        ("qwen3", "nf4 nested", 1.05),
        ("qwen3", "int8", 1.05),
        ("gpt_oss", "mxfp4", 1.05),
    ],
    ids=str,
)
def test_loaded_weights_take_the_memory_of_the_file(tmp_path: Path, family: str, name: str, most: float) -> None:
    compiled("native")
    folder = tmp_path / "packed"
    source = as_bf16(save_tiny(tmp_path / "model", family, hidden_size=256, intermediate_size=512, num_hidden_layers=1))
    save_tables(source, folder, tmp_path / "exact", *((MXFP4, pack_mxfp4) if name == "mxfp4" else KINDS[name]))
    options = LoadOptions(dtype=torch.bfloat16, device=CPU, kernels=Kernels(compiled=True), positions=64)
    loaded = open_model(folder).load(SoloCollective(), options).num_bytes
    assert loaded <= most * sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("nvfp4", {"weight_scale": torch.ones(72, 5)}, r"w.weight_scale has shape \[72, 5\]; NVFP4, .* implies \[72, 6\]"),
        ("nvfp4", {"weight_global_scale": None}, "tensor w.weight_global_scale is missing"),
        (
            "nvfp4",
            {"weight_scale": torch.full((72, 6), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)},
            "w.weight_scale has a scale that is not a number",
        ),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "w.weight_global_scale is 0.0; expected a number above 0"),
        ("nvfp4", {"weight_global_scale": torch.tensor([float("nan")])}, "w.weight_global_scale is nan"),
        ("nvfp4", {"weight_global_scale": torch.tensor([float("inf")])}, "w.weight_global_scale is inf"),
        ("nf4", {"weight.absmax": torch.full((108,), float("inf"))}, "w.weight.absmax has a scale that is not a number"),
        ("nf4 nested", {"weight.nested_absmax": torch.full((1,), float("nan"))}, "w.weight.absmax has a scale that is not"),
        ("nf4", {"weight.absmax": torch.ones(108, dtype=torch.uint8)}, "w.weight.absmax is stored as U8"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "is no state of bitsandbytes"),
        ("int8", {"SCB": torch.ones(71)}, r"tensor w.SCB has shape \[71\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str, change: dict[str, Any], reason: str) -> None:
    config, pack = KINDS[name]
    tensors = {f"w.{suffix}": part for suffix, part in (pack(torch.randn(SHAPE))[0] | change).items() if part is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint, pytest.raises(ModelError, match=reason):
        MatrixReader(checkpoint, parse_quantization({"quantization_config": config})).columns("w", SHAPE, Span(0, 96))


def test_other_kinds_are_refused_by_name() -> None:
    group = NVFP4["config_groups"]["group_0"]  # type: ignore[index]
    wide = {**NVFP4, "config_groups": {"group_0": {**group, "weights": {**group["weights"], "group_size": 32}}}}
    cases: dict[str, dict[str, Any]] = {
        "nvfp4-pack-quantized of 4 bits (float) by tensor_group of 32 inputs is not supported": wide,
        "bitsandbytes 'int4' is not supported: use load_in_8bit, or load_in_4bit with nf4 or fp4": bits4(
            bnb_4bit_quant_type="int4"
        ),
        "bnb_4bit_quant_storage 'bfloat16' is not supported: use uint8": bits4(
            bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"
        ),
    }
    for reason, config in cases.items():
        with pytest.raises(ModelError, match=re.escape(reason)):
            parse_quantization({"quantization_config": config})
