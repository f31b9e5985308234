"""What became findable in the prefix cache and what did no longer, numbered, for those who keep a copy (routers).

    replay of every event on an empty set = the keys that the pool finds now

The log is bounded: who drains too late misses the oldest, sees it by the numbers, and takes `PagePool.snapshot` instead.
"""

from collections import deque
from typing import NamedTuple


class PageEvent(NamedTuple):
    """One page added (`is_added`) or removed, by key; `parent` is the key of the page before it, None for the first."""

    number: int
    is_added: bool
    key: bytes
    parent: bytes | None


class PageEvents:
    """The latest events that nobody drained yet. Numbers go up by one, from 0."""

    __slots__ = ("_log", "next_number")

    def __init__(self, length: int) -> None:
        self.next_number = 0
        """Number of the event to come: a snapshot taken now holds all events before it."""
        self._log: deque[tuple[bool, bytes, bytes | None]] = deque(maxlen=length)

    def append(self, is_added: bool, key: bytes, parent: bytes | None) -> None:
        """Takes note of one change; forgets the oldest when the log is full."""
        self._log.append((is_added, key, parent))
        self.next_number += 1

    def drain(self) -> list[PageEvent]:
        """The events since the last drain, oldest first, without those forgotten."""
        first = self.next_number - len(self._log)
        events = [PageEvent(first + i, *entry) for i, entry in enumerate(self._log)]
        self._log.clear()
        return events
