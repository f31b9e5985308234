"""W-TinyLFU: a small window of newcomers before a main part that a page enters only if it was seen more often than what leaves.

    window (1 % of the pool, LRU) | main: probation (LRU), protected (80 % of main, LRU)
    insert -> window · hit: window stays, probation -> protected, what protected has too many of -> probation
    window too full -> probation, as long as main has room
    victim: the window's first page or main's first page (probation before protected), whichever the sketch saw less;
            a page of the window that wins moves to probation, a draw is lost

Parts have their sizes in cached pages, held ones included; only idle pages are victims, in the order of their last use.
Source: Einziger, Friedman, Manes 2017, section 4; Caffeine's segments and shares.
"""

from array import array

from phalanx_runtime.core.kv.eviction.orders import IdleHeap

# How often keys were seen lately, in little room: a count-min sketch of 4-bit counters that ages.
#     estimate(key) = min over 4 rows of counter[row, (low + row * high) mod width]        never below the true count, up to
# 15     after `10 * capacity` additions every counter is halved
# Source: Einziger, Friedman, Manes 2017, TinyLFU (sections 3.2 to 3.4).

ROWS = 4
AGING = 10
_LOW = 0xFFFFFFFF
_HALVED = bytes(byte >> 1 & 0x77 for byte in range(256))


class Sketch:
    """Counters for about `capacity` keys of 64 well-mixed bits. Two counters share a byte."""

    __slots__ = ("_additions", "_mask", "_sample", "_table", "_width")

    def __init__(self, capacity: int) -> None:
        self._width = 1 << max(4, (4 * capacity - 1).bit_length())
        self._mask = self._width - 1
        self._table = bytearray(ROWS * self._width // 2)
        self._sample = AGING * capacity
        self._additions = 0

    def add(self, key: int) -> None:
        """Counts the key once more; halves all counts when it is time. A counter stays at 15."""
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
        if self._additions >= self._sample:
            self._table = table.translate(_HALVED)
            self._additions //= 2

    def estimate(self, key: int) -> int:
        """How often the key was seen, or a little more."""
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


# Pages in the order of their last use, as a doubly linked list in arrays.


class Recency:
    """A ring through `num_pages + 1` places; the last place is its end. Each call costs O(1)."""

    __slots__ = ("_end", "_next", "_previous", "size")

    def __init__(self, num_pages: int) -> None:
        self._end = num_pages
        self._next = array("q", range(num_pages + 1))
        self._previous = array("q", range(num_pages + 1))
        self.size = 0

    def add(self, page: int) -> None:
        """Puts a page that is not in the ring at its most recent end."""
        end, following, previous = self._end, self._next, self._previous
        last = previous[end]
        following[last] = page
        previous[page] = last
        following[page] = end
        previous[end] = page
        self.size += 1

    def remove(self, page: int) -> None:
        """Takes a page out of the ring."""
        following, previous = self._next, self._previous
        before, after = previous[page], following[page]
        following[before] = after
        previous[after] = before
        self.size -= 1

    def renew(self, page: int) -> None:
        """Moves a page of the ring to its most recent end."""
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
        """The page used longest ago of a ring that is not empty."""
        assert self.size, "an empty ring has no oldest page"
        return self._next[self._end]


WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
WINDOW, PROBATION, PROTECTED = range(3)


def part_sizes(capacity: int) -> tuple[int, int, int]:
    """Pages of window, main, and the protected part of main, for a pool of so many."""
    window = max(1, int(capacity * WINDOW_SHARE))
    main = capacity - window
    return window, main, int(main * PROTECTED_SHARE)


class WTinyLfu:
    """Each page is in one part; `_order` has all pages of a part by last use, `_idle_pages` those of them that may go."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._idle = idle
        self._window_size, self._main_size, self._protected_size = part_sizes(num_pages)
        self._sketch = Sketch(num_pages)
        self._keys = array("Q", bytes(8 * num_pages))
        self._used = array("q", bytes(8 * num_pages))
        """When the page was put at the recent end of its part."""
        self._uses = 0
        self._part = bytearray(num_pages)
        self._order = [Recency(num_pages) for _ in range(3)]
        self._idle_pages = [IdleHeap(num_pages, idle) for _ in range(3)]

    def on_insert(self, page: int, key: int) -> None:
        """Counts the key and lets the page into the window."""
        self._sketch.add(key)
        self._keys[page] = key
        self._add(page, WINDOW)
        window, main = self._order[WINDOW], self._main_pages()
        while window.size > self._window_size and main < self._main_size:
            self._move(window.oldest(), PROBATION)
            main += 1

    def on_hit(self, page: int) -> None:
        """Counts the key; a page of main is protected now."""
        self._sketch.add(self._keys[page])
        part = self._part[page]
        self._move(page, WINDOW if part == WINDOW else PROTECTED)
        protected = self._order[PROTECTED]
        if protected.size > self._protected_size:
            self._move(protected.oldest(), PROBATION)

    def on_release(self, page: int, time: int) -> None:
        """A release is a use, though one that the sketch does not count."""
        self._order[self._part[page]].renew(page)
        self._uses += 1
        self._used[page] = self._uses

    def on_idle(self, page: int) -> None:
        """The page may go from now on."""
        self._idle_pages[self._part[page]].push(self._used[page], page)

    def on_remove(self, page: int) -> None:
        """Takes the page out of its part; the sketch still knows its key."""
        self._take_out(page)

    def victim(self) -> int:
        """The page that was seen less: the window's first or main's first."""
        newcomer = self._idle_pages[WINDOW].first()
        settled = self._idle_pages[PROBATION].first()
        if settled is None:
            settled = self._idle_pages[PROTECTED].first()
        if newcomer is None or settled is None:
            page = settled if newcomer is None else newcomer
            assert page is not None, "a victim was asked for when no page is idle"
            return page
        estimate = self._sketch.estimate
        if estimate(self._keys[newcomer]) <= estimate(self._keys[settled]):
            return newcomer
        self._move(newcomer, PROBATION)
        return settled

    def _main_pages(self) -> int:
        return self._order[PROBATION].size + self._order[PROTECTED].size

    def _add(self, page: int, part: int) -> None:
        """Puts a page that is in no part at the recent end of one."""
        self._uses += 1
        self._used[page] = self._uses
        self._part[page] = part
        self._order[part].add(page)

    def _take_out(self, page: int) -> None:
        part = self._part[page]
        self._order[part].remove(page)
        self._idle_pages[part].void(page)

    def _move(self, page: int, part: int) -> None:
        """Puts a page at the recent end of a part."""
        self._take_out(page)
        self._add(page, part)
        if self._idle[page]:
            self._idle_pages[part].push(self._used[page], page)
