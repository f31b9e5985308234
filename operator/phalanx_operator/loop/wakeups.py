"""Keyed work queue: one entry per key, never two workers on one key, and a wake of a busy key is kept until it is done.

All times are arguments.
"""

import heapq
from collections.abc import Callable

from phalanx_operator.kube.store import Key


class Wakeups:
    """The keyed queue."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()

    def __len__(self) -> int:
        return len(self._due)

    def num_due(self, now: float) -> int:
        """Returns the number of keys that are due and not taken."""
        return sum(at <= now for at in self._due.values())

    def wake(self, key: Key, at: float) -> None:
        """Makes this key due at that time, or earlier if an earlier wake is queued."""
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """Returns a due key that no worker holds. The caller calls `done` when it is finished."""
        later: list[tuple[float, Key]] = []
        found = None
        while self._heap and self._heap[0][0] <= now and found is None:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue
            if key in self._busy:
                later.append((at, key))
                continue
            found = key
            del self._due[key]
            self._busy.add(key)
        for entry in later:
            heapq.heappush(self._heap, entry)
        return found

    def done(self, key: Key) -> None:
        """Releases the key."""
        self._busy.discard(key)

    def next_due(self) -> float | None:
        """Returns when the next key becomes due; None if no key waits or all wait for `done`."""
        busy: list[tuple[float, Key]] = []
        found = None
        while self._heap and found is None:
            at, key = self._heap[0]
            if self._due.get(key) == at and key not in self._busy:
                found = at
            else:
                heapq.heappop(self._heap)
                if self._due.get(key) == at:
                    busy.append((at, key))
        for entry in busy:
            heapq.heappush(self._heap, entry)
        return found


def backoff(failures: int, draw: Callable[[], float]) -> float:
    """Returns the seconds to wait after this many failures in a row: 0.5 doubling to 60, with a random second half."""
    longest: float = min(60.0, 0.5 * 2.0 ** min(failures, 10))
    return longest * (0.5 + 0.5 * draw())
