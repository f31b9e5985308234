"""State of the rows on the device: page tables, lengths, last tokens and slots of adapters, at constant addresses.

`BatchBuilder` is the reference. A plan changes the rows by one int32 array in pinned memory, which one launch reads:

    header     [HEADER]               number of batch rows, number of entries
    entries    [COLUMNS, entries]     one per row that changes, batch rows first, in the order of the plan
    pages      [appended pages]       of all entries

An entry does not depend on earlier plans: the device knows how many pages a row holds.
"""

from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.core.step_plan import LAST_SAMPLED, StepPlan
from phalanx_runtime.model.copies import upload
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, power_of_two, variant_of
from phalanx_runtime.model.operators import operator
from phalanx_runtime.rank.device.host_tokens import free_after_device, store_variant
from phalanx_runtime.rank.device.limits import MAX_TABLE_BLOCK
from phalanx_runtime.rank.device.triton_kernels import record_tokens, update_rows

HEADER = 4
KEEP = -1
"""Number of kept pages: all; slot of an adapter: as before."""

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
    ADAPTER = 7
    """Slot of its adapter, from 1, 0 for none, or `KEEP`."""


COLUMNS = len(Column)


def pack_update(plan: StepPlan) -> Words:
    """Returns the packed changes of a plan. Tokens of rows with several tokens are left out: these rows sample a new one."""
    restarted = {new.row: new.adapter for new in plan.admitted}
    others = sorted(restarted.keys() - plan.rows)
    num_rows, num_entries = len(plan.rows), len(plan.rows) + len(others)
    num_pages = np.fromiter(map(len, plan.pages), np.int32, num_rows)
    words = np.zeros(HEADER + COLUMNS * num_entries + int(num_pages.sum()), np.int32)
    words[:2] = num_rows, num_entries
    first_page = HEADER + COLUMNS * num_entries
    entries = words[HEADER:first_page].reshape(COLUMNS, num_entries)
    entries[Column.ROW, :num_rows] = plan.rows
    entries[Column.ROW, num_rows:] = others
    entries[[Column.KEPT, Column.ADAPTER]] = KEEP
    for entry, row in enumerate(entries[Column.ROW].tolist() if restarted else ()):
        if row in restarted:
            entries[Column.KEPT, entry], entries[Column.ADAPTER, entry] = 0, restarted[row]
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


RECORD_BLOCK = 128
_MIN_BLOCK = 16
_NUM_BUFFERS = 2
"""Host buffers: the next plan is written while the device reads the last one."""


def table_block(max_pages: int) -> int:
    """Returns the pages that a program copies at once, with up to 16 bytes per thread.

    A page table is a multiple of it, so that blocks need no mask.
    """
    return min(MAX_TABLE_BLOCK, max(_MIN_BLOCK, power_of_two(max_pages)))


@operator(
    "update_rows(Tensor update, Tensor(a!) tables, Tensor(b!) held, Tensor(c!) lengths, Tensor(d!) last_tokens,"
    " Tensor(e!) adapters, Tensor(f!) batch_rows, Tensor(g!) batch_indices, int block)",
    num_pinned=1,
)
def _update(
    update: Tensor,
    tables: Tensor,
    held: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    adapters: Tensor,
    batch_rows: Tensor,
    batch_indices: Tensor,
    block: int,
) -> None:
    arguments = {
        "update": update,
        "tables": tables,
        "held": held,
        "lengths": lengths,
        "last_tokens": last_tokens,
        "adapters": adapters,
        "batch_rows": batch_rows,
        "batch_indices": batch_indices,
        "table_pages": tables.shape[1],
        "BLOCK": block,
    }
    launch(update_rows, (len(batch_rows),), arguments)


@operator("record_tokens(Tensor sampled, Tensor batch_rows, Tensor(a!) last_tokens)")
def _record(sampled: Tensor, batch_rows: Tensor, last_tokens: Tensor) -> None:
    num_rows = len(sampled)
    arguments = {"sampled": sampled, "batch_rows": batch_rows, "last_tokens": last_tokens, "num_rows": num_rows}
    launch(record_tokens, (num_blocks(num_rows, RECORD_BLOCK),), {**arguments, "BLOCK": RECORD_BLOCK})


def row_variants(max_pages: int) -> list[KernelVariant]:
    """Returns the variants of `DeviceRows` with at most `max_pages` per row. Tokens of the host are int32."""
    block = table_block(max_pages)
    tensors = dict.fromkeys((*update_rows.arg_names, *record_tokens.arg_names), torch.int32)
    return [
        variant_of(update_rows, {**tensors, "table_pages": block, "BLOCK": block}),
        variant_of(record_tokens, {**tensors, "num_rows": 1, "BLOCK": RECORD_BLOCK}),
        store_variant(),
    ]


