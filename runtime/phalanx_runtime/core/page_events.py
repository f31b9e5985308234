"""What became findable in the prefix cache and what did no longer, numbered, for those who keep a copy (routers).

    replay of all changes on an empty set = the keys that the pool finds now

The log is bounded: who takes too late is told that the oldest are forgotten, and takes all keys instead.
"""


class PageEvents:
    """The latest changes that nobody took yet: (is_added, key) each. Numbers go up by one, from 0."""

    __slots__ = ("_length", "_log", "next_number")

    def __init__(self, length: int) -> None:
        self.next_number = 0
        """Number of the change to come: what is found now comes of all changes before it."""
        self._length = length
        self._log: list[tuple[bool, bytes]] = []

    def append(self, is_added: bool, key: bytes) -> None:
        """Takes note of one change."""
        if len(self._log) <= self._length:
            self._log.append((is_added, key))
        self.next_number += 1

    def take(self) -> list[tuple[bool, bytes]] | None:
        """The changes since the call before, oldest first; None when there were more than the log holds."""
        changes, self._log = self._log, []
        return changes if len(changes) <= self._length else None
