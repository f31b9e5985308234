"""`phalanx-runtime quantize`: rounds the linears of a model, writes the checkpoint and measures perplexity before and after."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from phalanx_runtime.checkpoint.folder import make_once, remove_lock, weight_files
from phalanx_runtime.checkpoint.quantization import GgufScheme
from phalanx_runtime.checkpoint.vision import read_vision
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.commands import QuantizeScheme, QuantizeSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.registry import Kernels, choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import FusedFolder, open_model
from phalanx_runtime.model.weights import Checkpoint
from phalanx_runtime.quantizing.layers import StoredLinear, choose_group, linear_names, round_layers
from phalanx_runtime.quantizing.rounding import Grid
from phalanx_runtime.quantizing.texts import Texts, perplexity, read_texts, write_texts
from phalanx_runtime.quantizing.write import write_checkpoint

BITS: Mapping[QuantizeScheme, int] = {"w4a16": 4, "w4a8": 4, "w8a16": 8, "w8a8": 8}
Show = Callable[[str], None]
"""Receives what is done, in words."""
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What quantisation saves and costs."""

    num_layers: int
    bytes_before: int
    bytes_after: int
    """Of the weight files."""
    perplexity_before: float
    perplexity_after: float
    """As it is served on this machine."""
    num_held_out: int
    """Tokens that the perplexity is measured with."""


@torch.inference_mode()
def quantize(spec: QuantizeSpec, device: torch.device, show: Show) -> Report:
    """Writes the quantised checkpoint. `show` receives the progress. Raises ModelError, Unsupported."""
    source, out = Path(spec.model_dir), Path(spec.out)
    folder = _open(source)
    if out.exists():
        raise ModelError(f"{out} exists already: name a folder to make")
    model, form = _load(folder, spec.dtype, device, is_plain=True)
    grid = _grid(spec.scheme, model)
    texts = _texts(spec, model, form, show)
    before = perplexity(model, form, texts.held_out)
    with Checkpoint(source, torch.float32, torch.device("cpu")) as checkpoint:
        linears = _round(model, form, texts, grid, dtype=_scale_dtype(checkpoint, folder.config), has_head=spec.head, show=show)
        write = partial(
            write_checkpoint, checkpoint, source, linears=linears, grid=grid, rounds_inputs=spec.scheme in ("w4a8", "w8a8")
        )
        make_once(out, write, threading.Event())
        remove_lock(out)
    del linears, write  # their memory is for the served model
    num_layers = len(model.layers)
    del model
    served, form = _load(_open(out, is_quantised=True), spec.dtype, device)
    return Report(
        num_layers=num_layers,
        bytes_before=_num_bytes(source),
        bytes_after=_num_bytes(out),
        perplexity_before=before,
        perplexity_after=perplexity(served, form, texts.held_out),
        num_held_out=texts.num_held_out,
    )


def _open(source: Path, *, is_quantised: bool = False) -> FusedFolder:
    folder = open_model(source, "fused")
    assert isinstance(folder, FusedFolder)
    config = folder.config
    if isinstance(config.quantization, GgufScheme) and not is_quantised:
        raise ModelError(f"{source} is {config.quantization.name}: convert the file first (phalanx-runtime convert)")
    if config.quantization is not None and not is_quantised:
        raise ModelError(f"{source} is quantised already: {config.quantization.name}")
    if not is_quantised:
        if read_vision(source) is not None:
            raise ModelError(f"{source}: models that take images are not quantised")
        with Checkpoint(source, torch.float32, torch.device("cpu")) as checkpoint:
            _check_stored(checkpoint, config)
    return folder


def _check_stored(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ModelError if a linear is not stored as a matrix of its own."""
    for names in linear_names(config):
        for own in names:
            for name, _ in own:
                if not checkpoint.has(f"{name}.weight"):
                    raise ModelError(f"tensor {name}.weight is missing: experts in one tensor for all are not quantised")


def _load(folder: FusedFolder, dtype_name: str, device: torch.device, *, is_plain: bool = False) -> tuple[Decoder, LoadOptions]:
    """Loads the model as it is served, or with plain linears."""
    processor = read_processor()
    dtype = choose_dtype(dtype_name, folder.dtype, device, processor)
    kernels = Kernels() if is_plain else choose_kernels(dtype, device, processor, 0, 1)
    form = LoadOptions(dtype=dtype, device=device, kernels=kernels, positions=folder.max_position)
    model = folder.load(SoloCollective(), form)
    assert isinstance(model, Decoder)
    return model, form


def _grid(scheme: QuantizeScheme, model: Decoder) -> Grid:
    if BITS[scheme] == 8:
        return Grid(8, None)
    config = model.config
    widths = [config.hidden_size, config.num_heads * config.head_dim]
    if config.mixture is None or not all(config.mixture.layers):
        widths.append(config.intermediate_size)
    if config.mixture is not None:
        widths.append(config.mixture.intermediate_size)
    return Grid(BITS[scheme], choose_group(widths))


def _texts(spec: QuantizeSpec, model: Decoder, form: LoadOptions, show: Show) -> Texts:
    if spec.calibration is not None:
        return read_texts(Path(spec.calibration), Path(spec.model_dir), spec.tokens, model.positions)
    for written, texts in write_texts(model, form, Path(spec.model_dir), spec.tokens):
        show(f"writing text to calibrate on: {written:,} of {spec.tokens:,} tokens")
        if texts is not None:
            return texts
    raise AssertionError("the model writes until it has texts")


def _round(
    model: Decoder, form: LoadOptions, texts: Texts, grid: Grid, *, dtype: torch.dtype, has_head: bool, show: Show
) -> list[StoredLinear]:
    linears: list[StoredLinear] = []
    count = len(model.layers)
    for index, found in enumerate(round_layers(model, form, texts.calibration, grid, dtype, has_head=has_head)):
        linears += found
        show(f"rounding layer {index + 1} of {count}" if index < count else "rounding the head")
    return linears


def _scale_dtype(checkpoint: Checkpoint, config: ModelConfig) -> torch.dtype:
    """Returns the dtype of the weights."""
    name = linear_names(config)[0][0][0][0]
    return _STORED.get(checkpoint.stored_dtype(f"{name}.weight"), torch.float32)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))
