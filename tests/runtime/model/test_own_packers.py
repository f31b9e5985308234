"""Checkpoints that compressed-tensors and bitsandbytes pack give the tokens of the weights that these libraries dequantise.

Neither is a dependency: the tests are skipped without them. docs/models.md says how to run them.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx_runtime.model.linear.registry import Kernels
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix, and the weight that the library dequantises."""


def check_tokens(tmp_path: Path, config: dict[str, Any], pack: Callable[[Tensor], Packed]) -> None:
    """Compares tokens on one rank and two with those of `transformers` on the dequantised weights.

    Rows are a multiple of 64, without which bitsandbytes 0.50 dequantises wrong on a CPU.
    """
    source, folder, exact = save_tiny(tmp_path / "model", "qwen3", intermediate_size=128), tmp_path / "packed", tmp_path / "exact"
    for target in (folder, exact):
        shutil.copytree(source, target)
    stored, dequantised = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = dequantised[name] = tensor
        if re.search(r"proj\.weight$", name):
            del stored[name]
            parts, wide = pack(tensor)
            dequantised[name] = wide.float().contiguous()
            stored |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    save_file(dequantised, exact / "model.safetensors", {"format": "pt"})
    whole = {**json.loads((source / "config.json").read_text()), "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    for ranks in (1, 2):
        outputs = generate(folder, [ranks], Build(kernels=Kernels(compiled=True)))
        assert compare(reference(exact, outputs), outputs).holds, ranks


@pytest.mark.parametrize(
    "preset", ["W4A16", "W4A16_ASYM", "W8A16", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4"]
)
def test_presets_of_compressed_tensors_are_read(tmp_path: Path, preset: str) -> None:
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.strategy == "group":
        scheme.weights.group_size = 32  # of 128: the model is tiny
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)

    def pack(weight: Tensor) -> Packed:
        state = compressor.compress({"weight": weight, **parameters_of(weight, scheme.weights)}, scheme)
        dense = (
            exact_fp4(state, scheme.weights) if "nvfp4" in form.value else compressor.decompress(dict(state), scheme)["weight"]
        )
        return state | ({"input_scale": torch.ones(1)} if preset == "FP8" else {}), dense

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=["lm_head"], quantization_status="compressed"
    )
    fields = json.loads(config.model_dump_json())
    check_tokens(tmp_path, {**fields, "quant_method": "compressed-tensors", "version": library.__version__}, pack)


def exact_fp4(state: dict[str, Tensor], args: Any) -> Tensor:
    """Returns the weight without the rounding to bfloat16 of the library's compressor."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale = state["weight_packed"], state["weight_scale"].float()
    values = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    wide: Tensor = dequantize(values, scale, args=args, global_scale=state["weight_global_scale"])
    return wide


def parameters_of(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Returns scale and zero point as the library computes them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "block":
            (rows, columns), (height, width) = weight.shape, args.block_structure
            parts = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
            parts = parts.view(-(-rows // height), height, -(-columns // width), width).transpose(1, 2).flatten(2)
        case _:
            parts = weight.view(len(weight), -1, args.group_size)
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, found.get("weight_global_scale"))
    return found | {"weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_codes_of_bitsandbytes_are_read(tmp_path: Path, kind: str, is_nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes").functional

    def pack(weight: Tensor) -> Packed:
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested, blocksize=64)
        parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return {"weight": codes, **parts}, functional.dequantize_4bit(codes, state)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    check_tokens(tmp_path, {**config, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": is_nested}, pack)


def test_int8_of_bitsandbytes_is_read(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional

    def pack(weight: Tensor) -> Packed:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return {"weight": codes, "SCB": scales}, functional.int8_vectorwise_dequant(codes, scales)

    check_tokens(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, pack)
