"""Builds the tensors of a step from its plan.

Decoding requests come first, sorted by length, in bands padded to one length each; chunks follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.core.draft_tree import ROOT, levels
from phalanx_runtime.core.step_plan import LAST_SAMPLED, NewRow, StepPlan
from phalanx_runtime.model.attention.paged import AttentionChunk, DecodeBand, LayerCache, Segments, StepBatch
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.copies import Array, upload
from phalanx_runtime.model.states.step import StepRows
from phalanx_runtime.rank.step.adapters import adapter_rows
from phalanx_runtime.rank.step.images import EmbedImages, forget_pixels, no_images, whole_images, without_pixels
from phalanx_runtime.rank.step.lazy_parts import LazyMasks, LazyParts
from phalanx_runtime.rank.step.page_tables import CacheShape, Ints, PageTables, TableView
from phalanx_runtime.rank.step.pooling import pooled_chunks
from phalanx_runtime.rank.step.positions import positions_of, with_cells

MAX_PADDING_BYTES = 1 << 20
"""Padding per layer above which a further band, about 50 us per layer, is cheaper."""


@dataclass(frozen=True, slots=True)
class PromptLogprobRange:
    """Prompt tokens with requested logprobs."""

    request: int
    start: int
    tokens: list[int]
    top: int
    """Number of top logprobs."""

    @property
    def positions(self) -> range:
        """Positions with their logits: one before each token."""
        return range(self.start - 1, self.start - 1 + len(self.tokens))


def prompt_logprob_ranges(plan: StepPlan, rows: Mapping[int, NewRow]) -> list[PromptLogprobRange]:
    """Returns the prompt tokens that get logprobs in this step. `rows` includes admitted ones.

    Token 0 has no logprobs; a request with output has had its own. The token after a chunk is in `NewRow.history`.
    """
    ranges = []
    for request, row in enumerate(plan.rows):
        new = rows[row]
        if new.sampling.prompt_logprobs is None or len(new.history) > new.num_prompt:
            continue
        start = plan.starts[request]
        stop = min(start + plan.counts[request], new.num_prompt - 1)
        if start < stop:
            tokens = new.history[start + 1 : stop + 1]
            ranges.append(PromptLogprobRange(request, start + 1, tokens, new.sampling.prompt_logprobs))
    return ranges


def band_sizes(num_pages: list[int], max_padding: int) -> list[int]:
    """Cuts descending page counts into bands with at most `max_padding` pages of padding."""
    sizes: list[int] = []
    width, padding = 0, 0
    for count in num_pages:
        if sizes and padding + width - count <= max_padding:
            sizes[-1] += 1
            padding += width - count
        else:
            sizes.append(1)
            width, padding = count, 0
    return sizes


@lru_cache(maxsize=1024)
def tree_mask(parents: tuple[int, ...]) -> NDArray[np.bool_]:
    """Returns the tree-attention mask: `[i, j]` is true if draft token j is i or an ancestor of i."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def _drafts(plan: StepPlan, order: Ints) -> list[int]:
    """Returns the draft tokens of each request, in packed order; empty without any."""
    depth_of = {path.request: path.depth for path in plan.paths}
    return [depth_of.get(request, 0) for request in order.tolist()] if depth_of else []


def _ranges_before(ends: Ints, counts: Ints) -> Ints:
    """Concatenates the `counts[i]` integers before each `ends[i]`."""
    offsets = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
    ranges: Ints = np.repeat(ends - counts - offsets, counts) + np.arange(counts.sum())
    return ranges


@dataclass(frozen=True, slots=True)
class _Packed:
    """The requests of a step in packed order: decodes, then chunks."""

    rows: Ints
    starts: Ints
    counts: Ints
    firsts: Ints
    """First token of each, and the end."""
    order: Ints
    """Index of each in the plan."""
    num_decodes: int
    trees: Mapping[int, Sequence[int]]
    """Parents of draft trees by index in the plan."""
    images: Mapping[int, Sequence[range]]
    """By row: tokens of images that attend to each other, of images with tokens in the step."""


