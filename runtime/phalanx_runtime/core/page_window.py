"""Which pages of a request can still be read, if every layer has a sliding window.

    tokens    0 . . . . . . . . . . . . . . . . p          the next token, at p, attends to (p - window, p]
    pages     [null][null][ 2 ][ 3 ][ 4 ][ 5 ]             `first_page(p)` is 2: no later token reads the pages before it

Layers may have different windows; the largest counts. Configurations that read older pages keep all of them.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from phalanx_api.engine_config import EngineConfig
from phalanx_api.prefix import longest_hit

NULL_PAGE = -1
"""In a page table: no page, because no layer reads these tokens any more. Only at its start."""
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
    """The layers that share a page table: one group of all layers, with a window if each of its pages is freed in time."""

    window: int
    """Tokens; 0: a request keeps the pages of all its tokens."""
    why: str


ALL_PAGES = PageGroups(0, "no layer has a sliding window")


def choose_page_groups(windows: Collection[int | None], config: EngineConfig) -> PageGroups:
    """Returns the page groups of a model with these sliding windows, and the reason. Equal on all ranks for equal arguments."""
    sizes = [size for size in windows if size is not None]
    if not sizes:
        return ALL_PAGES
    if len(sizes) < len(windows):
        return PageGroups(0, "some layers attend to all tokens, and all layers share a page")
    if config.speculative_method in ("draft", "self_draft"):
        return PageGroups(0, "the draft model computes tokens again whose pages would be free")
    if config.batch_invariant:
        return PageGroups(0, "batch-invariant attention splits a context from its first page on")
    return PageGroups(max(2, *sizes), "every layer has a sliding window")


def max_request_tokens(num_pages: int, page_size: int, window: int, plans_in_flight: int = 2) -> int:
    """Returns the tokens of the longest request that fits an empty pool: `NO_LIMIT` if the pool holds a window and new tokens."""
    if window and num_pages >= PageWindow(window, page_size).max_pages(plans_in_flight):
        return NO_LIMIT
    return num_pages * page_size
