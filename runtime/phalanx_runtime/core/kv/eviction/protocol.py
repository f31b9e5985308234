"""Interface between the page pool and an eviction policy.

The policy selects among idle pages: those without holder and cached child, so leaf pages go first.

    insert -> (hit | release | idle)* -> remove          a hit ends idleness until the next `on_idle`
"""

from typing import Protocol


class Eviction(Protocol):
    """An eviction policy, with calls of O(log pages) at most, amortised."""

    def on_insert(self, page: int, key: int) -> None:
        """The page got a key. `key`: 64 bits of its hash."""
        ...

    def on_hit(self, page: int) -> None:
        """The page was found and got one more holder."""
        ...

    def on_release(self, page: int, time: int) -> None:
        """The page lost its last holder. `time` increases; a chain is released from its end."""
        ...

    def on_idle(self, page: int) -> None:
        """The page became idle."""
        ...

    def on_remove(self, page: int) -> None:
        """The page lost its key."""
        ...

    def victim(self) -> int:
        """Returns the idle page that the pool evicts next. One exists."""
        ...
