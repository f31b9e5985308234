"""Whether what a group says of its pages follows what it said before: the numbers tell.

nothing yet --snapshot--> next known --number is next--> next known
                           next known --another number--> ask for a snapshot, and drop changes until it comes
"""

from typing import Literal

from phalanx_api import wire


class PageFeed:
    """One group's changes, as they come on one connection."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: int | None = None
        """Number of the change to come; None until a snapshot comes."""

    def restart(self) -> None:
        """A new incarnation: it begins without pages, at number 0."""
        self._next = 0

    def take(self, changes: wire.PageChanges) -> Literal["use", "ask", "drop"]:
        """What to do with these: they follow or are a snapshot, some are missing before them, or a snapshot is on its way."""
        if changes.is_snapshot:
            self._next = changes.first
            return "use"
        if self._next is None:
            return "drop"
        if changes.first != self._next:
            self._next = None
            return "ask"
        self._next += len(changes.changes)
        return "use"
