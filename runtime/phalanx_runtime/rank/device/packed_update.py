"""The changes of a plan to the rows of a device, packed into one int32 array.

    header     [HEADER]               number of batch rows, number of entries
    entries    [COLUMNS, entries]     one per row that changes, batch rows first, in the order of the plan
    pages      [appended pages]       of all entries

An entry does not depend on earlier plans: the device knows how many pages a row holds.
"""

from enum import IntEnum
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from phalanx_runtime.core.step_plan import LAST_SAMPLED, StepPlan

HEADER = 4
KEEP = -1
"""Number of kept pages: all."""

Words = NDArray[np.int32]


class Column(IntEnum):
    """Columns of an entry."""

    ROW = 0
    KEPT = 1
    """Pages that the row keeps before others are appended, or `KEEP`."""
    FIRST_PAGE = 2
    """Index of its first appended page in the array."""
    NUM_PAGES = 3
    LENGTH = 4
    """Tokens in the cache after the step."""
    TOKEN = 5
    """Token of a decode, or LAST_SAMPLED."""
    INDEX = 6
    """Output index that the row samples."""


COLUMNS = len(Column)


def pack_update(plan: StepPlan) -> Words:
    """Returns the packed changes of a plan. Tokens of rows with several tokens are left out: these rows sample a new one."""
    restarted = {new.row for new in plan.admitted}
    others = sorted(restarted.difference(plan.rows))
    num_rows, num_entries = len(plan.rows), len(plan.rows) + len(others)
    num_pages = np.fromiter(map(len, plan.pages), np.int32, num_rows)
    words = np.zeros(HEADER + COLUMNS * num_entries + int(num_pages.sum()), np.int32)
    words[:2] = num_rows, num_entries
    first_page = HEADER + COLUMNS * num_entries
    entries = words[HEADER:first_page].reshape(COLUMNS, num_entries)
    entries[Column.ROW, :num_rows] = plan.rows
    entries[Column.ROW, num_rows:] = others
    entries[Column.KEPT] = [0 if row in restarted else KEEP for row in entries[Column.ROW].tolist()] if restarted else KEEP
    for request, kept in plan.truncations:
        entries[Column.KEPT, request] = kept
    entries[Column.FIRST_PAGE, :num_rows] = first_page + np.cumsum(num_pages) - num_pages
    entries[Column.NUM_PAGES, :num_rows] = num_pages
    entries[Column.LENGTH, :num_rows] = np.asarray(plan.starts, np.int32) + np.asarray(plan.counts, np.int32)
    entries[Column.TOKEN] = LAST_SAMPLED
    entries[Column.TOKEN, :num_rows] = _decode_tokens(plan)
    for request, index in plan.draws:
        entries[Column.INDEX, request] = index
    words[first_page:] = list(chain.from_iterable(plan.pages))
    return words


def _decode_tokens(plan: StepPlan) -> Words:
    counts = np.asarray(plan.counts, np.int32)
    tokens = np.full(len(counts), LAST_SAMPLED, np.int32)
    is_decode = counts == 1
    given = np.asarray(plan.tokens, np.int32)[np.cumsum(counts)[is_decode] - 1]
    tokens[is_decode] = np.where(given == LAST_SAMPLED, given, np.maximum(given, 0))
    return tokens
