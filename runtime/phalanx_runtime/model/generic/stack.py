"""Parameters that a checkpoint keeps as a matrix for each expert: every matrix is read on its own into its place in the stack.

    [experts, rows, columns]     kinds of matrices, such as gate and up, lie one below the other in each expert's rows

So a rank never holds more of them than its part and what is mapped of one file.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.split import Cut
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import Checkpoint

Kinds = Sequence[Sequence[str]]
"""The checkpoint's tensors of each kind, expert by expert."""
Places = list[tuple[Span, int]]
"""Parts of a matrix, and where each begins in what is kept."""


def kinds_of(converter: Any, sources: Sequence[tuple[str, str | None]]) -> Kinds | None:
    """The tensors that this conversion of `transformers` stacks; None where it does something else with them."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    stacks = type(first) is MergeModulelist and first.dim == 0
    joins = len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1
    kinds = [[source for source, pattern in sources if pattern == kind] for kind in converter.source_patterns]
    found = [kind for kind in kinds if kind]
    return found if stacks and (joins or (not others and len(found) == 1)) else None


def read_stack(kinds: Kinds, checkpoint: Checkpoint, shape: Sequence[int], dtype: torch.dtype, cut: Cut | None) -> Tensor | None:
    """This rank's part of a stack of this shape; None where these tensors do not make up one."""
    if len(shape) != 3 or any(len(kind) != shape[0] for kind in kinds) or (cut is not None and cut.dim % 3 == 0):
        return None
    heights = [checkpoint.shape(kind[0])[0] for kind in kinds]
    if sum(heights) != shape[1]:
        return None
    rows, columns = _spans(cut, 1, shape[1]), _spans(cut, 2, shape[2])
    stack = torch.empty((shape[0], _joined(rows), _joined(columns)), dtype=dtype, device=checkpoint.device)
    tops = [sum(heights[:at]) for at in range(len(heights))]
    across = places(columns, 0, shape[2])
    down = [places(rows, top, top + height) for top, height in zip(tops, heights, strict=True)]
    for expert, matrix in enumerate(stack):
        for kind, parts in zip(kinds, down, strict=True):
            _read(kind[expert], checkpoint, matrix, parts, across)
    return stack


def places(spans: Sequence[Span], start: int, stop: int) -> Places:
    """What the spans hold of [start, stop), counted from there, and where each part is when the spans are joined."""
    found, at = [], 0
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            found.append((Span(low - start, high - start), at + low - span.start))
        at += span.size
    return found


def _read(name: str, checkpoint: Checkpoint, matrix: Tensor, down: Places, across: Places) -> None:
    """Reads these parts of a tensor into a matrix."""
    for rows, row in down:
        for columns, column in across:
            part = checkpoint.part(name, partial(_window, rows=rows, columns=columns))
            target = matrix[row : row + rows.size, column : column + columns.size]
            if part.shape != target.shape:
                raise ModelError(f"tensor {name} has not the shape of the other experts'")
            target.copy_(part)


def _window(stored: Any, rows: Span, columns: Span) -> Tensor:
    window: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
    return window


def _spans(cut: Cut | None, dim: int, size: int) -> tuple[Span, ...]:
    """What this rank keeps of a dimension."""
    return cut.spans if cut is not None and cut.dim % 3 == dim else (Span(0, size),)


def _joined(spans: Sequence[Span]) -> int:
    return sum(span.size for span in spans)
