"""Triton kernels of the rows on a device: the update by a plan, the inputs of a decode step, the sampled tokens.

Rows are never moved, so that their addresses are constant; a step reads them through `batch_rows`, with -1 for padding.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["update"])
def update_rows(
    update,
    tables,
    held,
    lengths,
    last_tokens,
    adapters,
    batch_rows,
    batch_indices,
    table_pages,
    BLOCK: tl.constexpr,
):
    """Applies entry `program_id(0)` of an update, layout as in `device_rows`; programs beyond the batch rows write padding.

    update: [words]; tables: [rows, table_pages]; held, lengths, last_tokens, adapters: [rows]; batch_rows, batch_indices:
    [programs]. Writes the appended pages, and one word of each other array. Bytes moved: 64 per entry, 8 per page.
    """
    entry = tl.program_id(0)
    num_rows = tl.load(update)
    num_entries = tl.load(update + 1)
    row = tl.load(update + 4 + entry, mask=entry < num_entries, other=-1)
    tl.store(batch_rows + entry, tl.where(entry < num_rows, row, -1))
    if entry < num_entries:
        columns = update + 4 + entry
        kept = tl.load(columns + num_entries)
        first_page = tl.load(columns + 2 * num_entries)
        num_pages = tl.load(columns + 3 * num_entries)
        token = tl.load(columns + 5 * num_entries)
        tl.store(batch_indices + entry, tl.load(columns + 6 * num_entries))
        held_before = tl.where(kept < 0, tl.load(held + row), kept)
        table = tables + row.to(tl.int64) * table_pages
        for first in range(0, num_pages, BLOCK):
            index = first + tl.arange(0, BLOCK)
            is_page = index < num_pages
            page = tl.load(update + first_page + index, mask=is_page, other=0)
            tl.store(table + held_before + index, page, mask=is_page & (held_before + index < table_pages))
        tl.store(held + row, held_before + num_pages)
        tl.store(lengths + row, tl.load(columns + 4 * num_entries))
        tl.store(last_tokens + row, token, mask=token >= 0)
        adapter = tl.load(columns + 7 * num_entries)
        tl.store(adapters + row, adapter, mask=adapter >= 0)


@triton.jit(do_not_specialize=["kv_heads", "page_size", "window"])
def build_decode_inputs(
    batch_rows,
    tables,
    lengths,
    last_tokens,
    tokens,
    positions,
    slots,
    batch_lengths,
    batch_tables,
    part_of,
    adapters,
    pieces,
    adapter_slots,
    kv_heads,
    page_size,
    table_pages,
    window,
    KV_HEADS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    HAS_ADAPTERS: tl.constexpr,
):
    """Writes the inputs of batch row `program_id(0)`: its token, position, slots, length and page table.

    tokens, positions, batch_lengths: [batch]; slots: [batch * kv_heads]; batch_tables: [batch, table_pages], in blocks of BLOCK
    pages up to the row's length: what follows is not written. With a window, length and table start at the first page that the
    token reads, because the row dropped those before. With parts, slots and table have those of the pages, `part_of`: [pages].
    With adapters, pieces, [batch, 3] int64, has one of each row, `[slot, start, stop]` as `StepAdapters`, empty for a row without
    an adapter, and adapter_slots, [batch] int64, its slot or -1; adapters: [rows]. Padding rows have token, position and length
    0, slots of -1, which no kernel writes, an empty piece and no adapter. Bytes moved per row: 32 + 8 * kv_heads, 36 with
    adapters, and 8 per page.
    """
    batch = tl.program_id(0)
    row = tl.load(batch_rows + batch)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    length = tl.load(lengths + row, mask=is_row, other=0)
    position = tl.maximum(length - 1, 0)
    tl.store(tokens + batch, tl.load(last_tokens + row, mask=is_row, other=0).to(tl.int64))
    tl.store(positions + batch, position.to(tl.int64))

    if HAS_ADAPTERS:
        adapter = tl.load(adapters + row, mask=is_row, other=0).to(tl.int64)
        piece = pieces + 3 * batch
        tl.store(piece, tl.maximum(adapter - 1, 0))
        tl.store(piece + 1, batch.to(tl.int64))
        tl.store(piece + 2, batch.to(tl.int64) + (adapter > 0).to(tl.int64))
        tl.store(adapter_slots + batch, adapter - 1)

    table = tables + row.to(tl.int64) * table_pages
    page = tl.load(table + position // page_size, mask=is_row, other=0).to(tl.int64)
    if HAS_PARTS:
        page = tl.load(part_of + page).to(tl.int64)
    head = tl.arange(0, KV_HEADS_PADDED)
    slot = (page * kv_heads + head) * page_size + position % page_size
    tl.store(slots + batch * kv_heads + head, tl.where(is_row, slot, -1), mask=head < kv_heads)

    batch_table = batch_tables + batch.to(tl.int64) * table_pages
    if HAS_WINDOW:
        skipped = tl.maximum(length - window, 0) // page_size
        tl.store(batch_lengths + batch, length - skipped * page_size)
        for first in range(0, tl.cdiv(length, page_size) - skipped, BLOCK):
            index = first + tl.arange(0, BLOCK)
            pages = tl.load(table + skipped + index, mask=skipped + index < table_pages, other=0)
            if HAS_PARTS:
                pages = tl.load(part_of + pages)
            tl.store(batch_table + index, pages)
    else:
        tl.store(batch_lengths + batch, length)
        for first in range(0, tl.cdiv(length, page_size), BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(batch_table + index, tl.load(table + index))


@triton.jit(do_not_specialize=["num_rows"])
def record_tokens(
    sampled,
    batch_rows,
    last_tokens,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Writes the sampled token of each batch row to the row's `last_tokens`; padding rows write nothing.

    sampled, batch_rows: [num_rows]; last_tokens: [rows]. Bytes moved: 12 to 16 per row.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(batch_rows + index, mask=index < num_rows, other=-1)
    token = tl.load(sampled + index, mask=index < num_rows, other=0)
    tl.store(last_tokens + row, token.to(tl.int32), mask=row >= 0)


@triton.jit(do_not_specialize=["num_rows"])
def store_tokens(
    host,
    sampled,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Copies sampled tokens to memory of the host. sampled, host: [num_rows] int64. Bytes moved: 16 per row."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + index, tl.load(sampled + index, mask=index < num_rows, other=0), mask=index < num_rows)
