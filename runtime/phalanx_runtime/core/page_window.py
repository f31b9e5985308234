"""Which pages of a request can still be read, if layers have a sliding window, and how many pages and parts a pool has.

    tokens    0 . . . . . . . . . . . . . . . . p          the next token, at p, attends to (p - window, p]
    pages     [null][null][ 2 ][ 3 ][ 4 ][ 5 ]             `first_page(p)` is 2: no later token reads the pages before it

Layers may have different windows; the largest counts. Configurations that read older pages keep all of them. If some layers
attend to all tokens, they keep all pages, and the layers with a window use parts of pages (`window_parts`).

Tokens that attend within blocks read no page before the start of their block, which a window of the block's size holds.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from phalanx_api.engine_config import EngineConfig
from phalanx_api.prefix import longest_hit

NULL_PAGE = -1
"""In a page table: no page, because no layer reads these tokens any more. Only at its start."""
USUAL_TOKENS = 2048
"""Shorter requests rarely exhaust a pool."""
NO_LIMIT = 1 << 62
"""Tokens of a request that the pool does not limit."""


@dataclass(frozen=True, slots=True)
class PageWindow:
    """The largest sliding window of a model whose layers all have one."""

    tokens: int
    """A token attends to itself and the `tokens - 1` tokens before it."""
    page_size: int

    @property
    def pages_before(self) -> int:
        """Pages that the tokens after a full page may read, at least one."""
        return max(1, -(-(self.tokens - 1) // self.page_size))

    def first_page(self, position: int) -> int:
        """Returns the first page that a token at `position` or later reads."""
        return max(0, position - self.tokens + 1) // self.page_size

    def max_pages(self, new_tokens: int) -> int:
        """Returns the most pages that a request needs to compute `new_tokens` tokens at once."""
        return -(-(self.tokens + new_tokens - 2) // self.page_size) + 1

    def longest_hit(self, is_present: Callable[[int], bool], count: int) -> int:
        """Returns the most leading pages, of `count`, after which a request could start: the last ones are present."""
        return longest_hit(is_present, count, self.pages_before)


@dataclass(frozen=True, slots=True)
class PageGroups:
    """The layers that share pages: all layers, with a window if each page is freed in time; or those without and with one."""

    window: int
    """Tokens; 0: a request keeps the pages of all its tokens."""
    why: str
    has_parts: bool = False
    """Whether only layers with a window free their pages: the parts."""
    has_blocks: bool = False
    """Whether tokens attend within blocks, and `window` is a multiple of a block and of a page."""


ALL_PAGES = PageGroups(0, "no layer has a sliding window or blocks of one size")


def choose_page_groups(windows: Collection[int | None], has_blocks: bool, config: EngineConfig) -> PageGroups:
    """Returns the page groups of a model with these sliding windows, and the reason. Equal on all ranks for equal arguments.

    `has_blocks`: the windows are blocks of one size.
    """
    sizes = [size for size in windows if size is not None]
    if not sizes:
        return ALL_PAGES
    is_mixed = len(sizes) < len(windows)
    if config.speculative_method in ("draft", "self_draft") and not is_mixed:
        return PageGroups(0, "the draft model computes tokens again whose pages would be free")
    if config.batch_invariant:
        return PageGroups(0, "batch-invariant attention splits a context from its first page on")
    size = math.lcm(config.page_size, *sizes) if has_blocks else max(2, *sizes)
    kind = "blocks of tokens" if has_blocks else "a sliding window"
    why = f"layers with {kind} have pages of their own" if is_mixed else f"every layer has {kind}"
    return PageGroups(size, why, has_parts=is_mixed, has_blocks=has_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDivision:
    """What divides the memory of a pool between pages and parts. Equal on all ranks."""

    page_bytes: int
    """Of a page without its part, on the rank with the smallest share of parts."""
    part_bytes: int
    """Of a part there."""
    longest: int
    """Tokens of the longest request."""
    required: int = 0
    """Tokens of a request that must fit, if any."""
    max_num_seqs: int
    max_new_tokens: int
    """Tokens of one request in all plans in flight."""

    def divide(self, num_whole: int, window: PageWindow) -> tuple[int, int]:
        """Returns the numbers of pages and parts, in the memory of `num_whole` pages with a part each.

        Requests of one length exhaust both at once; longer ones leave parts unused, shorter ones pages. With this length the
        longest requests, and those as long as the window, use an equal share of the memory; but it is at least `USUAL_TOKENS`.
        The tokens that steps compute have parts beside those of the windows.
        The pages are at least `num_whole`; no parts if that gains nothing.
        """
        size, held = window.page_size, window.max_pages(1)
        if self.longest <= window.tokens or not self.part_bytes:
            return num_whole, 0
        whole = self.page_bytes + self.part_bytes
        balanced = self.longest * window.tokens * whole // (self.longest * self.page_bytes + window.tokens * self.part_bytes)
        length = -(-min(self.longest, max(balanced, USUAL_TOKENS)) // size)
        total, num_chunk = num_whole * whole, -(-self.max_new_tokens // size)
        left = max(0, total - num_chunk * self.part_bytes)
        num_parts = -(-left * held // (length * self.page_bytes + held * self.part_bytes))
        num_parts = num_chunk + min(num_parts, 2 * self.max_num_seqs * held)  # the running ones, and as many in the prefix cache
        num_parts = min(num_parts, (total - -(-self.required // size) * self.page_bytes) // self.part_bytes)
        num_parts = max(num_parts, window.max_pages(self.max_new_tokens))
        if num_parts >= num_whole:
            return num_whole, 0
        return (total - num_parts * self.part_bytes) // self.page_bytes, num_parts


def max_request_tokens(num_pages: int, page_size: int, window: int, num_parts: int = 0, plans_in_flight: int = 2) -> int:
    """Returns the tokens of the longest request that fits an empty pool: `NO_LIMIT` if the pool holds a window and new tokens.

    `num_parts`: as in `PoolShape`; only the parts have the window then.
    """
    if num_parts:
        return min(num_pages * page_size, max_request_tokens(num_parts, page_size, window, plans_in_flight=plans_in_flight))
    if window and num_pages >= PageWindow(window, page_size).max_pages(plans_in_flight):
        return NO_LIMIT
    return num_pages * page_size
