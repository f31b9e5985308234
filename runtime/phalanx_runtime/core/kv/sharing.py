"""Shares pages between requests: a request skips tokens that a page holds, or will hold after this step.

    [0, found) pages found by key · [found, full) own pages, published at once · tail: own, partly filled

The first request with a chunk in an unwritten page writes it; others skip its slots, because a step writes a layer's KV before
its attention. The tail (after the last full page, without the last token) has no key: equal requests copy its page while a holder
runs, others copy the equal start of a cached page. Copies precede the pass, so a request waits a step if this one writes its
tail.

The last token is always computed, for its logits. Prompt logprobs need the whole prompt, unless they were delivered, and so does
the mean of its hidden states; the pages of such requests serve others.

With a window (`windowed_pages`) a request gets pages as it computes, and holds those that a layer may still read. If only some
layers have a window, pages have parts (`core.window_parts`), and tokens are computed again whose part is lost.
"""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_api.cache_curve import SIZES
from phalanx_api.cost import StepModel
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv.disk_tier import DiskPrefix, DiskTier
from phalanx_runtime.core.kv.host_loads import MAX_PINNED_SHARE, HostLoads, Lookup
from phalanx_runtime.core.kv.hot_prefixes import HotPrefixes
from phalanx_runtime.core.kv.miss_ratio import REFRESH_SHARE, MissRatioCurve
from phalanx_runtime.core.kv.page_index import Tail, TailPages
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.page_writes import PageWrites
from phalanx_runtime.core.kv.windowed_pages import WindowedPages
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder


