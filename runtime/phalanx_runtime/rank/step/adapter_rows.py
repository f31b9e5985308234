"""Sorts the tokens of a step by their adapters."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from phalanx_runtime.model.attention.step_adapters import PIECE, StepAdapters
from phalanx_runtime.model.copies.uploads import Array

Upload = Callable[[Sequence[Array]], list[Tensor]]


def adapter_rows(slots: Sequence[int], counts: Sequence[int], upload: Upload) -> StepAdapters | None:
    """Returns the tokens with an adapter, if there are any. `slots`: of each request in packed order, from 1; 0: none.

    `counts`: tokens of each.
    """
    slot_of = np.repeat(np.asarray(slots, np.int64), counts)
    rows = np.argsort(slot_of, kind="stable")[np.count_nonzero(slot_of == 0) :]
    if not len(rows):
        return None
    present, firsts = np.unique(slot_of[rows], return_index=True)
    stops = [*firsts[1:].tolist(), len(rows)]
    pieces = [
        (slot - 1, start, min(start + PIECE, stop))
        for slot, first, stop in zip(present.tolist(), firsts.tolist(), stops, strict=True)
        for start in range(first, stop, PIECE)
    ]
    uploaded = upload([rows, np.asarray(pieces, np.int64), slot_of - 1])
    return StepAdapters(rows=uploaded[0], pieces=pieces, table=uploaded[1], slots=uploaded[2])
