"""Inputs of decode steps, built on the device from `DeviceRows` into memory at constant addresses.

A step of size B computes the first B batch rows, in the order of the plan. `BatchBuilder` is the reference; it sorts by length.
"""

from dataclasses import replace

import torch
from torch import Tensor

from phalanx_runtime.model.attention.paged import Segments, StepBatch
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, power_of_two, variant_of
from phalanx_runtime.model.operators import operator
from phalanx_runtime.rank.device.device_rows import DeviceRows, table_block
from phalanx_runtime.rank.device.triton_kernels import build_decode_inputs


@operator(
    "build_decode_inputs(Tensor batch_rows, Tensor tables, Tensor lengths, Tensor last_tokens, Tensor(a!) tokens,"
    " Tensor(b!) positions, Tensor(c!) slots, Tensor(d!) batch_lengths, Tensor(e!) batch_tables, Tensor? part_of,"
    " Tensor adapters, Tensor(f!)? pieces, Tensor(g!)? adapter_slots, int page_size, int block, int window)"
)
def _build(
    batch_rows: Tensor,
    tables: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    batch_lengths: Tensor,
    batch_tables: Tensor,
    part_of: Tensor | None,
    adapters: Tensor,
    pieces: Tensor | None,
    adapter_slots: Tensor | None,
    page_size: int,
    block: int,
    window: int,
) -> None:
    kv_heads = len(slots) // len(tokens)
    arguments = {
        "batch_rows": batch_rows,
        "tables": tables,
        "lengths": lengths,
        "last_tokens": last_tokens,
        "tokens": tokens,
        "positions": positions,
        "slots": slots,
        "batch_lengths": batch_lengths,
        "batch_tables": batch_tables,
        "part_of": tables if part_of is None else part_of,
        "adapters": adapters,
        "pieces": tokens if pieces is None else pieces,
        "adapter_slots": tokens if adapter_slots is None else adapter_slots,
        "kv_heads": kv_heads,
        "page_size": page_size,
        "table_pages": tables.shape[1],
        "window": window,
        "KV_HEADS_PADDED": power_of_two(kv_heads),
        "BLOCK": block,
        "HAS_WINDOW": window > 0,
        "HAS_PARTS": part_of is not None,
        "HAS_ADAPTERS": pieces is not None,
    }
    launch(build_decode_inputs, (len(tokens),), arguments)


def input_variant(
    kv_heads: int, max_pages: int, has_window: bool = False, has_parts: bool = False, *, has_adapters: bool = False
) -> KernelVariant:
    """Returns the variant of `DecodeInputs` with at most `max_pages` per row."""
    block = table_block(max_pages)
    arguments = {
        **dict.fromkeys(build_decode_inputs.arg_names, torch.int32),
        **dict.fromkeys(("tokens", "positions", "slots", "pieces", "adapter_slots"), torch.int64),
        **dict.fromkeys(("kv_heads", "page_size", "window"), 1),
        "table_pages": block,
        "KV_HEADS_PADDED": power_of_two(kv_heads),
        "BLOCK": block,
        "HAS_WINDOW": has_window,
        "HAS_PARTS": has_parts,
        "HAS_ADAPTERS": has_adapters,
    }
    return variant_of(build_decode_inputs, arguments)


class _BatchTables:
    """Tensors of the layers that share pages: slots, [rows * kv_heads], lengths, [rows], and page tables, [rows, pages]."""

    def __init__(self, rows: DeviceRows, kv_heads: int) -> None:
        self.slots = torch.zeros(len(rows.held) * kv_heads, dtype=torch.int64, device=rows.held.device)
        self.lengths = torch.zeros_like(rows.lengths)
        self.tables = torch.zeros_like(rows.tables)


class DecodeInputs:
    """Tensors of decode steps up to the number of rows. All sizes share the same memory."""

    def __init__(self, rows: DeviceRows, kv_heads: int, window: int = 0) -> None:
        """`window`: as in `PoolShape`."""
        max_rows, device = len(rows.held), rows.held.device
        self.rows = rows
        has_parts = rows.part_of is not None
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """[rows]: the token that each batch row sampled in the latest step; any value for padding rows."""
        self._kv_heads = kv_heads
        self._window = 0 if has_parts else window
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._indices = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._pieces = torch.zeros(max_rows, 3, dtype=torch.int64, device=device)
        self._adapter_slots = torch.full_like(self._tokens, -1)
        self._tables = _BatchTables(rows, kv_heads)
        self._part_tables = _BatchTables(rows, kv_heads) if has_parts else None
        self._part_window = window
        self._batches: dict[tuple[int, bool], StepBatch] = {}

    def batch(self, size: int, *, has_adapters: bool = False) -> StepBatch:
        """Returns the tensors of steps of this size, made at the first call, before a capture. Only `segments`, no bands.

        `has_adapters`: with a slot and a piece of each row; the piece is empty for a row without an adapter.
        """
        key = (size, has_adapters)
        if key not in self._batches:
            batch = self._batch(size, self._tables)
            if self._part_tables is not None:
                batch = replace(batch, windowed=self._batch(size, self._part_tables))
            self._batches[key] = replace(batch, adapters=self._adapters(size)) if has_adapters else batch
        return self._batches[key]

    def _batch(self, size: int, tables: _BatchTables) -> StepBatch:
        segments = Segments(
            counts=[1] * size,
            num_decodes=size,
            starts=self._starts[: size + 1],
            lengths=tables.lengths[:size],
            tables=tables.tables[:size],
        )
        segments.blocks(1)  # copied from the host: not within a capture
        return StepBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            slots=tables.slots[: size * self._kv_heads],
            bands=[],
            chunks=[],
            logits_indices=self._indices[:size],
            segments=lambda: segments,
        )

    def _adapters(self, size: int) -> StepAdapters:
        own = {"rows": self._indices[:size], "table": self._pieces[:size], "slots": self._adapter_slots[:size]}
        return StepAdapters(**own, pieces=())

    def batch_rows(self, size: int) -> Tensor:
        """Returns the rows of a step of this size, [size] int32, -1 for padding."""
        return self.rows.batch_rows[:size]

    def build(self, size: int, *, has_adapters: bool = False) -> StepBatch:
        """Fills the tensors of this size, by a launch and one more for parts, and returns them. See `batch`."""
        batch = self.batch(size, has_adapters=has_adapters)
        self._fill(batch, self._window, None)
        if batch.windowed is not None:
            self._fill(batch.windowed, self._part_window, self.rows.part_of)
        return batch

    def _fill(self, batch: StepBatch, window: int, part_of: Tensor | None) -> None:
        rows, segments = self.rows, batch.segments()
        _build(
            self.batch_rows(len(batch.tokens)),
            rows.tables,
            rows.lengths,
            rows.last_tokens,
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots,
            batch_lengths=segments.lengths,
            batch_tables=segments.tables,
            part_of=part_of,
            page_size=rows.page_size,
            adapters=rows.adapters,
            pieces=None if batch.adapters is None else batch.adapters.table,
            adapter_slots=None if batch.adapters is None else batch.adapters.slots,
            block=rows.block,
            window=window,
        )

    def batch_indices(self, size: int) -> Tensor:
        """Returns the output indices that a step of this size samples, [size] int32; any value for padding."""
        return self.rows.batch_indices[:size]
