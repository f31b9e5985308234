"""What adapters add to the output of a module, in torch and in C++; `adapters.gpu` has it in Triton.

y += (x A^T) B        A: [slots, rank, in]    B: [slots, rank, out], with the adapter's scale
"""

from collections.abc import Sequence
from ctypes import Array, c_int64
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.model.attention.step_inputs import AdaptedRows
from phalanx_runtime.model.linear.cpu import BLOCK
from phalanx_runtime.model.native.library import Library

_Sizes = c_int64 * 6


@dataclass(frozen=True, slots=True)
class LinearFactors:
    """Factors of one linear, of all slots."""

    a: Tensor
    """[slots, rank, in]."""
    b: Tensor
    """[slots, rank, out]."""
    ranks: Tensor
    """int64 [slots]: of the adapter that a slot has; 0: none, or none of this linear."""
    outputs: slice
    """Its columns in the output of the module that computes it."""


class AdapterProducts(Protocol):
    """What adapters add to the linears of one module."""

    def add(self, y: Tensor, x: Tensor, step: AdaptedRows, *, alternates: bool) -> None:
        """Adds to y in place, as an `Addition`. x: [tokens, in]; y: [tokens, out of the module]."""
        ...


class TorchProducts:
    """`AdapterProducts` in torch: the reference."""

    __slots__ = ("_linears",)

    def __init__(self, linears: Sequence[LinearFactors]) -> None:
        self._linears = linears

    def add(self, y: Tensor, x: Tensor, step: AdaptedRows, *, alternates: bool) -> None:
        """See `AdapterProducts`."""
        for slot, start, stop in step.pieces:
            rows = step.rows[start:stop]
            own = x.index_select(0, rows)
            for index, linear in enumerate(self._linears):
                if rank := int(linear.ranks[slot]):
                    added = own @ linear.a[slot, :rank].t() @ linear.b[slot, :rank]
                    if alternates:
                        columns = _alternating(torch.arange(added.shape[1], device=y.device), index, len(self._linears))
                        y[rows[:, None], columns] += added
                    else:
                        y[:, linear.outputs].index_add_(0, rows, added)


def _alternating(outputs: Tensor, index: int, linears: int) -> Tensor:
    """Returns the columns of outputs of a linear, if blocks of the module's linears alternate."""
    return (outputs // BLOCK * linears + index) * BLOCK + outputs % BLOCK


class NativeProducts:
    """`AdapterProducts` in C++. Sums are fp32, and rounded once."""

    __slots__ = ("_alternating", "_functions", "_linears", "_numbers")

    def __init__(self, library: Library, linears: Sequence[LinearFactors]) -> None:
        self._functions = library.functions
        self._linears = linears
        self._numbers = _numbers(linears, [one.outputs.start for one in linears])
        self._alternating = _numbers(linears, [BLOCK * index for index in range(len(linears))])

    def add(self, y: Tensor, x: Tensor, step: AdaptedRows, *, alternates: bool) -> None:
        """See `AdapterProducts`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        linears = len(self._linears)
        distance = BLOCK * linears if alternates else BLOCK
        self._functions.phalanx_adapters(
            *(
                x.dtype == torch.bfloat16,
                x.data_ptr(),
                y.data_ptr(),
                self._alternating if alternates else self._numbers,
                step.rows.data_ptr(),
                step.table.data_ptr(),
                _Sizes(*(x.shape[1], x.stride(0), y.stride(0), linears, len(step.pieces), distance)),
            )
        )


def _numbers(linears: Sequence[LinearFactors], firsts: Sequence[int]) -> Array[c_int64]:
    """Returns the linears as the kernel reads them. `firsts`: the first column of each in the output of the module."""
    numbers: list[int] = []
    for one, first in zip(linears, firsts, strict=True):
        numbers += [one.a.data_ptr(), one.b.data_ptr(), one.ranks.data_ptr(), one.a.shape[1], first, one.b.shape[2]]
    return (c_int64 * len(numbers))(*numbers)
