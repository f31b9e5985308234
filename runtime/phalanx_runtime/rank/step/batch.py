"""From a step plan to the tensors of a step.

Each rank keeps the page table of every row; a plan only adds to it. Requests that compute one token are put first, sorted by
length and cut into bands that are padded to one length; the rest follow as chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.core.draft_tree import OWN, levels
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import AttentionChunk, DecodeBand, StepBatch

# Which prompt tokens of a step are to be told with their logprobs. Every rank finds the same ones in the same plan.
# The scores after position p tell of token p + 1, so token 0 is never told, and a chunk's last scores tell of a token that
# the next chunk computes: its id comes from `NewRow.history`. A request that has output told its prompt before: it is not
# told again.


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens `start` and following of request i of the plan. Their scores come after the positions before them."""

    request: int
    start: int
    tokens: list[int]
    top: int

    @property
    def positions(self) -> range:
        """Where in the sequence their scores are computed."""
        return range(self.start - 1, self.start - 1 + len(self.tokens))


def prompt_parts(plan: StepPlan, rows: Mapping[int, NewRow]) -> list[PromptPart]:
    """The told prompt tokens of each request in this step. `rows` are those that run, the newly admitted included."""
    parts = []
    for request, row in enumerate(plan.rows):
        new = rows[row]
        if new.sampling.prompt_logprobs is None or len(new.history) > new.num_prompt:
            continue
        start = plan.starts[request]
        stop = min(start + plan.counts[request], new.num_prompt - 1)
        if start < stop:
            parts.append(PromptPart(request, start + 1, new.history[start + 1 : stop + 1], new.sampling.prompt_logprobs))
    return parts


WASTE_BYTES = 1 << 20
"""Padding that a band of decoding requests may read per layer before another band, at some 50 us a layer, is cheaper."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What of the cache the builder must know: tokens per page, this rank's KV heads, and bytes of one page in one layer."""

    page_size: int
    kv_heads: int
    layer_page_bytes: int


class LazyMasks(dict[int | None, Tensor | None]):
    """Masks by window, each made when it is asked for: kernels that read pages where they lie need none."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int | None], Tensor | None]) -> None:
        self._make = make

    def __missing__(self, window: int | None) -> Tensor | None:
        self[window] = self._make(window)
        return self[window]


def decode_bands(pages: list[int], waste_pages: int) -> list[int]:
    """Sizes of the bands that requests with these falling page counts are cut into, each padded to its first."""
    sizes: list[int] = []
    first, wasted = 0, 0
    for count in pages:
        if sizes and wasted + first - count <= waste_pages:
            sizes[-1] += 1
            wasted += first - count
        else:
            sizes.append(1)
            first, wasted = count, 0
    return sizes


@lru_cache(maxsize=1024)
def tree_mask_rows(parents: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which proposals each of them sees: those of its branch, itself included. [proposals, proposals]"""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != OWN:
            seen[node] |= seen[parent]
    return seen


def _last(ends: Ints, counts: Ints) -> Ints:
    """The last `counts[i]` numbers before each `ends[i]`, one after the other."""
    before = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
    last: Ints = np.repeat(ends - counts - before, counts) + np.arange(counts.sum())
    return last


