"""Pages of requests if every layer has a sliding window: a request holds those that a layer may still read.

    admission   needs the pages of the window and of the tokens in flight, not those of the whole prompt
    a hit       needs the pages of the window before its end; earlier ones may be evicted
    a commit    drops the pages that no later token reads; they stay in the prefix cache

Pages are published without the page before them, so that each is evicted alone.
"""

from collections.abc import Sequence

from phalanx_api.cost import StepModel
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.page_window import NULL_PAGE, PageWindow
from phalanx_runtime.core.request import RequestPages
from phalanx_runtime.core.step_builder import StepBuilder


class WindowedPages:
    """The pages of one pool. `max_new_tokens`: tokens of one request in all plans in flight."""

    def __init__(self, pool: PagePool, window: int, max_new_tokens: int) -> None:
        self.window = PageWindow(window, pool.page_size)
        self.max_pages = min(self.window.max_pages(max_new_tokens), pool.num_pages)
        """Pages that a request needs at most to compute in full chunks."""
        self.num_dropped = 0
        """Pages dropped since the start because no layer reads them any more."""
        self._pool = pool

    def pages_to_start(self, num_pages: int) -> int:
        """Returns how many pages a request gets at its start, of those from its first one that is read on."""
        return min(num_pages, self.max_pages)

    def find(self, keys: Sequence[bytes], only_written: bool = False) -> list[int]:
        """Returns the pages of the longest hit: `NULL_PAGE` before the window of its end, then written pages, then others."""
        pool = self._pool
        end = self.window.longest_hit(lambda i: self._written_page(keys[i]) is not None, len(keys))
        first = self.window.first_page(end * pool.page_size)
        found = [NULL_PAGE] * first + pool.match(keys[first:end])
        assert len(found) == end, "the pages of a hit are present"
        if only_written:
            return found
        room = max(0, self.max_pages - 1 - (end - first))
        return found + pool.match(keys[end : end + room])

    def num_in_memory(self, keys: Sequence[bytes]) -> int:
        """Returns the pages of the longest hit in device and host memory."""
        host = self._pool.host
        return self.window.longest_hit(lambda i: keys[i] in host or self._written_page(keys[i]) is not None, len(keys))

    def start(
        self,
        pages: RequestPages,
        keys: Sequence[bytes],
        *,
        found: list[int],
        num_pages: int,
        builder: StepBuilder,
        model: StepModel | None,
    ) -> int:
        """Assigns the first pages of a request with `num_pages` in all, and returns how many are found, as `find` counts.

        `keys`: those that it may share.
        """
        num_loaded = self._load(pages, keys, num_found=len(found), num_pages=num_pages, builder=builder, model=model)
        if num_loaded is not None:
            return num_loaded
        found = self.find(keys)  # again: the attempt to load may have evicted pages
        num_null = found.count(NULL_PAGE)
        self._pool.reuse(found[num_null:], len(keys), num_null)
        num_new = num_null + self.pages_to_start(num_pages - num_null) - len(found)
        self._assign(pages, found + self._allocate(num_new), num_null)
        return len(found)

    def hold(self, keys: Sequence[bytes], num_computed: int) -> list[int]:
        """Holds and returns the written pages of the longest hit, for a request with `num_computed` tokens elsewhere.

        Returns `NULL_PAGE` where the request reads no page any more if the hit is shorter.
        """
        held, num_unread = self.find(keys, only_written=True), self.window.first_page(num_computed)
        if len(held) < num_unread:
            return [NULL_PAGE] * num_unread
        self._pool.share(held[held.count(NULL_PAGE) :])
        return held

    def adopt(self, pages: RequestPages, num_computed: int) -> int:
        """Drops what a request that arrived with `num_computed` tokens does not read; returns how many pages it lacks."""
        pages.num_dropped = pages.num_keyed = pages.ids.count(NULL_PAGE)
        self.drop(pages, self.unreadable(pages, num_computed))
        return pages.num_dropped

    def grow(self, pages: RequestPages, start: int, end: int) -> int:
        """Adds free pages for the tokens before `end`, and returns the end of a chunk from `start` on: at most `end`.

        It ends before a page that others have written, which the request then skips.
        """
        pool, size = self._pool, self._pool.page_size
        pages.ids += self._allocate(pool.pages_for(end) - len(pages.ids))
        end = min(end, len(pages.ids) * size)
        for i in range(start // size + 1, pool.pages_for(end)):
            if pool.written(pages.ids[i]):
                return i * size
        return end

    def share_next(self, pages: RequestPages, keys: Sequence[bytes]) -> bool:
        """Adds the page after the last one if a key finds it: so requests use the pages of others. Returns whether one does."""
        num_pages = len(pages.ids)
        page = self._pool.find(keys[num_pages]) if num_pages < len(keys) else None
        if page is not None:
            self._pool.share([page])
            pages.ids.append(page)
        return page is not None

    def publish(self, pages: RequestPages, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Publishes the pages of these keys, except those of which another page has the key."""
        size = self._pool.page_size
        for i in range(pages.num_keyed, min(len(keys), len(pages.ids))):
            if not self._pool.is_published(pages.ids[i]):
                before, own = keys[i - 1] if i else None, tokens[i * size : (i + 1) * size]
                self._pool.publish(pages.ids[i], keys[i], None, own, before)
            pages.num_keyed = i + 1

    def unreadable(self, pages: RequestPages, position: int) -> range:
        """Returns the pages that no token at `position` or later reads, without those that were dropped."""
        return range(pages.num_dropped, min(self.window.first_page(position), len(pages.ids)))

    def drop(self, pages: RequestPages, indices: range) -> None:
        """Drops the pages that `unreadable` returned."""
        if not indices:
            return
        self._pool.release(pages.ids[indices.start : indices.stop])
        pages.ids[indices.start : indices.stop] = [NULL_PAGE] * len(indices)
        pages.num_dropped = indices.stop
        pages.num_keyed = max(pages.num_keyed, indices.stop)
        self.num_dropped += len(indices)

    def _load(
        self,
        pages: RequestPages,
        keys: Sequence[bytes],
        *,
        num_found: int,
        num_pages: int,
        builder: StepBuilder,
        model: StepModel | None,
    ) -> int | None:
        """Assigns pages of which host memory has some, if that gives a longer hit and takes less time than computing it.

        One page follows them, so that the plan that loads them computes a token.
        """
        pool, host, size = self._pool, self._pool.host, self._pool.page_size
        end = self.num_in_memory(keys) if len(host) else 0
        if end <= num_found:
            return None
        first = self.window.first_page(end * size)
        on_device = [self._written_page(key, builder) for key in keys[first:end]]
        missing = [key for key, page in zip(keys[first:end], on_device, strict=True) if page is None]
        num_missing = len(missing)
        if not pays_to_load((end - num_found) * size, num_found * size, model, host.load_s(num_missing)):
            host.decline(num_missing)
            return None
        shared = [page for page in on_device if page is not None]
        num_unheld = pool.num_unheld(shared)
        pool.share(shared)
        own = self._allocate(max(self.pages_to_start(num_pages - first), end - first + 1) - len(shared))
        slots = [slot for key in missing for slot in host.match([key])]
        if len(own) <= num_missing or len(slots) < num_missing or any(source in own for source, _ in builder.copies):
            pool.release(shared + own)
            return None
        pool.record_hits(shared, len(keys), first, num_unheld)
        loaded = own[:num_missing]
        host.load(slots, loaded)
        for page in loaded:
            pool.mark_written(page, size)
        rest = iter(loaded)
        ids = [next(rest) if page is None else page for page in on_device]
        self._assign(pages, [NULL_PAGE] * first + ids + own[num_missing:], first)
        return end

    def _assign(self, pages: RequestPages, ids: list[int], num_null: int) -> None:
        pages.ids, pages.num_dropped, pages.num_keyed = ids, num_null, num_null

    def _allocate(self, count: int) -> list[int]:
        """Returns up to `count` free pages."""
        count = min(count, self._pool.free_pages)
        return (self._pool.allocate(count) or []) if count > 0 else []

    def _written_page(self, key: bytes, builder: StepBuilder | None = None) -> int | None:
        """Returns the fully written page with this key; with `builder` not by its step."""
        page = self._pool.find(key)
        if page is None or self._pool.written(page) < self._pool.page_size:
            return None
        return None if builder is not None and page in builder.written_pages else page
