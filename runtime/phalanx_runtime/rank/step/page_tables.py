"""Page tables of the rows, and what attention reads of them: pages, or the parts of pages for layers with a window."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.step_plan import StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of the KV cache."""

    page_size: int
    """Tokens per page."""
    kv_heads: int
    layer_page_bytes: int
    """Bytes of a page in one layer."""
    window: PageWindow | None = None
    """If requests drop pages, or parts: attention then starts at the first one that a step may read."""
    has_parts: bool = False
    """Whether layers with a window use parts of pages, and others keep all pages."""
    has_blocks: bool = False
    """Whether attention starts at the last multiple of the window, so that blocks start where they do in the request."""


class PageTables:
    """The pages of each row, and the part of each page."""

    def __init__(self) -> None:
        self.pages: Ints = np.zeros((8, 8), np.int64)
        """[rows, pages]."""
        self.part_of: Ints = np.zeros(0, np.int64)
        """[pages]; any for pages without a part. Empty if pages have no parts."""
        self._held: Ints = np.zeros(8, np.int64)

    def update(self, plan: StepPlan, has_parts: bool) -> None:
        """Applies the plan."""
        for new in plan.admitted:
            self._reserve(new.row + 1, 1)
            self._held[new.row] = 0
        for request, kept in plan.truncations:
            self._held[plan.rows[request]] = kept
        for row, pages in zip(plan.rows, plan.pages, strict=True):
            if pages:
                held = int(self._held[row])
                self._reserve(row + 1, held + len(pages))
                self.pages[row, held : held + len(pages)] = pages
                self._held[row] = held + len(pages)
                if has_parts:
                    self._reserve_parts(max(pages) + 1)
        for page, part in plan.parts:
            self._reserve_parts(page + 1)
            self.part_of[page] = part

    def _reserve(self, rows: int, pages: int) -> None:
        old_rows, old_pages = self.pages.shape
        if rows > old_rows or pages > old_pages:
            new_rows = max(old_rows, 1 << (rows - 1).bit_length())
            new_pages = max(old_pages, 1 << (pages - 1).bit_length())
            self.pages = np.pad(self.pages, ((0, new_rows - old_rows), (0, new_pages - old_pages)))
            self._held = np.pad(self._held, (0, new_rows - old_rows))

    def _reserve_parts(self, pages: int) -> None:
        missing = pages - len(self.part_of)
        if missing > 0:
            self.part_of = np.pad(self.part_of, (0, max(missing, len(self.part_of))))


class TableView:
    """The tables of the layers that share them. `window`: of requests that drop pages or parts."""

    def __init__(self, tables: PageTables, shape: CacheShape, window: PageWindow | None, *, has_parts: bool = False) -> None:
        self._tables = tables
        self._page_size = shape.page_size
        self._window = window
        self._has_blocks = shape.has_blocks
        self._has_parts = has_parts
        self._kv_heads = shape.kv_heads
        self._heads: Ints = np.arange(shape.kv_heads, dtype=np.int64)

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Returns the slots of these positions, [positions * kv_heads]."""
        pages = self._view(self._tables.pages[rows, positions // self._page_size])
        cache_rows = pages[:, None] * self._kv_heads + self._heads
        slots: Ints = (cache_rows * self._page_size + (positions % self._page_size)[:, None]).reshape(-1)
        return slots

    def contexts(self, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Returns the tokens that attention of each request starts from, and the pages before them, which no token reads."""
        if self._window is None:
            return starts + counts, np.zeros_like(starts)
        size = self._window.tokens
        first = starts // size * size if self._has_blocks else np.maximum(0, starts - size + 1)
        skipped: Ints = first // self._page_size
        return starts + counts - skipped * self._page_size, skipped

    def tables(self, rows: Ints, skipped: Ints, width: int) -> Ints:
        """Returns `width` columns of each row's table, without its skipped ones; columns after its pages may be any."""
        pages = self._tables.pages
        if self._window is None:
            return pages[rows, :width]
        columns = skipped[:, None] + np.arange(width)
        return self._view(pages[rows[:, None], np.minimum(columns, pages.shape[1] - 1)])

    def table(self, row: int, num_skipped: int, length: int) -> Ints:
        """Returns the table of one row for `length` tokens after the skipped pages."""
        return self._view(self._tables.pages[row, num_skipped : num_skipped - (-length // self._page_size)])

    def cache_rows(self, tables: Ints) -> Ints:
        """Returns rows of the cache, [..., kv_heads, pages], of tables [..., pages]."""
        cache_rows: Ints = tables[..., None, :] * self._kv_heads + self._heads[:, None]
        return cache_rows

    def _view(self, pages: Ints) -> Ints:
        return self._tables.part_of[pages] if self._has_parts else pages
