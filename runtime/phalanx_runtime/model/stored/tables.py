"""Reads parts of linear weights that a checkpoint stores in codes of 4 bits with a table of values.

    layout        codes                                               scales
    mxfp4         blocks [experts, out, groups, 16], low field first  scales [experts, out, groups], e8m0
    nvfp4         weight_packed [out, in / 2], low field first        weight_scale [out, in / 16], e4m3, over weight_global_scale
    bitsandbytes  weight [out * in / 2, 1], high field first          absmax of each `blocksize` weights, row after row

bitsandbytes stores values and sizes in `quant_map` and `quant_state`, and with double quantisation absmax in codes of 8 bits.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.tables import E2M1, TableScheme
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.nested import NestedScales, find_nested
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import FP8 as STORED_FP8
from phalanx_runtime.model.weights import Checkpoint

MX_GROUP, NV_GROUP = 32, 16
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


def table_weight(
    checkpoint: Checkpoint,
    codes: Tensor,
    scales: Tensor,
    groups: Tensor,
    table: Tensor,
    *,
    factors: Tensor | None = None,
    nested: NestedScales | None = None,
) -> IntWeight:
    """Returns a weight of codes on the device of the checkpoint. Arguments as the fields of `IntWeight`."""
    device = checkpoint.device
    if nested is not None and device.type != "cpu":  # whose kernels read plain scales
        scales, nested = nested.expand(scales), None
    return IntWeight(
        codes=codes.contiguous().to(device),
        scales=scales.contiguous().to(device),
        zeros=None,
        groups=groups.to(device),
        bits=4,
        dtype=checkpoint.dtype,
        table=table.to(device),
        factors=None if factors is None else factors.to(device),
        nested=nested,
    )


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads weights of one scheme. A linear has codes if they are stored: lists of exceptions are not read."""

    checkpoint: Checkpoint
    scheme: TableScheme

    def is_stored(self, name: str) -> bool:
        """Whether the linear is stored in codes."""
        if self.scheme.layout == "bitsandbytes":
            return self._state_name(name) is not None
        return self.scheme.layout == "nvfp4" and self.checkpoint.has(f"{name}.weight_packed")

    def read(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> IntWeight:
        """Returns outputs `rows` and inputs `columns` of a linear of `shape`. Raises ModelError for tensors that do not fit."""
        return (self._read_blocks if self.scheme.layout == "bitsandbytes" else self._read_nvfp4)(name, shape, rows, columns)

    def read_expert(self, name: str, shape: tuple[int, int, int], number: int, rows: Span, columns: Span) -> IntWeight:
        """Returns outputs and inputs of an expert in MXFP4. shape: [experts, outputs, inputs]. Raises ModelError."""
        experts, outputs, inputs = shape
        groups = Span(columns.start // MX_GROUP, -(-columns.stop // MX_GROUP))
        size, one = -(-inputs // MX_GROUP), slice(number, number + 1)
        select = (one, slice(rows.start, rows.stop), slice(groups.start, groups.stop))
        stored = self._part(f"{name}_blocks", (experts, outputs, size, MX_GROUP // 2), "U8", select)[0]
        scales = self._part(f"{name}_scales", (experts, outputs, size), "U8", select)[0]
        if bool((scales == 255).any()):
            raise ModelError(f"tensor {name}_scales has a scale that is not a number")
        codes = _fields(stored.reshape(rows.size, -1))
        first = columns.start - groups.start * MX_GROUP
        return table_weight(
            self.checkpoint,
            codes[:, first : first + columns.size],
            scales.clone().view(torch.float8_e8m0fnu),
            torch.arange(columns.start, columns.stop) // MX_GROUP - groups.start,
            torch.tensor(E2M1),
        )

    def _read_nvfp4(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> IntWeight:
        outputs, inputs = shape
        cut, pair = slice(rows.start, rows.stop), Span(columns.start // 2, -(-columns.stop // 2))
        codes = _fields(self._part(f"{name}.weight_packed", (outputs, inputs // 2), "U8", (cut, slice(pair.start, pair.stop))))
        groups = Span(columns.start // NV_GROUP, -(-columns.stop // NV_GROUP))
        select = (cut, slice(groups.start, groups.stop))
        scales = self._part(f"{name}.weight_scale", (outputs, -(-inputs // NV_GROUP)), STORED_FP8, select)
        check_finite(f"{name}.weight_scale", scales.float())
        divisor = self._part(f"{name}.weight_global_scale", (1,), "F32")
        if not (divisor.isfinite() & (divisor > 0)).item():
            raise ModelError(f"tensor {name}.weight_global_scale is {divisor.item()}; expected a number above 0")
        return table_weight(
            self.checkpoint,
            codes[:, columns.start % 2 :][:, : columns.size],
            scales.clone(),
            torch.arange(columns.start, columns.stop) // NV_GROUP - groups.start,
            torch.tensor(E2M1),
            factors=(1 / divisor).expand(rows.size).contiguous(),
        )

    def _read_blocks(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> IntWeight:
        """Scales of blocks that contain the end of a row are repeated."""
        state = self._state(name)
        if state.get("shape") != list(shape) or shape[1] % 2:
            raise ModelError(f"tensor {name}.weight is {state.get('shape')}; config.json implies {list(shape)}, with even inputs")
        inputs, block = shape[1], int(state["blocksize"])
        half, size = inputs // 2, math.gcd(inputs, block)
        stored = self._part(f"{name}.weight", (shape[0] * half, 1), "U8", (slice(rows.start * half, rows.stop * half),))
        codes = _fields(stored.reshape(rows.size, half), is_high_first=True)
        starts = torch.arange(rows.start, rows.stop)[:, None] * inputs + torch.arange(0, inputs, size)
        used = Span(columns.start // size, -(-columns.stop // size))
        scales, nested = self._absmax(name, -(-shape[0] * inputs // block), (starts // block)[:, used.start : used.stop], state)
        return table_weight(
            self.checkpoint,
            codes[:, columns.start : columns.stop],
            scales,
            torch.arange(columns.start, columns.stop) // size - used.start,
            self._part(f"{name}.weight.quant_map", (16,), "F32").clone(),
            nested=nested,
        )

    def _absmax(self, name: str, count: int, places: Tensor, state: dict[str, Any]) -> tuple[Tensor, NestedScales | None]:
        """Returns the scales at `places`, [outputs, groups]: in fp32, or as they are stored if that saves memory."""
        full = f"{name}.weight.absmax"
        if "nested_blocksize" not in state:
            absmax = self._part(full, (count,), "F32").clone()
            check_finite(full, absmax)
            return absmax[places], None
        codes, size = self._part(full, (count,), "U8"), int(state["nested_blocksize"])
        outer = self._part(f"{name}.weight.nested_absmax", (-(-count // size),), "F32").clone()
        table = self._part(f"{name}.weight.nested_quant_map", (256,), "F32").clone()
        offset = float(state.get("nested_offset", 0.0))
        absmax = table[codes.int()] * outer.repeat_interleave(size)[:count] + offset
        check_finite(full, absmax)
        nested = find_nested(table, outer[places // size], offset)
        return (absmax[places], None) if nested is None else (codes[places], nested)

    def _state_name(self, name: str) -> str | None:
        names = [f"{name}.weight.{suffix}" for suffix in _STATES]
        return next((full for full in names if self.checkpoint.has(full)), None)

    def _state(self, name: str) -> dict[str, Any]:
        full = self._state_name(name)
        assert full is not None, "the linear is stored in codes"
        try:
            state = json.loads(bytes(self.checkpoint.part(full, None).tolist()))
            sizes = [int(state[key]) for key in ("blocksize", "nested_blocksize") if key in state or key == "blocksize"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"tensor {full} is no state of bitsandbytes: {error}") from error
        if min(sizes) < 1:
            raise ModelError(f"tensor {full} has a blocksize below 1")
        return dict(state)

    def _part(self, name: str, shape: Sequence[int], dtype: str, select: tuple[slice, ...] = ()) -> Tensor:
        """Returns a tensor, or a part of it, as stored. Raises ModelError if it does not fit."""
        if self.checkpoint.shape(name) != tuple(shape):
            stored = list(self.checkpoint.shape(name))
            raise ModelError(f"tensor {name} has shape {stored}; {self.scheme.name} implies {list(shape)}")
        if (found := self.checkpoint.stored_dtype(name)) != dtype:
            raise ModelError(f"tensor {name} is stored as {found}; {self.scheme.name} implies {dtype}")
        return self.checkpoint.part(name, (lambda lazy: lazy[select]) if select else None)


def check_finite(name: str, scales: Tensor) -> None:
    """Raises ModelError for a scale that is no finite number."""
    if not bool(scales.isfinite().all()):
        raise ModelError(f"tensor {name} has a scale that is not a number")


def _fields(packed: Tensor, *, is_high_first: bool = False) -> Tensor:
    """Returns both fields of each byte, [rows, 2 * bytes]."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if is_high_first else (low, high), 2).flatten(1)
