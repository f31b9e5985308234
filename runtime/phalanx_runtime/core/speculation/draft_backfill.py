"""Schedules tokens that a draft model lacks, before it drafts.

A step without draft tokens skips the draft model, so pages lack its KV until the request drafts again. The pool counts drafted
slots per page, so found, shared and copied pages keep that KV.
"""

from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder


def num_drafted(pool: PagePool, request: Request) -> int:
    """Returns how many leading tokens have the draft model's KV."""
    ids, speculation = request.pages.ids, request.speculation
    num_pages = speculation.num_drafted_pages
    while num_pages < len(ids) and pool.drafted(ids[num_pages]) == pool.page_size:
        num_pages += 1
    if speculation.method != "none":
        speculation.num_drafted_pages = num_pages
    return num_pages * pool.page_size + (pool.drafted(ids[num_pages]) if num_pages < len(ids) else 0)


def num_missing(pool: PagePool, chunk: ScheduledChunk) -> int:
    """Returns how many tokens before the chunk the draft model lacks."""
    return max(0, chunk.start - num_drafted(pool, chunk.request))


def add_backfill(pool: PagePool, builder: StepBuilder, chunk: ScheduledChunk, end: int) -> None:
    """Adds the missing tokens before `end`, within the step's budget."""
    first = min(num_drafted(pool, chunk.request), end)
    chunk.backfill = range(first, min(end, first + max(0, builder.backfill_budget)))
    builder.backfill_budget -= len(chunk.backfill)
    builder.drafted_pages.update(mark_drafted(pool, chunk, chunk.backfill.stop))


def mark_drafted(pool: PagePool, chunk: ScheduledChunk, end: int) -> list[int]:
    """Records that the draft model computes the tokens before `end`. Returns their pages."""
    size, request = pool.page_size, chunk.request
    marked = request.pages.ids[request.speculation.num_drafted_pages : pool.pages_for(end)]
    for i, page in enumerate(marked, request.speculation.num_drafted_pages):
        pool.mark_drafted(page, min(size, end - i * size))
    return marked


def drafted_when_sent(before: int | None, first: int, end: int, num_drafted_now: int) -> int:
    """Returns how many leading tokens a move's target has with the draft model's KV, once positions [first, end) are sent.

    `before`: the previous result, if any. KV that was missing when its page was sent stays missing.
    """
    return min(num_drafted_now, end) if before is None or before == first else before
