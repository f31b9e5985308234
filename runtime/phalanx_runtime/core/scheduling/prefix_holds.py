"""Cached pages that stay in the pool while they are sent to another group (`core.migration.prefix`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.windowed_pages import WindowedPages
from phalanx_runtime.core.page_window import NULL_PAGE

MIN_FREE_SHARE = 1 / 16
"""Share of the pages that stays free: a hold must not cause a preemption."""


@dataclass(frozen=True, slots=True)
class NotHeld:
    """Why no page is held; `code` as in `moves.MoveFailed`."""

    code: Literal["unknown", "evicted", "no_room"]
    why: str


class PrefixHolds:
    """Held pages of one pool, by move."""

    def __init__(self, pool: PagePool, windowed: WindowedPages | None = None) -> None:
        self._pool = pool
        self._windowed = windowed
        self._held: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> Iterator[list[int]]:
        """Yields the pages of each."""
        return iter(self._held.values())

    def hold(self, move: str, keys: Sequence[bytes], num_known: int) -> list[int] | NotHeld:
        """Holds and returns the fully written pages of the longest cached prefix of `keys`; with a window, leading ones may be
        `NULL_PAGE`.

        Refuses unless more than the first `num_known`, which the target has, are cached, and if too few pages would stay free.
        """
        pool = self._pool
        if move in self._held:
            return NotHeld("unknown", f"the pages of move {move} are held already")
        if self._windowed is None:
            found = pool.match(keys)
            pages = found[: next((i for i, page in enumerate(found) if pool.written(page) < pool.page_size), len(found))]
        else:
            pages = self._windowed.find(keys, only_written=True)
        held, num_written = pages[pages.count(NULL_PAGE) :], len(pages)
        if num_written <= num_known:
            return NotHeld("evicted", f"{num_written} of {len(keys)} pages are cached, the target has {num_known}")
        if pool.free_pages - pool.num_unheld(held) < MIN_FREE_SHARE * pool.num_pages:
            return NotHeld("no_room", "too few pages would stay free here")
        pool.share(held)
        self._held[move] = held
        return pages

    def release(self, move: str) -> None:
        """Releases the pages of a move, if held. No rank may still read them."""
        self._pool.release(self._held.pop(move, []))
