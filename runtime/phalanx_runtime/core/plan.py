"""The contract between the scheduler and the ranks: one step's work, and its result.

A rank keeps, for each row, its page table and its sampling parameters; a plan carries differences only. Rank 0 draws the
tokens and the next plan carries them, so no rank needs another's result.
"""

import msgspec


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row starts anew: whatever it held before is forgotten. Sampling parameters as in `phalanx_api.wire.Sampling`."""

    row: int
    seed: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over packed tokens.

    rows, starts, counts and pages are parallel: request in row `rows[i]` has `starts[i]` tokens in its pages and computes
    the next `counts[i]`; `pages[i]` are appended to the row's page table before the pass. A row appears at most once.
    tokens: packed ids, sum(counts) of them. draws: pairs (i, j): after the pass draw output index j of request i (an index
    into `rows`) from the logits of its last computed token.
    """

    step: int
    admitted: list[NewRow]
    rows: list[int]
    starts: list[int]
    counts: list[int]
    pages: list[list[int]]
    tokens: list[int]
    draws: list[tuple[int, int]]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Drawn tokens, parallel to the plan's `draws`."""

    step: int
    tokens: list[int]


class PoolShape(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 measured at start: number of pages and tokens per page."""

    num_pages: int
    page_size: int