class BatchBuilder:
    """Page tables and sampling parameters of the rows, and the tensors of one step after another."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.params: dict[int, NewRow] = {}
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._tables: Ints = np.zeros((8, 8), np.int64)
        self._held: Ints = np.zeros(8, np.int64)
        self._heads: Ints = np.arange(shape.kv_heads, dtype=np.int64)

    def build(self, plan: StepPlan) -> StepBatch:
        """The plan's tensors. The rows' tables are brought up to date first."""
        self.update(plan)
        return self.tensors(plan)

    def tensors(self, plan: StepPlan) -> StepBatch:
        """The tensors of a plan over rows whose tables are up to date."""
        rows, starts, counts = (np.asarray(part, np.int64) for part in (plan.rows, plan.starts, plan.counts))
        lengths = starts + counts
        trees = {path.request: path.parents for path in plan.paths if path.parents}
        is_chunk = counts != 1
        is_chunk[list(trees)] = True
        order = np.lexsort((-lengths, is_chunk))
        offsets = np.concatenate(([0], np.cumsum(counts)))[:-1]
        ones = len(rows) - int(is_chunk.sum())
        rows, starts, counts, lengths = rows[order], starts[order], counts[order], lengths[order]
        first = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        slots = np.repeat(starts, counts) + within
        tokens = np.asarray(plan.tokens, np.int64)[np.repeat(offsets[order], counts) + within]
        np.maximum(tokens, 0, out=tokens)  # where nothing is proposed
        rank_of = np.empty_like(order)
        rank_of[order] = np.arange(len(order))
        positions = slots.copy()
        for request, parents in trees.items():
            end = int(first[1:][rank_of[request]])
            size = min(len(parents), plan.counts[request])
            own = plan.starts[request] + plan.counts[request] - len(parents)
            positions[end - size : end] = own + np.asarray(levels(tuple(parents)))[-size:]
        ends = first[1:][rank_of[[request for request, _ in plan.draws]]] if plan.draws else np.zeros(0, np.int64)
        looked = np.asarray(plan.depths, np.int64) + 1
        told = [
            first[rank_of[part.request]] - plan.starts[part.request] + np.asarray(part.positions)
            for part in prompt_parts(plan, self.params)
        ]
        return StepBatch(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            slots=self._tensor(self._slots(np.repeat(rows, counts), slots)),
            bands=self._bands(rows[:ones], lengths[:ones]),
            chunks=[
                self._chunk(int(first[i]), int(rows[i]), int(counts[i]), int(lengths[i]), trees.get(int(order[i]), []))
                for i in range(ones, len(rows))
            ],
            drawn=self._tensor(np.concatenate([_last(ends, looked), *told])),
        )

    def strays(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Slots of the cache that the plan's strays lie in, and those that they belong into."""
        rows = np.repeat([plan.rows[request] for request, _ in plan.strays], [len(found) for _, found in plan.strays])
        lie = np.concatenate([np.asarray(found, np.int64) for _, found in plan.strays])
        belong = np.concatenate([np.arange(-len(found), 0) + plan.starts[request] for request, found in plan.strays])
        return self._tensor(self._slots(rows, lie)), self._tensor(self._slots(rows, belong))

    def empty(self, rows: int, width: int) -> Tensor:
        """Room for so many tokens' hidden states."""
        return torch.empty((rows, width), dtype=self._dtype, device=self._device)

    def update(self, plan: StepPlan) -> None:
        """Brings rows and their tables up to date."""
        for new in plan.admitted:
            self._reserve(new.row + 1, 1)
            self.params[new.row] = new
            self._held[new.row] = 0
        for request, kept in plan.cuts:
            self._held[plan.rows[request]] = kept
        for row, pages in zip(plan.rows, plan.pages, strict=True):
            if pages:
                held = int(self._held[row])
                self._reserve(row + 1, held + len(pages))
                self._tables[row, held : held + len(pages)] = pages
                self._held[row] = held + len(pages)

    def _reserve(self, rows: int, pages: int) -> None:
        """Room for this many rows and pages per row, doubling."""
        have_rows, have_pages = self._tables.shape
        if rows > have_rows or pages > have_pages:
            more_rows = max(have_rows, 1 << (rows - 1).bit_length())
            more_pages = max(have_pages, 1 << (pages - 1).bit_length())
            self._tables = np.pad(self._tables, ((0, more_rows - have_rows), (0, more_pages - have_pages)))
            self._held = np.pad(self._held, (0, more_rows - have_rows))

    def _slots(self, rows: Ints, positions: Ints) -> Ints:
        page_size, kv_heads = self._shape.page_size, self._shape.kv_heads
        pages = self._tables[rows, positions // page_size]
        lumps = pages[:, None] * kv_heads + self._heads
        slots: Ints = (lumps * page_size + (positions % page_size)[:, None]).reshape(-1)
        return slots

    def _bands(self, rows: Ints, lengths: Ints) -> list[DecodeBand]:
        """Groups of decoding requests, longest first."""
        pages = -(-lengths // self._shape.page_size)
        waste = WASTE_BYTES // max(self._shape.layer_page_bytes, 1)
        bands, start = [], 0
        for size in decode_bands(pages.tolist(), waste):
            at = slice(start, start + size)
            bands.append(self._band(start, rows[at], lengths[at], pages[at]))
            start += size
        return bands

    def _band(self, start: int, rows: Ints, lengths: Ints, pages: Ints) -> DecodeBand:
        wide = int(pages[0])
        columns = np.arange(wide)
        tables = self._tables[rows, :wide]
        # Padding repeats the row's own first page, so that what another request wrote is never read.
        tables = np.where(columns < pages[:, None], tables, tables[:, :1])
        lumps = tables[:, None, :] * self._shape.kv_heads + self._heads[:, None]
        columns = np.arange(wide * self._shape.page_size)

        def mask(window: int | None) -> Tensor:
            seen = columns < lengths[:, None]
            visible = seen if window is None else seen & (columns >= lengths[:, None] - window)
            return self._mask(visible[:, None, None, :])

        masks = LazyMasks(mask)
        ends = self._tensor(lengths)
        return DecodeBand(
            start=start,
            size=len(rows),
            lumps=self._tensor(lumps.reshape(-1)),
            masks=masks,
            tables=self._tensor(tables),
            lengths=lengths.tolist(),
            ends=ends,
        )

    def _chunk(self, start: int, row: int, size: int, length: int, parents: Sequence[int]) -> AttentionChunk:
        pages = self._tables[row, : -(-length // self._shape.page_size)]
        whole = size == length
        lumps = None if whole else self._tensor((pages * self._shape.kv_heads + self._heads[:, None]).reshape(-1))

        def mask(window: int | None) -> Tensor | None:
            if whole and not parents and (window is None or window >= length):
                return None
            columns = np.arange(length)
            visible = columns <= columns[length - size :, None]
            if parents:
                columns[length - len(parents) :] = length - len(parents) + np.asarray(levels(tuple(parents)))
                seen = tree_mask_rows(tuple(parents))[-size:]
                visible[size - len(seen) :, length - len(parents) :] = seen
            if window is not None:
                visible &= columns > columns[length - size :, None] - window
            return self._mask(visible)

        return AttentionChunk(
            start=start,
            size=size,
            length=length,
            lumps=lumps,
            masks=LazyMasks(mask),
            table=self._tensor(pages),
            parents=tuple(parents),
        )

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        """Additive: 0 where visible, minus infinity elsewhere."""
        seen = torch.from_numpy(visible).to(self._device)
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, float("-inf"))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