class PrefixSharing:
    """Assigns the pages of one pool. Counters are since the start."""

    def __init__(self, pool: PagePool, model: str, is_on: bool = True, windowed: WindowedPages | None = None) -> None:
        self.pool, self.parts = pool, pool.parts
        self.writes = PageWrites(pool)
        self.windowed = windowed
        """If every layer has a window."""
        self.disk = DiskTier(pool, None if windowed is None else windowed.window.pages_before)
        self.queried_tokens = 0
        """Prompt tokens looked up."""
        self.hit_tokens = 0
        """Prompt tokens skipped."""
        self.allocated_pages = 0
        """Pages allocated for starting requests."""
        self.hot_prefixes = HotPrefixes()
        self.miss_ratio = MissRatioCurve(round(SIZES[-1] * pool.num_pages))
        """Of the full pages of prompts that may share."""
        self._loads = HostLoads(pool, self.miss_ratio)
        self._reuse = 0, 0.0
        """Lookups at the latest median of reuse distances, and that."""
        self._model = model
        self._is_on, self._tails = is_on, TailPages()

    @property
    def has_window(self) -> bool:
        """Whether requests drop what no layer reads any more."""
        return self.windowed is not None or self.parts is not None

    def reuse_pages(self) -> float:
        """Returns the median number of pages used between two uses of a page, a bit out of date."""
        curve, num_lookups = self.miss_ratio, self._reuse[0]
        if abs(curve.lookups - num_lookups) > REFRESH_SHARE * num_lookups:
            self._reuse = curve.lookups, curve.reuse_pages(0.5)
        return self._reuse[1]

    def make_keys(self, submitted: wire.Request) -> PrefixKeys:
        """Returns the empty key chain of a new request."""
        root = root_key(self._model, submitted.page_adapter, submitted.tenant, submitted.cache_salt)
        return PrefixKeys(root, self.pool.page_size, submitted.page_marks)

    def find(self, request: Request) -> list[int]:
        """Returns the pages that a waiting request could share now; with a window, leading ones may be `NULL_PAGE`."""
        if not self._can_share(request):
            return []
        keys = self._keys(request)[: self._num_full(request)]
        return self.pool.match(keys) if self.windowed is None else self.windowed.find(keys)

    def needs(self, request: Request, found: list[int]) -> tuple[int, int]:
        """Returns how many new pages a waiting request needs to start, and how many of those `found` count as free."""
        num_pages, num_null = self.pool.pages_for(len(request.tokens)), 0
        if self.windowed is not None:
            num_null = found.count(NULL_PAGE)
            num_pages = num_null + self.windowed.pages_to_start(num_pages - num_null)
        return num_pages - len(found), self.pool.num_unheld(found[num_null:] if num_null else found)

    def num_hit(self, found: list[int]) -> int:
        """Returns how many pages, of those that `find` returned, a request needs not compute."""
        return len(found) if self.parts is None else self.parts.num_hit(found)

    def find_on_disk(self, request: Request) -> DiskPrefix:
        """Returns what a held request could read from disk. Host memory keeps for it what it has before that."""
        return self.find_keys_on_disk(self._keys(request)[: self._num_full(request)] if self._can_share(request) else [])

    def find_keys_on_disk(self, keys: Sequence[bytes]) -> DiskPrefix:
        """Returns what could be read from disk of the pages with these keys. Host memory keeps what it has before that."""
        if self.windowed is None:
            return self.disk.find(keys)
        num_found = self.windowed.num_in_memory(keys)
        first = self.windowed.window.first_page(num_found * self.pool.page_size)
        for key in keys[first:num_found]:
            self.pool.host.keep([key])
        return self.disk.find_after(keys, num_found, first)

    def must_defer(self, request: Request, found: list[int], builder: StepBuilder) -> bool:
        """Returns whether a waiting request lacks only a tail that this step writes."""
        if len(found) < self._num_full(request) or not self._can_share(request):
            return False
        pages = self._tails.find(self._tail(request))
        if not pages or pages[0] not in builder.written_pages:
            return False
        return not found or self.writes.written(found[-1]) == self.pool.page_size

    def start(
        self, request: Request, found: list[int], builder: StepBuilder, model: StepModel | None = None, num_running: int = 0
    ) -> None:
        """Assigns all pages of a request, with a window its first ones: `found` by `find`, and new ones, of which host memory may
        have some. `num_running`: other requests, each of which may need a part."""
        pool, keys, pages, before = self.pool, self._keys(request), request.pages, request.num_computed
        is_first = not request.max_computed
        num_found = self._assign(request, found, builder, model)
        self.allocated_pages += len(pages.ids) - num_found
        pages.found_tokens = num_found * pool.page_size if self.parts is None else request.num_computed
        if is_first:
            num_prompt = request.params.num_prompt
            self.queried_tokens += num_prompt
            self.hot_prefixes.add(keys[: num_prompt // pool.page_size], num_prompt)
        if self._can_share(request):
            full = keys[: self._num_full(request)]
            if self.windowed is None:
                lookup = Lookup(full, num_found, is_first, num_running)
                self._loads.start(request, lookup, builder, model)
            elif is_first:
                self._loads.count(full, num_found)  # `windowed` has loaded them
        elif self.parts is not None:
            self.parts.start(pages, request.num_computed // pool.page_size)
        self._count_hits(request, before)
        self.skip_computed(request, builder)
        if request.num_computed == num_found * pool.page_size and self._can_share(request):
            self._copy_partial(request, num_found, builder)
        self._count_hits(request, before)
        self._publish(request, len(keys))
        self._offer_tail(request)

    def _assign(self, request: Request, found: list[int], builder: StepBuilder, model: StepModel | None) -> int:
        """Assigns the first pages of a request, and returns how many are found."""
        pool, pages, num_full = self.pool, request.pages, self._num_full(request)
        num_pages = pool.pages_for(len(request.tokens))
        if self.windowed is not None:
            keys = self._keys(request)[:num_full] if self._can_share(request) else []
            num_found = self.windowed.start(pages, keys, found=found, num_pages=num_pages, builder=builder, model=model)
            request.num_computed = pages.num_dropped * pool.page_size
            return num_found
        pool.reuse(found, num_full)
        # Pages that it evicts must not take the slots of those that it loads.
        slots = pool.host.pin(self._keys(request)[len(found) : num_full] if self._can_share(request) else (), MAX_PINNED_SHARE)
        own = pool.allocate(num_pages - len(found))
        pool.host.unpin(reversed(slots))
        assert own is not None, "admission checked the free pages"
        pages.ids = found + own
        pages.num_keyed = len(found)
        if self.parts is not None:
            request.num_computed = self.parts.num_hit(found) * pool.page_size
            self.parts.want(found, self.parts.num_full(found))
            self.parts.want(pages.ids, self.disk.num_known(self._keys(request)[:num_full], len(found)))
        return len(found)

    def hold_written(self, request: Request, num_computed: int) -> list[int]:
        """Holds and returns the fully written pages that `find` returns, for a request with `num_computed` tokens elsewhere."""
        if self.windowed is not None:
            keys = self._keys(request)[: self._num_full(request)] if self._can_share(request) else []
            return self.windowed.hold(keys, num_computed)
        found = self.find(request)
        size = self.pool.page_size
        num_written = next((i for i, page in enumerate(found) if self.pool.written(page) < size), len(found))
        if self.parts is not None:
            num_written = self.parts.num_readable(found[:num_written], num_computed)
        self.pool.share(found[:num_written])
        return found[:num_written]

    def adopt(self, request: Request, pages: list[int], num_held: int, num_computed: int) -> None:
        """Assigns pages with `num_computed` tokens, of which the first `num_held` were cached: hits of a new prompt.

        If pages have parts, the request holds those of its window already.
        """
        request.pages.ids, request.pages.num_keyed = pages, num_held
        request.num_computed = num_computed
        if self.windowed is not None:
            num_held = max(num_held, self.windowed.adopt(request.pages, num_computed))
        if not request.num_output:
            num_prompt = request.params.num_prompt
            self.queried_tokens += num_prompt
            self.hot_prefixes.add(self._keys(request)[: num_prompt // self.pool.page_size], num_prompt)
            self._count_hits(request, 0)
        request.max_computed = num_computed
        num_full = num_computed // self.pool.page_size
        self._publish(request, num_full)
        for page in pages[num_held:num_full]:
            self.pool.mark_written(page, self.pool.page_size)
        if self.parts is not None:
            # The source had computed more at the end than at the reservation: parts before its window did not arrive.
            for page in pages[max(num_held, self.parts.window.first_page(num_computed)) : num_full]:
                self.parts.mark_written(page, self.pool.page_size)
            self.parts.drop(request.pages, num_computed)

    def skip_computed(self, request: Request, builder: StepBuilder) -> bool:
        """Advances a request over written slots. Returns false if it must wait a step to copy its tail."""
        if not self._can_share(request) or request.num_uncomputed <= 1:
            return True
        pool, ids = self.pool, request.pages.ids
        before = position = request.num_computed
        size, last = pool.page_size, len(request.tokens) - 1
        num_full = self._num_full(request)
        keys = self._keys(request)[:num_full] if self.windowed is not None else ()
        while position < num_full * size:
            start = position // size * size
            if start // size == len(ids) and not (self.windowed and self.windowed.share_next(request.pages, keys)):
                break
            if self.parts and start // size == request.pages.part_end and not self.parts.share_next(request.pages):
                break
            end = start + self.writes.written(ids[start // size])
            if end <= position:
                break
            position = end
        request.num_computed = position
        if self.parts is not None and position > before:
            self.drop_unreadable(request, position)  # else what it skips could hold all parts
        is_ready = True
        if position == num_full * size < last:
            is_ready = self._copy_tail(request, num_full, builder)
        self._count_hits(request, before)
        return is_ready

    def record_written(self, chunk: ScheduledChunk, builder: StepBuilder) -> None:
        """Records that the step writes this chunk."""
        request, end, size = chunk.request, chunk.end, self.pool.page_size
        pages = request.pages
        if pages.is_chained and end // size > pages.num_keyed:
            self._publish(request, end // size)
        is_decode = chunk.count == 1 and end == request.num_tokens  # a decode shares its page once that is full
        for i in range((chunk.start - len(chunk.misplaced)) // size, end // size if is_decode else -(-end // size)):
            self.writes.mark_in_step(request, pages.ids[i], min(size, end - i * size), builder)
        if chunk.count > 1:
            self._offer_tail(request)

    def record_accepted(self, chunk: ScheduledChunk) -> None:
        """Records accepted draft tokens that are in place as written."""
        request, size = chunk.request, self.pool.page_size
        num_full = request.num_in_place // size
        if request.pages.is_chained and num_full > request.pages.num_keyed:
            self._publish(request, num_full)
        for page in request.pages.ids[chunk.start // size : num_full]:
            self.writes.mark(page, size)

    def grow(self, request: Request, start: int, count: int, rewrites: bool = False) -> int:
        """Returns how many of `count` tokens a request may compute from `start` on; `rewrites`: also those that pages hold."""
        if self.parts is not None:
            return self.parts.grow(request.pages, start, start + count, rewrites) - start
        return count if self.windowed is None else self.windowed.grow(request.pages, start, start + count) - start

    def drop_unreadable(self, request: Request, position: int) -> None:
        """With a window, drops the pages that no token at `position` or later reads."""
        pages = request.pages
        if pages.is_pinned:
            return
        if self.parts is not None:
            self.parts.drop(pages, position)
        if self.windowed is None:
            return
        unreadable = self.windowed.unreadable(pages, position)
        if unreadable:
            self._publish(request, unreadable.stop)
            self._tails.forget(pages.ids[unreadable.start : unreadable.stop])
            self.windowed.drop(pages, unreadable)

    def lacks_pages(self, request: Request) -> bool:
        """Returns whether a request needs dropped pages, because a plan was taken back that was to write what it had skipped."""
        pages = request.pages
        if self.parts is not None:
            return self.parts.lacks(pages, request.num_computed)
        return self.windowed is not None and pages.num_dropped > self.windowed.window.first_page(request.num_computed)

    def can_extend(self, chunk: ScheduledChunk) -> bool:
        """Returns whether no plan writes the slots after this chunk."""
        size = self.pool.page_size
        if not self.grow(chunk.request, chunk.end, 1):
            return False
        return self.writes.written(chunk.request.pages.ids[chunk.end // size]) <= chunk.end % size

    def release(self, request: Request) -> None:
        """Frees all pages of a request."""
        pages, held = request.pages, request.pages.held
        self._tails.forget(held)
        self.miss_ratio.use(pages.keys.keys[: request.num_computed // self.pool.page_size])
        if self.parts is not None:
            self.parts.release(pages)
        self.pool.release(held)
        pages.ids, pages.misplaced = [], []
        pages.num_dropped = pages.num_keyed = pages.num_sent = pages.found_tokens = 0
        pages.is_chained, pages.must_truncate = True, False
        request.max_computed = max(request.max_computed, request.num_computed)
        request.num_computed = 0
        request.speculation.num_drafted_pages = 0

    def _can_share(self, request: Request) -> bool:
        params = request.params
        if params.pooling is not None:
            return self._is_on and params.pooling == "last"
        return self._is_on and (params.sampling.prompt_logprobs is None or request.num_output > 0)

    def _num_full(self, request: Request) -> int:
        return (len(request.tokens) - 1) // self.pool.page_size

    def _keys(self, request: Request) -> list[bytes]:
        return request.pages.keys.extend(request.tokens) if self._is_on else []

    def _tail(self, request: Request) -> Tail:
        num_full = self._num_full(request)
        before = self._keys(request)[num_full - 1] if num_full else request.pages.keys.root
        return before, tuple(request.page_tokens(num_full * self.pool.page_size, -1))

    def _copy_tail(self, request: Request, num_full: int, builder: StepBuilder) -> bool:
        """Copies the tail from another page, or offers this request's. Returns false to wait a step."""
        if not self.grow(request, request.num_computed, 1):
            return True
        tail, own = self._tail(request), request.pages.ids[num_full]
        pages = self._tails.find(tail)
        if own in pages:
            return True
        if pages and pages[0] in builder.written_pages:
            return False
        if pages and self.writes.written(pages[0]) >= len(tail[1]):
            self.writes.copy(pages[0], own, len(tail[1]), builder)
            request.num_computed += len(tail[1])
            self.writes.mark_in_step(request, own, len(tail[1]), builder)
            self._tails.add(own, tail)
            return True
        self._tails.remove(tail)
        self._offer_tail(request)
        return True

    def _offer_tail(self, request: Request) -> None:
        num_full = self._num_full(request)
        if self._is_on and num_full * self.pool.page_size < len(request.tokens) - 1 and num_full < len(request.pages.ids):
            tail, own = self._tail(request), request.pages.ids[num_full]
            if not self._tails.find(tail):
                self._tails.add(own, tail)

    def _copy_partial(self, request: Request, index: int, builder: StepBuilder) -> None:
        """Copies the equal start of a cached page into page `index`."""
        if not index or request.num_uncomputed <= 1 or index == len(request.pages.ids):
            return
        ids, start = request.pages.ids, index * self.pool.page_size
        before = ids[index - 1] if self.windowed is None else self._keys(request)[index - 1]
        found = self.pool.match_partial(before, request.page_tokens(start, start + self.pool.page_size))
        if found is None or found[0] in builder.written_pages or found[0] == ids[index]:
            return
        same = min(found[1], self.writes.written(found[0]), request.num_uncomputed - 1)
        # The part that the request gets may be that of the page found.
        if same and self.grow(request, start, 1) and self.writes.written(found[0]) >= same:
            self.writes.copy(found[0], ids[index], same, builder)
            request.num_computed += same

    def _publish(self, request: Request, num_full: int) -> None:
        """Publishes the first `num_full` pages, up to a key of another page: with later ones the pool might not hold a request
        alone."""
        size, pages, keys = self.pool.page_size, request.pages, self._keys(request)
        if self.windowed is not None:
            self.windowed.publish(pages, keys[:num_full], request.page_tokens())
            return
        for i in range(pages.num_keyed, min(num_full, len(keys))):
            if not pages.is_chained:
                return
            parent = pages.ids[i - 1] if i else None
            own = request.page_tokens(i * size, (i + 1) * size)
            pages.is_chained = self.pool.publish(pages.ids[i], keys[i], parent, own)
            pages.num_keyed = i + 1

    def _count_hits(self, request: Request, before: int) -> None:
        """Counts prompt tokens skipped since `before`, except recomputed ones."""
        num_hits = min(request.num_computed, request.params.num_prompt) - max(before, request.max_computed)
        if num_hits > 0:
            request.pages.cached_tokens += num_hits
            self.hit_tokens += num_hits
        request.max_computed = max(request.max_computed, request.num_computed)
