"""What a draft model computes of requests beside its drafts: tokens that it lacks, before it is asked to go on from them.

    tokens    |== drafted ==|-- missing --|          positions that the target has computed, or computes now

    rests     nothing is computed: a request without proposals costs the draft nothing, and its pages lack what it decodes
    drafts    what is missing is computed in the step that drafts again, up to the request's own last token
    prompts   are computed as they come while drafts pay, for then they will be wanted

Pages are counted, not requests: who finds a page by its key, shares or copies it, finds what the draft computed of it, and
catches up with the rest. Two that lack the same page both compute it, alike. What is counted follows from the plans, in whose
order the ranks compute, so that nothing has to be heard of them.
"""

from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder


def num_drafted(pool: PagePool, request: Request) -> int:
    """How many of the first tokens of a running request lie in its pages as a draft model computed them."""
    pages, first = request.pages, 0 if request.proposing is None else request.proposing.num_drafted_pages
    while first < len(pages) and pool.drafted(pages[first]) == pool.page_size:
        first += 1
    if request.proposing is not None:
        request.proposing.num_drafted_pages = first
    return first * pool.page_size + (pool.drafted(pages[first]) if first < len(pages) else 0)


def num_missing(pool: PagePool, chunk: ScheduledChunk) -> int:
    """How many tokens before the chunk a draft model has not computed."""
    return max(0, chunk.start - num_drafted(pool, chunk.request))


def catch_up(pool: PagePool, making: StepBuilder, chunk: ScheduledChunk, end: int) -> int:
    """Lets the draft compute what it lacks before `end`, as much as the step has room for; how many tokens that are."""
    first = min(num_drafted(pool, chunk.request), end)
    chunk.behind = range(first, min(end, first + max(0, making.draft_room)))
    making.draft_room -= len(chunk.behind)
    mark(pool, making, chunk, chunk.behind.stop)
    return len(chunk.behind)


def mark(pool: PagePool, making: StepBuilder | None, chunk: ScheduledChunk, end: int) -> None:
    """The draft has computed the request up to here, in this step if one is given."""
    size, request = pool.page_size, chunk.request
    for at in range(request.proposing.num_drafted_pages if request.proposing is not None else 0, pool.pages_for(end)):
        pool.mark_drafted(request.pages[at], min(size, end - at * size))
        if making is not None:
            making.drafted.add(request.pages[at])


def drafted_when_sent(before: int | None, first: int, end: int, now: int) -> int:
    """How many of the first tokens a target of a move has with what the draft computed, once positions [first, end) are sent.

    before: the same for what was sent before, None for nothing; now: how many it has computed by now. What went without has to
    be computed there, whatever is computed here afterwards.
    """
    return min(now, end) if before is None or before == first else before