class DeviceRows:
    """Rows of one device. Methods queue work on the current stream and wait for no result."""

    def __init__(
        self, max_rows: int, max_model_len: int, page_size: int, device: torch.device, num_pages_with_parts: int = 0
    ) -> None:
        """`num_pages_with_parts`: pages of the pool, if they have parts."""
        max_pages = -(-max_model_len // page_size)
        self.page_size = page_size
        self.block = table_block(max_pages)
        """Pages per block of a page table."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tables = zeros(max_rows, -(-max_pages // self.block) * self.block)
        """[rows, pages]: page table of each row; entries from `held` on are not valid."""
        self.held = zeros(max_rows)
        """[rows]: pages in each row's table."""
        self.lengths = zeros(max_rows)
        """[rows]: tokens in the cache after the latest step of the row."""
        self.last_tokens = zeros(max_rows)
        """[rows]: the token that the row computes next, or sampled last."""
        self.adapters = zeros(max_rows)
        """[rows]: slot of each row's adapter, from 1; 0: none."""
        self.batch_rows = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        """[rows]: rows of the latest plan in its order, then -1."""
        self.batch_indices = zeros(max_rows)
        """[rows]: the output index that each of them samples."""
        self.part_of = zeros(num_pages_with_parts) if num_pages_with_parts else None
        """[pages], if pages have parts; any for pages without one."""
        self._max_length = max_pages * page_size
        self._staging = _Staging(device)

    def update(self, plan: StepPlan) -> None:
        """Applies a plan. Raises ValueError if it exceeds the rows or their page tables."""
        words = pack_update(plan)
        self._check(words)
        self.apply(self._staging.write(words))
        self._staging.release()
        if self.part_of is not None and plan.parts:
            latest = dict(plan.parts)  # a page may get several, after others took them
            pages, parts = np.fromiter(latest.keys(), np.int64), np.fromiter(latest.values(), np.int32)
            self.part_of.index_copy_(0, *upload((pages, parts), self.part_of.device))

    def apply(self, update: Tensor) -> None:
        """Applies a packed update that the device can read."""
        _update(
            update,
            self.tables,
            self.held,
            self.lengths,
            self.last_tokens,
            adapters=self.adapters,
            batch_rows=self.batch_rows,
            batch_indices=self.batch_indices,
            block=self.block,
        )

    def record(self, sampled: Tensor, batch_rows: Tensor) -> None:
        """Stores sampled tokens, [n] integers, as the last ones of the rows, [n] int32; negative rows store nothing."""
        _record(sampled, batch_rows, self.last_tokens)

    def _check(self, words: Words) -> None:
        num_entries = int(words[1])
        columns = words[HEADER:]
        rows = columns[:num_entries]
        lengths = columns[Column.LENGTH * num_entries : (Column.LENGTH + 1) * num_entries]
        if num_entries and (rows.max() >= len(self.held) or lengths.max() > self._max_length):
            limits = f"{len(self.held)} rows of {self._max_length} tokens"
            raise ValueError(f"a plan with row {rows.max()} and {lengths.max()} tokens exceeds {limits}")


class _Staging:
    """Memory of the host that the kernel of an update reads, pinned for a GPU. See `host_tokens` for why it is not copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda" and torch.cuda.is_available()
        self._pinned = list[Tensor]()
        """All buffers of a GPU: larger ones replace few."""
        self._host = [self._host_memory(1) for _ in range(_NUM_BUFFERS)]
        self._read: list[Any] = [None] * _NUM_BUFFERS
        """Event after the last launch that reads each buffer."""
        self._next = 0
        if self._is_pinned:
            free_after_device(self, self._pinned)

    def write(self, words: Words) -> Tensor:
        """Returns the words where the device reads them, for one launch, after which `release` is called."""
        index, size = self._next, len(words)
        if self._read[index] is not None:
            self._read[index].synchronize()  # two plans ago, whose result was read: no wait
        if len(self._host[index][0]) < size:
            self._host[index] = self._host_memory(size)
        array, host = self._host[index]
        array[:size] = words
        return host[:size]

    def release(self) -> None:
        """Lets the words be overwritten after the launches that are queued."""
        index = self._next
        self._next = (index + 1) % _NUM_BUFFERS
        if self._is_pinned:
            self._read[index] = self._read[index] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read[index].record()

    def _host_memory(self, size: int) -> tuple[Words, Tensor]:
        """Returns memory as an array and as a tensor."""
        if self._is_pinned:
            tensor = torch.empty(_capacity(size), dtype=torch.int32, pin_memory=True)
            self._pinned.append(tensor)
            return tensor.numpy(), tensor
        array = np.empty(_capacity(size), np.int32)
        return array, torch.from_numpy(array)


def _capacity(size: int) -> int:
    return max(1 << 12, 1 << (size - 1).bit_length())
