"""Pages of models that mix layers with full attention and layers with a sliding window.

    page     the keys and values of full attention, for all tokens of a request, as without windows
    part     those of the layers with a window: a page of a second pool that belongs to one page, for the tokens that are read

    pages    [ 7 ][ 3 ][ 9 ][ 4 ][ 8 ]
    parts     -    -   [ 1 ][ 0 ][ 2 ]          a request holds the parts of the pages in its window

A page that loses its part stays in the prefix cache. A hit ends where the parts of its window are present; a request that finds
more pages computes their tokens again, into the same pages, and gives them new parts. So a part needs no key of its own.

Most parts that a request drops are never read again. Wanted are those before the end of a found prefix, where prompts differ, and
those that a request has at its end, where the next turn of a conversation begins: they are evicted last, to host memory if there
is a tier.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from phalanx_runtime.core.page_window import NULL_PAGE, PageWindow
from phalanx_runtime.core.request import RequestPages

NO_PART = -1


class PageStates(Protocol):
    """The pages of a pool."""

    def is_published(self, page: int) -> bool:
        """Returns whether a key finds this page."""
        ...

    def written(self, page: int) -> int:
        """Returns how many slots the plans so far write."""
        ...

    def part_changed(self, page: int) -> None:
        """A page got or lost its part, or the content of it."""
        ...

    def save_part(self, page: int, part: int) -> None:
        """Copies the part of a published page to host memory, if that has slots: the page loses it."""
        ...


class WindowParts:
    """The parts of one page pool. `PagePool` sets `pages`. Parts without a holder are evicted in the order of their release."""

    def __init__(self, num_parts: int, num_pages: int, window: PageWindow) -> None:
        self.window = window
        self.num_parts = num_parts
        self.num_dropped = self.num_evicted = 0
        """Parts since the start that no layer of a running request reads any more; parts that were evicted."""
        self.pages: PageStates
        self._free = list(range(num_parts - 1, -1, -1))
        self._part_of = array("q", [NO_PART]) * num_pages
        self._page_of = array("q", [NO_PART]) * num_parts
        self._refs = array("q", bytes(8 * num_parts))
        self._written = array("q", bytes(8 * num_parts))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Parts without a holder, fully written, in the order of their release."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The same for wanted pages; evicted after the others."""
        self._is_wanted = bytearray(num_pages)
        self._unsent: list[tuple[int, int]] = []

    @property
    def free_parts(self) -> int:
        """Parts without a holder: all can be allocated."""
        return len(self._free) + len(self._cached) + len(self._kept)

    def part_of(self, page: int) -> int:
        """Returns the part of a page, or `NO_PART`."""
        return self._part_of[page]

    def written(self, page: int) -> int:
        """Returns how many slots of a page and its part the plans so far write; 0 without a part."""
        part = self._part_of[page]
        return 0 if part == NO_PART else min(self._written[part], self.pages.written(page))

    def mark_written(self, page: int, slots: int) -> None:
        """Records that the plans so far write the first `slots` slots of the part of a page."""
        part = self._part_of[page]
        assert part != NO_PART, f"page {page} is written without a part"
        if slots > self._written[part]:
            self._written[part] = slots
            if slots == self.window.page_size:
                self.pages.part_changed(page)

    def unmark_written(self, page: int, slots: int) -> None:
        """Records that only the first `slots` slots are written, because a plan was taken back."""
        part = self._part_of[page]
        if part != NO_PART:
            self._written[part] = slots
            self.pages.part_changed(page)

    def num_hit(self, found: Sequence[int]) -> int:
        """Returns the most leading pages, of the found ones, after which a request could start."""
        full = self.num_full(found)
        return self.window.longest_hit(lambda i: self.written(found[i]) == self.window.page_size, full)

    def can_start(self, pages: RequestPages, found: Sequence[int], num_pages: int, num_running: int) -> bool:
        """Returns whether enough parts are free to start a request with `num_pages`; each running request keeps one to grow."""
        first = self._first_page(self.num_hit(found))
        end = min(num_pages, first + self._num_first(pages))
        num_held = sum(self.is_held(page) for page in found[first:end])
        return self.free_parts >= end - first - num_held + num_running

    def fits(self, pages: RequestPages, num_hit: int, num_running: int) -> bool:
        """Returns whether enough parts are free for a request that has its pages and starts after the first `num_hit`.

        Each of `num_running` requests keeps one to grow.
        """
        first, end = self._to_start(pages, num_hit)
        num_new = sum(not self.is_held(page) for page in pages.ids[first:end])
        return end > num_hit and self.free_parts >= num_new + num_running

    def start(self, pages: RequestPages, num_hit: int) -> None:
        """Lets a request hold the parts of the window before page `num_hit`, and that of this page, with or without content."""
        first, end = self._to_start(pages, num_hit)
        with_content = [page for page in pages.ids[first:end] if self._part_of[page] != NO_PART]
        for page in with_content:  # so that the others do not evict them
            self._hold(page)
        pages.part_start = pages.part_end = first
        self.extend(pages, end)
        for page in with_content:
            self._release(page)

    def want(self, pages: Sequence[int], end: int) -> None:
        """Keeps the parts of the window before page `end` longer than others, where prompts differ."""
        for page in pages[self._first_page(end) : end]:
            self._is_wanted[page] = 1

    def held(self, pages: RequestPages) -> list[int]:
        """Returns the parts that a request holds."""
        return [self._part_of[page] for page in pages.ids[pages.part_start : pages.part_end]]

    def grow(self, pages: RequestPages, start: int, end: int, rewrites: bool = False) -> int:
        """Returns the end of a chunk from `start` on: at most `end`, and before a page that has been written with its part.

        `rewrites`: not before such a page.
        """
        size = self.window.page_size
        end = min(end, self.extend(pages, -(-end // size)) * size)
        for i in () if rewrites else range(start // size + 1, -(-end // size)):
            if self.written(pages.ids[i]):
                return i * size
        return end

    def lacks(self, pages: RequestPages, position: int) -> bool:
        """Returns whether a token at `position` reads parts that the request has dropped."""
        return pages.part_start > self.window.first_page(position)

    def extend(self, pages: RequestPages, end: int) -> int:
        """Lets a request hold the parts of its pages before index `end`, as far as parts are free. Returns the end."""
        while pages.part_end < end and self._hold(pages.ids[pages.part_end]):
            pages.part_end += 1
        return pages.part_end

    def share_next(self, pages: RequestPages) -> bool:
        """Lets a request hold the part of its next page if the page has one. Returns whether it does."""
        if pages.part_end == len(pages.ids) or self._part_of[pages.ids[pages.part_end]] == NO_PART:
            return False
        return self.extend(pages, pages.part_end + 1) > 0

    def drop(self, pages: RequestPages, position: int) -> None:
        """Drops the parts that no token from the start of the page of `position` on reads: a later prompt may start there."""
        size = self.window.page_size
        end = min(self.window.first_page(position // size * size), pages.part_end)
        for page in pages.ids[pages.part_start : end]:
            self._release(page)
            self.num_dropped += 1
        pages.part_start = max(pages.part_start, end)

    def truncate(self, pages: RequestPages, end: int) -> None:
        """Releases the parts of the pages from index `end` on, before the pages."""
        for page in pages.ids[max(end, pages.part_start) : pages.part_end]:
            self._release(page)
        pages.part_end = max(pages.part_start, min(pages.part_end, end))

    def release(self, pages: RequestPages) -> None:
        """Releases all parts of a request, before its pages."""
        for page in pages.ids[pages.part_start : pages.part_end]:
            self._is_wanted[page] = 1
            self._release(page)
        pages.part_start = pages.part_end = 0

    def num_readable(self, found: Sequence[int], num_computed: int) -> int:
        """Returns how many found pages serve a request with `num_computed` tokens elsewhere: those of its window have parts."""
        first = self.window.first_page(num_computed)
        size = self.window.page_size
        return next((i for i in range(first, len(found)) if self.written(found[i]) < size), len(found))

    def in_window(self, pages: Sequence[int], first: int, num_computed: int) -> list[int]:
        """Returns the parts of pages at positions from `first` on; `NO_PART` before the window of `num_computed` tokens."""
        return self.from_position(pages, first, self.window.first_page(num_computed))

    def from_position(self, pages: Sequence[int], first: int, start: int) -> list[int]:
        """Returns the parts of pages at positions from `first` on; `NO_PART` before position `start`, and for `NULL_PAGE`."""
        is_read = [first + i >= start and page != NULL_PAGE for i, page in enumerate(pages)]
        return [self._part_of[page] if is_one else NO_PART for page, is_one in zip(pages, is_read, strict=True)]

    def hold(self, pages: Sequence[int], num_spare: int = 0) -> bool:
        """Holds the parts of these pages, and gives one to each that has none.

        Returns false, and does nothing, if fewer than `num_spare` parts would stay free.
        """
        if sum(not self.is_held(page) for page in pages) + num_spare > self.free_parts:
            return False
        for page in pages:
            self._hold(page)
        return True

    def unhold(self, pages: Iterable[int]) -> None:
        """Releases the parts of these pages."""
        for page in pages:
            self._release(page)

    def save(self, page: int) -> None:
        """Saves the part of a page that is evicted, if a later request may want it."""
        part = self._part_of[page]
        if part != NO_PART and self._is_wanted[page] and self._written[part] == self.window.page_size:
            self.pages.save_part(page, part)

    def forget(self, page: int) -> None:
        """Frees the part of a page that becomes free itself."""
        part = self._part_of[page]
        if part != NO_PART:
            assert not self._refs[part], f"page {page} is free and its part is held"
            self._uncache(part)
            self._detach(part)
        self._is_wanted[page] = 0

    def evict(self, count: int) -> int:
        """Evicts up to `count` parts without a holder. Returns how many."""
        count = min(count, len(self._cached) + len(self._kept))
        for _ in range(count):
            part = (self._cached or self._kept).popitem(last=False)[0]
            self.save(self._page_of[part])
            self._is_wanted[self._page_of[part]] = 0
            self._detach(part)
        self.num_evicted += count
        return count

    def take_unsent(self) -> list[tuple[int, int]]:
        """Returns the pages that got a part since the last call, with the part, in order."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def check(self, held: Iterable[Iterable[int]]) -> list[str]:
        """Returns the errors, given the pages of every holder of parts."""
        return list(self._errors(held))

    def _errors(self, held: Iterable[Iterable[int]]) -> Iterator[str]:
        expected = [0] * self.num_parts
        for pages in held:
            for page in pages:
                part = self._part_of[page]
                if part == NO_PART:
                    yield f"the part of page {page} is held and does not exist"
                else:
                    expected[part] += 1
        free = set(self._free)
        for part, (count, want) in enumerate(zip(self._refs, expected, strict=True)):
            page = self._page_of[part]
            if count != want:
                yield f"part {part} has {count} holders, expected {want}"
            is_cached = part in self._cached or part in self._kept
            if (part in free) != (page == NO_PART) or is_cached != (page != NO_PART and not count):
                yield f"part {part} of page {page} has {count} holders, and is in the wrong list"
            if page != NO_PART and self._part_of[page] != part:
                yield f"part {part} belongs to page {page}, which has part {self._part_of[page]}"
        if len(free) != len(self._free) or sum(part != NO_PART for part in self._part_of) != self.num_parts - len(free):
            yield "a part is free twice, or belongs to two pages"

    def _to_start(self, pages: RequestPages, num_hit: int) -> tuple[int, int]:
        """Returns the range of pages whose parts a request needs to start after a hit."""
        first = self._first_page(num_hit)
        return first, min(len(pages.ids), first + self._num_first(pages))

    def _num_first(self, pages: RequestPages) -> int:
        """Returns how many parts a request gets at its start at most: it computes tokens then, and gets more as it computes."""
        return min(self.window.max_pages(pages.first_tokens), self.num_parts)

    def _first_page(self, num_pages: int) -> int:
        return self.window.first_page(num_pages * self.window.page_size)

    def num_full(self, found: Sequence[int]) -> int:
        """Returns how many leading pages are fully written, with or without parts."""
        size, written = self.window.page_size, self.pages.written
        return next((i for i, page in enumerate(found) if written(page) < size), len(found))

    def is_held(self, page: int) -> bool:
        """Returns whether a page has a part with a holder, which is not evicted."""
        part = self._part_of[page]
        return part != NO_PART and self._refs[part] > 0

    def _hold(self, page: int) -> bool:
        """Holds the part of a page, which gets one if it has none. Returns false if no part is free."""
        part = self._part_of[page]
        if part == NO_PART:
            if not self._free and not self.evict(1):
                return False
            part = self._free.pop()
            self._part_of[page], self._page_of[part], self._written[part] = part, page, 0
            self._unsent.append((page, part))
            self.pages.part_changed(page)
        elif not self._refs[part]:
            self._uncache(part)
        self._refs[part] += 1
        return True

    def _release(self, page: int) -> None:
        part = self._part_of[page]
        assert part != NO_PART and self._refs[part] > 0, f"the part of page {page} is released once too often"
        self._refs[part] -= 1
        if self._refs[part]:
            return
        if self._written[part] == self.window.page_size and self.pages.is_published(page):
            (self._kept if self._is_wanted[page] else self._cached)[part] = None
        else:
            self._detach(part)

    def _uncache(self, part: int) -> None:
        del (self._kept if part in self._kept else self._cached)[part]

    def _detach(self, part: int) -> None:
        page = self._page_of[part]
        self._part_of[page] = self._page_of[part] = NO_PART
        self._free.append(part)
        self.pages.part_changed(page)
