"""The seam between the page pool and a policy of eviction.

The pool knows which pages may go: *idle* ones, which nobody holds and which no cached page follows (leaf pages first, for
every policy). The policy knows which of the idle ones goes first. It sees every cached page, held ones too.

    insert -> (hit | release | idle)* -> remove          a hit page is not idle until `on_idle` says so again
"""

from typing import Protocol


class Eviction(Protocol):
    """Pages are indices. Each call costs O(1) or O(log pages), some of them amortised."""

    def on_insert(self, page: int, key: int) -> None:
        """The page became findable. key: 64 bits of its hash."""
        ...

    def on_hit(self, page: int) -> None:
        """The page was found and is held by one more request."""
        ...

    def on_release(self, page: int, time: int) -> None:
        """Nobody holds the page any more. time grows with every release; a chain is released from its end."""
        ...

    def on_idle(self, page: int) -> None:
        """The page may be evicted from now on: just released, or the last page that followed it went."""
        ...

    def on_remove(self, page: int) -> None:
        """The page is no longer findable: evicted, or given up before it was written."""
        ...

    def victim(self) -> int:
        """The idle page that goes first. There is one; the pool evicts it at once."""
        ...
