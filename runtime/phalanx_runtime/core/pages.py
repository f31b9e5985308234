"""The page pool: which pages of the KV cache are free and how many holders each of the others has.

Arrays, not objects: a page is an index. Taking and giving back cost O(1) a page. At rest: every page free, every count 0.
What a page holds (its hash, its place in an eviction order) will be further arrays beside the counts.
"""

from array import array


class PagePool:
    """Pages 0 to num_pages - 1, handed out in a fixed order so that the same calls always give the same pages."""

    __slots__ = ("_free", "_holders", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got num_pages={num_pages} page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = array("q", range(num_pages - 1, -1, -1))
        self._holders = array("q", bytes(8 * num_pages))

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """`count` free pages, each now with one holder; None, and nothing taken, when fewer are free."""
        free = self._free
        if count > len(free):
            return None
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds a holder to pages that are held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Takes one holder off each page; those without any are free again. The last page goes first, to be taken last."""
        holders = self._holders
        for page in reversed(pages):
            assert holders[page] > 0, f"page {page} is given back once too often"
            holders[page] -= 1
            if not holders[page]:
                self._free.append(page)

    def check(self, held: list[list[int]]) -> list[str]:
        """What is wrong with the pool, given the pages of every holder; empty when every page is accounted for."""
        expected = array("q", bytes(8 * self.num_pages))
        for pages in held:
            for page in pages:
                expected[page] += 1
        wrong = [
            f"page {page} has {count} holders, expected {want}"
            for page, (count, want) in enumerate(zip(self._holders, expected, strict=True))
            if count != want
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            wrong.append(f"{len(self._free) - len(free)} pages are in the free list twice")
        wrong += [f"page {page} is free and held" for page in sorted(free) if self._holders[page]]
        lost = self.num_pages - len(free) - sum(1 for count in self._holders if count)
        if lost > 0:
            wrong.append(f"{lost} pages are neither free nor held")
        return wrong
