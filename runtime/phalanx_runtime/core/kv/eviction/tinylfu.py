"""W-TinyLFU: new pages enter a small window, and the main part only if more popular than the page that they replace.

    window (1 % of the pool, LRU) | main: probation (LRU), protected (80 % of main, LRU)
    insert -> window · overflow of the window -> probation, while main has room
    hit: probation -> protected · overflow of protected -> probation
    victim: the less popular of the oldest idle pages of window and main; on a tie the window's, else that moves to probation

Source: Einziger, Friedman, Manes 2017, section 4; sizes of Caffeine.
"""

from array import array

from phalanx_runtime.core.kv.eviction.orders import IdleHeap

ROWS = 4
AGING = 10
"""Additions per page until all counters are halved."""
_LOW = 0xFFFFFFFF
_HALVED = bytes(byte >> 1 & 0x77 for byte in range(256))


class Sketch:
    """Count-min sketch of key frequencies: 4-bit counters, two per byte. Keys have 64 well-mixed bits.

    estimate(key) = min over 4 rows of counter[row, (low + row * high) mod width]        at least the true count, at most 15

    Source: sections 3.2 to 3.4.
    """

    __slots__ = ("_additions", "_mask", "_period", "_table", "_width")

    def __init__(self, capacity: int) -> None:
        self._width = 1 << max(4, (4 * capacity - 1).bit_length())
        self._mask = self._width - 1
        self._table = bytearray(ROWS * self._width // 2)
        self._period = AGING * capacity
        self._additions = 0

    def add(self, key: int) -> None:
        """Counts the key."""
        table, mask, base = self._table, self._mask, 0
        low, high = key & _LOW, key >> 32 | 1
        for _ in range(ROWS):
            at = base + (low & mask)
            byte = table[at >> 1]
            if at & 1:
                if byte < 0xF0:
                    table[at >> 1] = byte + 0x10
            elif byte & 0x0F < 0x0F:
                table[at >> 1] = byte + 1
            low += high
            base += self._width
        self._additions += 1
        if self._additions >= self._period:
            self._table = table.translate(_HALVED)
            self._additions //= 2

    def estimate(self, key: int) -> int:
        """Returns the key's frequency."""
        table, mask, base = self._table, self._mask, 0
        low, high, least = key & _LOW, key >> 32 | 1, 15
        for _ in range(ROWS):
            at = base + (low & mask)
            byte = table[at >> 1]
            count = byte >> 4 if at & 1 else byte & 0x0F
            if count < least:
                least = count
            low += high
            base += self._width
        return least


class Recency:
    """Pages by last use: a doubly linked ring; the last index is its end."""

    __slots__ = ("_end", "_next", "_previous", "size")

    def __init__(self, num_pages: int) -> None:
        self._end = num_pages
        self._next = array("q", range(num_pages + 1))
        self._previous = array("q", range(num_pages + 1))
        self.size = 0

    def add(self, page: int) -> None:
        """Adds a page at the most recent end."""
        end, following, previous = self._end, self._next, self._previous
        last = previous[end]
        following[last] = page
        previous[page] = last
        following[page] = end
        previous[end] = page
        self.size += 1

    def remove(self, page: int) -> None:
        """Removes a page."""
        following, previous = self._next, self._previous
        before, after = previous[page], following[page]
        following[before] = after
        previous[after] = before
        self.size -= 1

    def touch(self, page: int) -> None:
        """Moves a page to the most recent end."""
        end, following, previous = self._end, self._next, self._previous
        before, after = previous[page], following[page]
        following[before] = after
        previous[after] = before
        last = previous[end]
        following[last] = page
        previous[page] = last
        following[page] = end
        previous[end] = page

    def oldest(self) -> int:
        """Returns the least recently used page."""
        assert self.size, "an empty ring has no oldest page"
        return self._next[self._end]


WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
WINDOW, PROBATION, PROTECTED = range(3)


def part_sizes(capacity: int) -> tuple[int, int, int]:
    """Returns the sizes of window, main, and its protected part."""
    window = max(1, int(capacity * WINDOW_SHARE))
    main = capacity - window
    return window, main, int(main * PROTECTED_SHARE)


class WTinyLfu:
    """W-TinyLFU: pages enter through a window; of two candidates the less frequent one is evicted. Each page is in one part."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._idle = idle
        self._window_size, self._main_size, self._protected_size = part_sizes(num_pages)
        self._sketch = Sketch(num_pages)
        self._keys = array("Q", bytes(8 * num_pages))
        self._used = array("q", bytes(8 * num_pages))
        """Number of the page's last use or move."""
        self._num_uses = 0
        self._part = bytearray(num_pages)
        self._order = [Recency(num_pages) for _ in range(3)]
        """All pages of each part."""
        self._idle_pages = [IdleHeap(num_pages, idle) for _ in range(3)]
        """The idle pages of each part."""

    def on_insert(self, page: int, key: int) -> None:
        """Counts the key and adds the page to the window."""
        self._sketch.add(key)
        self._keys[page] = key
        self._add(page, WINDOW)
        window, num_main = self._order[WINDOW], self._num_main_pages()
        while window.size > self._window_size and num_main < self._main_size:
            self._move(window.oldest(), PROBATION)
            num_main += 1

    def on_hit(self, page: int) -> None:
        """Counts the key; protects a page of main."""
        self._sketch.add(self._keys[page])
        part = self._part[page]
        self._move(page, WINDOW if part == WINDOW else PROTECTED)
        protected = self._order[PROTECTED]
        if protected.size > self._protected_size:
            self._move(protected.oldest(), PROBATION)

    def on_release(self, page: int, time: int) -> None:
        """Makes the page the most recent of its part."""
        self._order[self._part[page]].touch(page)
        self._num_uses += 1
        self._used[page] = self._num_uses

    def on_idle(self, page: int) -> None:
        """Makes the page a candidate."""
        self._idle_pages[self._part[page]].push(self._used[page], page)

    def on_remove(self, page: int) -> None:
        """Removes the page from its part."""
        self._remove(page)

    def victim(self) -> int:
        """Returns the less popular of the two candidates."""
        newcomer = self._idle_pages[WINDOW].first()
        resident = self._idle_pages[PROBATION].first()
        if resident is None:
            resident = self._idle_pages[PROTECTED].first()
        if newcomer is None or resident is None:
            page = resident if newcomer is None else newcomer
            assert page is not None, "the pool requests a victim only if a page is idle"
            return page
        estimate = self._sketch.estimate
        if estimate(self._keys[newcomer]) <= estimate(self._keys[resident]):
            return newcomer
        self._move(newcomer, PROBATION)
        return resident

    def _num_main_pages(self) -> int:
        return self._order[PROBATION].size + self._order[PROTECTED].size

    def _add(self, page: int, part: int) -> None:
        self._num_uses += 1
        self._used[page] = self._num_uses
        self._part[page] = part
        self._order[part].add(page)

    def _remove(self, page: int) -> None:
        part = self._part[page]
        self._order[part].remove(page)
        self._idle_pages[part].remove(page)

    def _move(self, page: int, part: int) -> None:
        self._remove(page)
        self._add(page, part)
        if self._idle[page]:
            self._idle_pages[part].push(self._used[page], page)
