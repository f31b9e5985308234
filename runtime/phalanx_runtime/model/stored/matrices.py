"""Reads parts of linear weights as checkpoints store them: in a float dtype, in fp8 with its scales, in codes, or as in GGUF."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.quantization import Fp8Scheme, GgufScheme, Scheme
from phalanx_runtime.checkpoint.schemes.integers import IntScheme
from phalanx_runtime.checkpoint.schemes.tables import TableScheme
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.ggml.weight import GgmlWeight, join_ggml
from phalanx_runtime.model.linear.integer import IntStack, IntWeight, join
from phalanx_runtime.model.linear.packed.weight import FP8, Fp8Weight
from phalanx_runtime.model.linear.registry import Kernels, Weight, keeps_codes, keeps_fp8, keeps_ggml
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.stored.gguf import GgufReader
from phalanx_runtime.model.stored.integers import IntegerReader
from phalanx_runtime.model.stored.tables import TableReader
from phalanx_runtime.model.weights import FP8 as STORED_FP8
from phalanx_runtime.model.weights import Checkpoint

log = logging.getLogger(__name__)

Rows = tuple[str, int, Span]
"""Name of a linear, its outputs, and the outputs to read."""
Part = Tensor | Fp8Weight | IntWeight | GgmlWeight


def check_scheme(scheme: Scheme, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """Logs the scheme, and how its weights are loaded. Raises ModelError for kernels that would quantise them again."""
    if isinstance(scheme, GgufScheme):
        kept = "in the file's formats" if keeps_ggml(device, dtype) else f"MXFP4 in 4 bits, others {dtype}"
        log.info("GGUF file", extra={"scheme": scheme.name, "loaded_as": kept if kernels.precision == "bf16" else str(dtype)})
        return
    is_fp8 = isinstance(scheme, Fp8Scheme)
    if kernels.precision not in (("bf16", "fp8") if is_fp8 else ("bf16",)):
        raise ModelError(f"quantization {kernels.precision}: the checkpoint is quantised already, {scheme.name}")
    if isinstance(scheme, Fp8Scheme):
        weights = "fp8" if keeps_fp8(dtype, device, kernels) else str(dtype)
    else:
        weights = _layout_of(scheme, dtype, keeps_codes(device), kernels)
    log.info("quantised checkpoint", extra={"scheme": scheme.name, "loaded_as": weights})


def _layout_of(scheme: IntScheme | TableScheme, dtype: torch.dtype, keeps_all: bool, kernels: Kernels) -> str:
    """Returns how codes are loaded. On a GPU the numbers of each linear decide, too: see `pack_codes`."""
    has_gpu_format = scheme.has_gpu_format if isinstance(scheme, IntScheme) else True
    if keeps_all or (kernels.triton and has_gpu_format):
        return f"{scheme.bits} bits"
    return str(dtype)


class MatrixReader:
    """Weights are quantised where the checkpoint stores them so: lists of exceptions in its config are not read."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme | None) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme if isinstance(scheme, Fp8Scheme) else None
        self._codes: IntegerReader | TableReader | GgufReader | None = None
        if isinstance(scheme, IntScheme):
            self._codes = IntegerReader(checkpoint, scheme)
        elif isinstance(scheme, TableScheme):
            self._codes = TableReader(checkpoint, scheme)
        elif isinstance(scheme, GgufScheme):
            self._codes = GgufReader(checkpoint)

    def is_stored(self, name: str) -> bool:
        """Whether the linear is stored quantised."""
        if self._codes is not None:
            return self._codes.is_stored(name)
        return self._checkpoint.has(name + ".weight") and self._scheme_of(name) is not None

    def rows(self, parts: Sequence[Rows], inputs: int) -> Weight:
        """Returns the outputs of several linears, one above the other. Raises ModelError."""
        return _stack([self._rows(name, (outputs, inputs), span) for name, outputs, span in parts])

    def columns(self, name: str, shape: tuple[int, int], span: Span) -> Weight:
        """Returns inputs of a linear. Blocks that `span` cuts become smaller groups with equal scales. Raises ModelError."""
        if self._codes is not None and self._codes.is_stored(name):
            return self._codes.read(name, shape, Span(0, shape[0]), span)
        scheme = self._scheme_of(name)
        if scheme is None:
            return self._checkpoint.columns(name + ".weight", shape, span)
        values = self._checkpoint.columns(name + ".weight", shape, span, FP8)
        scales, group = self._scales(name, shape, scheme), shape[1]
        if scheme.block is not None:
            size = scheme.block[1]
            group = math.gcd(size, span.start)
            scales = scales[:, torch.arange(span.start, span.stop, group, device=scales.device) // size]
        return self._weight(name, values, scales, group)

    def _rows(self, name: str, shape: tuple[int, int], span: Span) -> Part:
        if self._codes is not None and self._codes.is_stored(name):
            return self._codes.read(name, shape, span, Span(0, shape[1]))
        scheme = self._scheme_of(name)
        if scheme is None:
            return self._checkpoint.rows(name + ".weight", shape, span)
        values = self._checkpoint.rows(name + ".weight", shape, span, FP8)
        group = shape[1] if scheme.block is None else scheme.block[1]
        return self._weight(name, values, self._scales(name, shape, scheme)[span.start : span.stop], group)

    def _scheme_of(self, name: str) -> Fp8Scheme | None:
        if self._scheme is None or self._checkpoint.stored_dtype(name + ".weight") != STORED_FP8:
            return None
        return self._scheme

    def _weight(self, name: str, values: Tensor, scales: Tensor, group: int) -> Fp8Weight:
        """Raises ModelError for a value that is not a number: the kernel of CPUs knows none."""
        if bool((values.view(torch.uint8) & 127 == 127).any()):
            raise ModelError(f"tensor {name}.weight has a value that is not a number")
        return Fp8Weight(values=values, scales=scales.contiguous(), group=group, dtype=self._checkpoint.dtype)

    def _scales(self, name: str, shape: tuple[int, int], scheme: Fp8Scheme) -> Tensor:
        """Returns fp32 scales of the whole weight, [outputs, blocks of inputs]."""
        names = [f"{name}.{suffix}" for suffix in scheme.scale_names]
        found = next((full for full in names if self._checkpoint.has(full)), None)
        if found is None:
            raise ModelError(f"tensor {' or '.join(names)} is missing: {name}.weight is stored in fp8")
        scales = self._checkpoint.part(found, None).to(self._checkpoint.device, torch.float32, copy=True)
        (outputs, inputs), block = shape, scheme.block
        if block is None and scales.numel() in (1, outputs):
            return scales.reshape(-1, 1).expand(outputs, 1)
        if block is not None and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
            return scales.repeat_interleave(block[0], 0)[:outputs]
        raise ModelError(f"tensor {found} has shape {list(scales.shape)}, which does not fit {scheme.name} of {list(shape)}")


def _stack(parts: Sequence[Part]) -> Weight:
    """Joins along the outputs; a mix with fp8 is dequantised."""
    packed = [part for part in parts if isinstance(part, GgmlWeight)]
    if packed:
        is_whole = len(packed) == len(parts)
        return join_ggml(packed) if is_whole else IntStack(tuple(part for part in parts if not isinstance(part, Fp8Weight)))
    integers = [part for part in parts if isinstance(part, IntWeight)]
    if integers:
        joined = join(integers) if len(integers) == len(parts) else None
        return joined or IntStack(tuple(part for part in parts if not isinstance(part, Fp8Weight)))
    quantised = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(quantised) < len(parts):
        return torch.cat([part if isinstance(part, Tensor) else part.dequantize(part.dtype) for part in parts])
    first = quantised[0]
    values, scales = (
        torch.cat(tensors) for tensors in ([part.values for part in quantised], [part.scales for part in quantised])
    )
    return Fp8Weight(values=values, scales=scales, group=first.group, dtype=first.dtype)