class BatchBuilder:
    """Page tables, and the tensors of steps."""

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        has_adapters: bool = False,
        has_states: bool = False,
        embed: EmbedImages = no_images,
    ) -> None:
        """`has_adapters`: requests may have adapters. `has_states`: layers have a state per request."""
        self.params: dict[int, NewRow] = {}
        """Each row's request, as admitted."""
        self.last_tokens: Tensor | None = None
        """[rows], on the device: the tokens that LAST_SAMPLED names, if plans have it."""
        self.await_pages: Callable[[LayerCache], None] | None = None
        """`StepBatch.await_pages` of the next steps."""
        self._shape = shape
        self.dtype = dtype
        """Of activations."""
        self._device = device
        self.has_adapters = has_adapters
        """See `__init__`."""
        self._has_states = has_states
        self._embed = embed
        self._tables = PageTables()
        self._pages = TableView(self._tables, shape, None if shape.has_parts else shape.window)
        self._parts = TableView(self._tables, shape, shape.window, has_parts=True) if shape.has_parts else None

    def build(self, plan: StepPlan) -> StepBatch:
        """Updates the tables and returns the tensors."""
        self.update(plan)
        return self.tensors(plan)

    def tensors(self, plan: StepPlan) -> StepBatch:
        """Returns the tensors, with tables up to date."""
        rows, starts, counts = (np.asarray(part, np.int64) for part in (plan.rows, plan.starts, plan.counts))
        trees = {path.request: path.parents for path in plan.paths if path.parents}
        is_chunk = counts != 1
        is_chunk[list(trees)] = True
        order = np.lexsort((-self._pages.contexts(starts, counts)[0], is_chunk))
        offsets = np.concatenate(([0], np.cumsum(counts)))[:-1]
        rows, starts, counts = (part[order] for part in (rows, starts, counts))
        firsts = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
        slots = np.repeat(starts, counts) + within
        tokens = np.asarray(plan.tokens, np.int64)[np.repeat(offsets[order], counts) + within]
        unknown = np.flatnonzero(tokens == LAST_SAMPLED)
        np.maximum(tokens, 0, out=tokens)  # NO_TOKEN becomes 0
        row_of_token = np.repeat(rows, counts)
        index_of = np.empty_like(order)
        index_of[order] = np.arange(len(order))
        params = [self.params.get(row) for row in rows.tolist()]
        placed = with_cells(positions_of(slots, plan, trees, firsts[1:][index_of]), params, firsts)
        logits_indices, num_pooled = self._logits_indices(plan, firsts, index_of)
        views = [self._pages] if self._parts is None else [self._pages, self._parts]
        parts = self._upload(
            *(tokens, placed.positions, logits_indices),
            *(view.slots(row_of_token, slots) for view in views),
            *((unknown, row_of_token[unknown]) if len(unknown) else ()),
        )
        images = whole_images(self.params, rows, starts, counts)
        num_decodes = len(rows) - int(is_chunk.sum())
        packed = _Packed(rows, starts, counts, firsts, order, num_decodes=num_decodes, trees=trees, images=images)
        batch = StepBatch(
            tokens=self._fill_last_tokens(parts[0], *parts[-2:]) if len(unknown) else parts[0],
            positions=parts[1],
            slots=parts[3],
            bands=(),
            chunks=(),
            logits_indices=parts[2],
            num_pooled=num_pooled,
            adapters=self._adapter_rows(rows, counts) if self.has_adapters else None,
            rows=StepRows(*(rows.tolist(), starts.tolist(), counts.tolist()), _drafts(plan, order)) if self._has_states else None,
            embeddings=self._embed(self.params, rows, starts, counts),
            cells=None if placed.cells is None else self._tensor(placed.cells),
            has_images_within=bool(images),
            await_pages=self.await_pages,
        )
        forget_pixels(self.params, rows, starts + counts)
        batch = self._with_tables(batch, packed, self._pages)
        if self._parts is None:
            return batch
        return replace(batch, windowed=self._with_tables(replace(batch, slots=parts[4]), packed, self._parts))

    def _adapter_rows(self, rows: Ints, counts: Ints) -> StepAdapters | None:
        slots = [self.params[row].adapter for row in rows.tolist()]
        return adapter_rows(slots, counts.tolist(), lambda arrays: self._upload(*arrays)) if any(slots) else None

    def _with_tables(self, batch: StepBatch, packed: _Packed, view: TableView) -> StepBatch:
        """Returns the batch with the tables of a view."""
        rows, counts, order, num_decodes = packed.rows, packed.counts, packed.order, packed.num_decodes
        lengths, skipped = view.contexts(packed.starts, counts)
        size_of_page = self._shape.page_size

        def chunks() -> list[AttentionChunk]:
            columns = (packed.firsts[:-1], rows, counts, lengths, skipped, order)
            requests = zip(*(column[num_decodes : len(rows)].tolist() for column in columns), strict=True)
            return [
                self._chunk(
                    first,
                    view,
                    view.table(row, num_skipped, length),
                    size,
                    length,
                    parents=packed.trees.get(request, []),
                    images=[
                        range(max(0, image.start - num_skipped * size_of_page), image.stop - num_skipped * size_of_page)
                        for image in packed.images.get(row, ())
                    ],
                )
                for first, row, size, length, num_skipped, request in requests
            ]

        decodes = slice(num_decodes)
        return replace(
            batch,
            bands=LazyParts(partial(self._bands, view, rows[decodes], lengths[decodes], skipped[decodes])),
            chunks=LazyParts(chunks),
            segments=cache(partial(self._segments, packed, view, lengths=lengths, skipped=skipped)),
        )

    def _logits_indices(self, plan: StepPlan, firsts: Ints, index_of: Ints) -> tuple[Ints, int]:
        """Draws with their draft tokens, prompt logprobs, pooled positions; and the number of these.

        `firsts`: first token of each request in packed order. `index_of`: each request's place in it.
        """
        ends = firsts[1:][index_of[[request for request, _ in plan.draws]]] if plan.draws else np.zeros(0, np.int64)
        prompt_logits = [
            firsts[index_of[part.request]] - plan.starts[part.request] + np.asarray(part.positions)
            for part in prompt_logprob_ranges(plan, self.params)
        ]
        pooled = [
            firsts[index_of[chunk.request]] - chunk.start + np.asarray(chunk.positions, np.int64)
            for chunk in pooled_chunks(plan, self.params)
        ]
        draws = _ranges_before(ends, np.asarray(plan.depths, np.int64) + 1)
        return np.concatenate([draws, *prompt_logits, *pooled]), sum(map(len, pooled))

    def _fill_last_tokens(self, tokens: Tensor, unknown: Tensor, rows: Tensor) -> Tensor:
        """Replaces the tokens at `unknown` by those of `rows`, on the device. Raises ValueError without `last_tokens`."""
        if self.last_tokens is None:
            raise ValueError("the plan has a token that only the device knows, and the builder has no `last_tokens`")
        return tokens.index_copy_(0, unknown, self.last_tokens.index_select(0, rows).to(tokens.dtype))

    def _segments(self, packed: _Packed, view: TableView, *, lengths: Ints, skipped: Ints) -> Segments:
        """All in packed order."""
        rows, counts = packed.rows, packed.counts
        parents = [packed.trees.get(int(request), ()) for request in packed.order]
        width = int(-(-lengths.max() // self._shape.page_size)) if len(lengths) else 1
        ancestors = np.zeros(int(counts.sum()), np.int32)
        ends = np.cumsum(counts)
        for tree, end, count in zip(parents, ends, counts, strict=True):
            if tree:
                bits = tree_mask(tuple(tree)) @ (1 << np.arange(len(tree)))
                size = min(len(tree), int(count))
                ancestors[end - size : end] = bits[-size:]
        tree_levels = np.zeros((len(parents), max(map(len, parents), default=0)), np.int32)
        for row, tree in enumerate(parents):
            tree_levels[row, : len(tree)] = levels(tuple(tree))
        arrays = [np.concatenate(([0], ends)), lengths, view.tables(rows, skipped, width)]
        if any(parents):
            arrays += [np.asarray([len(tree) for tree in parents]), tree_levels, ancestors]
        starts, device_lengths, tables, *tree_parts = self._upload(*(array.astype(np.int32) for array in arrays))
        return Segments(
            counts=counts.tolist(),
            num_decodes=sum(count == 1 and not tree for count, tree in zip(counts.tolist(), parents, strict=True)),
            starts=starts,
            lengths=device_lengths,
            tables=tables,
            tree=tree_parts,
        )

    def stray_slots(self, plan: StepPlan, has_parts: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the slots that strays are copied from and to, [strays * kv_heads] each. `has_parts`: those of parts."""
        view = self._parts if has_parts and self._parts is not None else self._pages
        rows = np.repeat([plan.rows[request] for request, _ in plan.relocations], [len(slots) for _, slots in plan.relocations])
        sources = np.concatenate([np.asarray(slots, np.int64) for _, slots in plan.relocations])
        targets = np.concatenate([np.arange(-len(slots), 0) + plan.starts[request] for request, slots in plan.relocations])
        return self._tensor(view.slots(rows, sources)), self._tensor(view.slots(rows, targets))

    def empty_hidden(self, num_tokens: int, width: int) -> Tensor:
        """Returns memory for hidden states, [num_tokens, width]."""
        return torch.empty((num_tokens, width), dtype=self.dtype, device=self._device)

    def update(self, plan: StepPlan) -> None:
        """Applies the plan to rows and page tables."""
        for new in plan.admitted:
            self.params[new.row] = without_pixels(new, new.num_prompt) if self._embed is no_images else new
        self._tables.update(plan, self._shape.has_parts)

    def _bands(self, view: TableView, rows: Ints, lengths: Ints, skipped: Ints) -> list[DecodeBand]:
        pages = -(-lengths // self._shape.page_size)
        widths = np.maximum.accumulate(pages[::-1])[::-1]  # without skipped pages the order is not descending
        max_padding = MAX_PADDING_BYTES // max(self._shape.layer_page_bytes, 1)
        bands, start = [], 0
        for size in band_sizes(widths.tolist(), max_padding):
            band = slice(start, start + size)
            tables = view.tables(rows[band], skipped[band], int(widths[start]))
            bands.append(self._band(start, view, tables, lengths[band], pages[band]))
            start += size
        return bands

    def _band(self, start: int, view: TableView, tables: Ints, lengths: Ints, pages: Ints) -> DecodeBand:
        width = tables.shape[1]
        columns = np.arange(width)
        # Padding repeats the row's own first page, so that no page of another request is read.
        tables = np.where(columns < pages[:, None], tables, tables[:, :1])
        cache_rows = view.cache_rows(tables)
        columns = np.arange(width * self._shape.page_size)

        def mask(window: int | None) -> Tensor:
            causal = columns < lengths[:, None]
            visible = causal if window is None else causal & (columns >= lengths[:, None] - window)
            return self._mask(visible[:, None, None, :])

        return DecodeBand(
            start=start,
            size=len(lengths),
            cache_rows=self._tensor(cache_rows.reshape(-1)),
            masks=LazyMasks(mask),
            tables=self._tensor(tables),
            lengths=lengths.tolist(),
            device_lengths=self._tensor(lengths),
        )

    def _chunk(
        self,
        start: int,
        view: TableView,
        pages: Ints,
        size: int,
        length: int,
        *,
        parents: Sequence[int],
        images: Sequence[range],
    ) -> AttentionChunk:
        """`images`: see `_Packed`, counted as `length` is."""
        is_whole = size == length
        cache_rows = None if is_whole else self._tensor(view.cache_rows(pages).reshape(-1))

        def mask(window: int | None) -> Tensor | None:
            if is_whole and not parents and not images and (window is None or window >= length):
                return None
            columns = np.arange(length)
            visible = columns <= columns[length - size :, None]
            for image in images:
                visible[max(0, image.start - (length - size)) : image.stop - (length - size), image.start : image.stop] = True
            if parents:
                columns[length - len(parents) :] = length - len(parents) + np.asarray(levels(tuple(parents)))
                branches = tree_mask(tuple(parents))[-size:]
                visible[size - len(branches) :, length - len(parents) :] = branches
            if window is not None:
                visible &= columns > columns[length - size :, None] - window
            return self._mask(visible)

        return AttentionChunk(
            start=start,
            size=size,
            length=length,
            cache_rows=cache_rows,
            masks=LazyMasks(mask),
            table=self._tensor(pages),
            parents=tuple(parents),
        )

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        """Additive: 0 where visible, else minus infinity."""
        (keep,) = self._upload(visible)
        return torch.zeros(visible.shape, dtype=self.dtype, device=self._device).masked_fill_(~keep, float("-inf"))

    def _tensor(self, values: Ints) -> Tensor:
        return self._upload(values)[0]

    def _upload(self, *arrays: Array) -> list[Tensor]:
        return upload(arrays, self._device)
