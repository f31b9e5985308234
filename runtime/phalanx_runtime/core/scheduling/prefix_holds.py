"""Cached pages that stay in the pool while they are sent to another group (`core.migration.prefix`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.windowed_pages import WindowedPages
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.window_parts import WindowParts

NO_SLOT = -1
MIN_FREE_SHARE = 1 / 16
"""Share of the pages that stays free: a hold must not cause a preemption."""


@dataclass(frozen=True, slots=True)
class NotHeld:
    """Why no page is held; `code` as in `moves.MoveFailed`."""

    code: Literal["unknown", "evicted", "no_room"]
    why: str


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Held pages of a prefix, by position."""

    pages: list[int]
    """`NULL_PAGE` where no layer reads the page, because of a window, or where it is in host memory."""
    slots: list[int]
    """In host memory, or `NO_SLOT`."""
    part_slots: Sequence[int] = ()
    """If pages have parts: the slot of the part in host memory, or `NO_SLOT` where it is on the device or not read."""

    @property
    def first_readable(self) -> int:
        """The first position with a page or slot."""
        places = enumerate(zip(self.pages, self.slots, strict=True))
        return next((i for i, (page, slot) in places if page != NULL_PAGE or slot != NO_SLOT), len(self.pages))

    @property
    def on_device(self) -> list[int]:
        """The pages of the pool."""
        return [page for page in self.pages if page != NULL_PAGE]

    @property
    def in_host(self) -> list[int]:
        """The slots of host memory."""
        return [slot for slot in self.slots if slot != NO_SLOT]

    @property
    def parts_in_host(self) -> list[int]:
        """The slots of host memory for parts."""
        return [slot for slot in self.part_slots if slot != NO_SLOT]


class PrefixHolds:
    """Held pages of one pool and its host memory, by move."""

    def __init__(self, pool: PagePool, windowed: WindowedPages | None = None) -> None:
        self._pool = pool
        self._windowed = windowed
        self._held: dict[str, HeldPrefix] = {}
        self._with_parts: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> Iterator[list[int]]:
        """Yields the pages of the pool that each holds."""
        return (held.on_device for held in self._held.values())

    def with_parts(self) -> Iterator[list[int]]:
        """Yields the pages of each whose parts are held, if pages have parts."""
        return iter(self._with_parts.values())

    def hold(self, move: str, keys: Sequence[bytes], num_known: int) -> HeldPrefix | NotHeld:
        """Holds and returns the fully written pages of the longest cached prefix of `keys`, on the device and in host memory.

        If pages have parts, those of the last pages' window are held too: the prefix ends where a request could start.
        Refuses unless more than the first `num_known`, which the target has, are cached, and if too few pages would stay free.
        """
        pool, parts = self._pool, self._pool.parts
        if move in self._held:
            return NotHeld("unknown", f"the pages of move {move} are held already")
        found = self._find(keys)
        num_cached = len(found.pages)
        if num_cached <= num_known:
            self._unpin(found)
            return NotHeld("evicted", f"{num_cached} of {len(keys)} pages are cached, the target has {num_known}")
        if pool.free_pages - pool.num_unheld(found.on_device) < MIN_FREE_SHARE * pool.num_pages:
            self._unpin(found)
            return NotHeld("no_room", "too few pages would stay free here")
        if parts is not None:
            window = range(parts.window.first_page(num_cached * pool.page_size), num_cached)
            with_parts = [found.pages[i] for i in window if found.part_slots[i] == NO_SLOT]
            if not parts.hold(with_parts, int(MIN_FREE_SHARE * parts.num_parts)):
                self._unpin(found)
                return NotHeld("no_room", "too few parts of pages would stay free here")
            self._with_parts[move] = with_parts
        pool.share(found.on_device)
        pool.host.counters.sent += sum(slot != NO_SLOT for slot in found.slots[num_known:])
        self._held[move] = found
        return found

    def release(self, move: str) -> None:
        """Releases the pages of a move, if held. No rank may still read them."""
        held = self._held.pop(move, None)
        if held is None:
            return
        if self._pool.parts is not None:
            self._pool.parts.unhold(self._with_parts.pop(move))
        self._unpin(held)
        self._pool.release(held.on_device)

    def _unpin(self, held: HeldPrefix) -> None:
        self._pool.host.unpin(held.in_host)
        self._pool.host_parts.unpin(held.parts_in_host)

    def _find(self, keys: Sequence[bytes]) -> HeldPrefix:
        """Returns the longest prefix; its slots are pinned, its pages not held yet."""
        if self._windowed is not None:
            return self._find_window(keys, self._windowed)
        pages = self._written(self._pool.match(keys))
        slots = self._pool.host.pin(keys[len(pages) :])
        found = HeldPrefix(pages + [NULL_PAGE] * len(slots), [NO_SLOT] * len(pages) + slots)
        return found if self._pool.parts is None else self._with_window_parts(keys, found, self._pool.parts)

    def _with_window_parts(self, keys: Sequence[bytes], found: HeldPrefix, parts: WindowParts) -> HeldPrefix:
        """Returns the start of a prefix after which a request could start, with the parts of its last window.

        What is on the device, if slots for parts cannot be pinned.
        """
        pool, size = self._pool, self._pool.page_size
        is_on_device = [page != NULL_PAGE and parts.written(page) == size for page in found.pages]
        end = parts.window.longest_hit(lambda i: is_on_device[i] or keys[i] in pool.host_parts, len(found.pages))
        pool.host.unpin(slot for slot in reversed(found.slots[end:]) if slot != NO_SLOT)
        part_slots = [NO_SLOT] * end
        held = HeldPrefix(found.pages[:end], found.slots[:end], part_slots)  # filled below
        for i in range(parts.window.first_page(end * size), end):
            if not is_on_device[i]:
                pinned = pool.host_parts.pin([keys[i]])
                if not pinned:
                    self._unpin(held)
                    num_hit = parts.num_hit(held.on_device)
                    return HeldPrefix(held.pages[:num_hit], [NO_SLOT] * num_hit, [NO_SLOT] * num_hit)
                part_slots[i] = pinned[0]
        return held

    def _find_window(self, keys: Sequence[bytes], windowed: WindowedPages) -> HeldPrefix:
        """Returns a prefix whose window is on the device and in host memory, or on the device if slots cannot be pinned."""
        pool, end = self._pool, windowed.num_in_memory(keys)
        first = windowed.window.first_page(end * pool.page_size)
        pages, slots = [NULL_PAGE] * end, [NO_SLOT] * end
        for i, key in enumerate(keys[first:end], first):
            on_device = self._written(pool.match([key]))
            pinned = [] if on_device else pool.host.pin([key])
            if not on_device and not pinned:
                pool.host.unpin(slot for slot in slots if slot != NO_SLOT)
                pages = windowed.find(keys, only_written=True)
                return HeldPrefix(pages, [NO_SLOT] * len(pages))
            pages[i], slots[i] = (on_device[0], NO_SLOT) if on_device else (NULL_PAGE, pinned[0])
        return HeldPrefix(pages, slots)

    def _written(self, found: list[int]) -> list[int]:
        pool = self._pool
        return found[: next((i for i, page in enumerate(found) if pool.written(page) < pool.page_size), len(found))]
