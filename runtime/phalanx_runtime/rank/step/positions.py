"""Positions of the tokens of a step: their slots, except those of draft trees and of images in a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx_runtime.core.draft_tree import levels
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.rank.step.page_tables import Ints


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens in packed order."""

    positions: Ints
    cells: Ints | None
    """See `StepBatch`."""


def positions_of(slots: Ints, plan: StepPlan, trees: Mapping[int, Sequence[int]], ends: Ints) -> Ints:
    """Returns the positions of all tokens: their slots, but those of a tree by its levels. `ends`: of each request's tokens."""
    positions = slots.copy()
    for request, parents in trees.items():
        end, size = int(ends[request]), min(len(parents), plan.counts[request])
        root = plan.starts[request] + plan.counts[request] - len(parents)
        positions[end - size : end] = root + np.asarray(levels(tuple(parents)))[-size:]
    return positions


def with_cells(positions: Ints, rows: Sequence[NewRow | None], firsts: Ints) -> Placed:
    """Returns the positions with those of images in a grid. `rows`: in packed order; `firsts`: their first tokens and the end."""
    if not any(new and (new.position_shift or any(image.grid for image in new.images)) for new in rows):
        return Placed(positions, None)
    cells = np.tile(positions, (3, 1))
    has_cells = False
    for new, first, end in zip(rows, firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        if new is None:
            continue
        own, placed, shift = positions[first:end], cells[:, first:end], new.position_shift
        placed -= shift
        for image in new.images:
            if image.grid is None:
                continue
            within = (own >= image.start) & (own < image.stop)
            if within.any():
                index, has_cells = own[within] - image.start, True
                zeros = np.zeros_like(index)
                placed[:, within] = image.start - shift + np.stack((zeros, index // image.grid[1], index % image.grid[1]))
            placed[:, own >= image.stop] -= image.shift
            shift += image.shift
    return Placed(cells[0].copy(), cells if has_cells else None)
