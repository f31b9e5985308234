"""Takes back a plan that the ranks could not compute."""

from collections.abc import Iterable

from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder


def take_back(builder: StepBuilder, running: Iterable[Request], sharing: PrefixSharing) -> None:
    """Undoes the latest plan in flight: pages count as before, its tokens are computed by later plans.

    The ranks applied the plan's pages and copies, and may have changed the state of its rows; so the next plan sends these rows
    with all their pages again.
    """
    for chunk in builder.chunks:
        _take_back_chunk(chunk, sharing)
    for i, _ in builder.draws:
        builder.chunks[i].request.num_pending -= 1
    for request in running:
        sharing.take_back(request, builder)
        if builder.drafted_pages:
            request.speculation.num_drafted_pages = 0  # counted again
    for page in builder.drafted_pages:
        sharing.pool.unmark_drafted(page)
    for page, write in builder.written_pages.items():
        sharing.pool.unmark_written(page, write.slots)


def _take_back_chunk(chunk: ScheduledChunk, sharing: PrefixSharing) -> None:
    request, pages = chunk.request, chunk.request.pages
    request.in_flight -= 1
    request.num_computed = chunk.start
    if chunk.draft.depth and len(pages.ids) > chunk.num_own_pages:
        sharing.pool.release(pages.ids[chunk.num_own_pages :])
        del pages.ids[chunk.num_own_pages :]
    pages.num_sent, pages.must_truncate = 0, False
