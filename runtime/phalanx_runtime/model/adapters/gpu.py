"""`AdapterProducts` on a GPU: two launches per linear, for all adapters of a step. Reference: `TorchProducts`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.model.adapters.products import LinearFactors
from phalanx_runtime.model.adapters.triton_kernels import expand_rows, shrink_rows
from phalanx_runtime.model.attention.step_inputs import PIECE, AdaptedRows
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.operators import operator

BLOCK_ROWS, BLOCK_RANKS, BLOCK_INPUTS, BLOCK_OUTPUTS = 16, 16, 128, 128
"""Tiles; the smallest of tensor cores for rows and ranks. Not tuned."""
_SHRINK = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_RANKS": BLOCK_RANKS, "BLOCK_INPUTS": BLOCK_INPUTS}
_EXPAND = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_RANKS": BLOCK_RANKS, "BLOCK_OUTPUTS": BLOCK_OUTPUTS}
_NUM_WARPS = 4


@operator("shrink_rows(Tensor x, Tensor a, Tensor ranks, Tensor rows, Tensor pieces, Tensor(a!) sums)")
def _shrink(x: Tensor, a: Tensor, ranks: Tensor, rows: Tensor, pieces: Tensor, sums: Tensor) -> None:
    sizes = {"x_stride": x.stride(0), "inputs": x.shape[1], "num_ranks": a.shape[1]}
    grid = (len(pieces), num_blocks(a.shape[1], BLOCK_RANKS), PIECE // BLOCK_ROWS)
    tensors = {"x": x, "a": a, "ranks": ranks, "rows": rows, "pieces": pieces, "sums": sums}
    launch(shrink_rows, grid, {**tensors, **sizes, **_SHRINK}, num_warps=_NUM_WARPS, num_stages=1)


@operator("expand_rows(Tensor sums, Tensor b, Tensor ranks, Tensor rows, Tensor pieces, Tensor(a!) y)")
def _expand(sums: Tensor, b: Tensor, ranks: Tensor, rows: Tensor, pieces: Tensor, y: Tensor) -> None:
    sizes = {"y_stride": y.stride(0), "outputs": b.shape[2], "num_ranks": b.shape[1]}
    grid = (len(pieces), num_blocks(b.shape[2], BLOCK_OUTPUTS), PIECE // BLOCK_ROWS)
    tensors = {"sums": sums, "b": b, "ranks": ranks, "rows": rows, "pieces": pieces, "y": y}
    launch(expand_rows, grid, {**tensors, **sizes, **_EXPAND}, num_warps=_NUM_WARPS, num_stages=1)


def adapter_variants(dtype: torch.dtype) -> Sequence[KernelVariant]:
    """Returns the variants of linears whose sizes are multiples of 16, in contiguous tensors."""
    table = dict.fromkeys(("ranks", "rows", "pieces"), torch.int64)
    shrink = {"x": dtype, "a": dtype, **table, "sums": torch.float32, "x_stride": 16, "inputs": 16, "num_ranks": 16, **_SHRINK}
    expand = {"sums": torch.float32, "b": dtype, **table, "y": dtype, "y_stride": 16, "outputs": 16, "num_ranks": 16, **_EXPAND}
    return [
        variant_of(kernel, arguments, num_warps=_NUM_WARPS, num_stages=1)
        for kernel, arguments in ((shrink_rows, shrink), (expand_rows, expand))
    ]


class TritonProducts:
    """`AdapterProducts` in Triton. Sums are fp32; x A^T is rounded to the dtype, and the result once."""

    __slots__ = ("_linears",)

    def __init__(self, linears: Sequence[LinearFactors]) -> None:
        self._linears = linears

    def add(self, y: Tensor, x: Tensor, step: AdaptedRows, *, alternates: bool) -> None:
        """See `AdapterProducts`. Gates and ups do not alternate on a GPU."""
        assert not alternates
        x = x if x.stride(1) == 1 else x.contiguous()
        for one in self._linears:
            sums = x.new_empty(len(step.rows), one.a.shape[1], dtype=torch.float32)
            own = {"ranks": one.ranks, "rows": step.rows, "pieces": step.table}
            _shrink(x=x, a=one.a, sums=sums, **own)
            _expand(sums=sums, b=one.b, y=y[:, one.outputs], **own)
