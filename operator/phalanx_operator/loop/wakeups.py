"""Keyed work queue: one entry and at most one worker per key."""

import heapq
from collections.abc import Callable

from phalanx_operator.kube.store import Key


class Wakeups:
    """The keyed queue. All times are arguments."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()

    def __len__(self) -> int:
        return len(self._due)

    def num_due(self, now: float) -> int:
        """Returns the number of due keys."""
        return sum(at <= now for at in self._due.values())

    def wake(self, key: Key, at: float) -> None:
        """Makes the key due at `at`, unless it is due earlier."""
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """Returns a due key, if any, for a worker that calls `done`."""
        later: list[tuple[float, Key]] = []
        taken = None
        while self._heap and self._heap[0][0] <= now and taken is None:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue
            if key in self._busy:
                later.append((at, key))
                continue
            taken = key
            del self._due[key]
            self._busy.add(key)
        for entry in later:
            heapq.heappush(self._heap, entry)
        return taken

    def done(self, key: Key) -> None:
        """Releases the key. A wake while it was busy is kept."""
        self._busy.discard(key)

    def next_due(self) -> float | None:
        """Returns when the next key that is not busy is due."""
        busy: list[tuple[float, Key]] = []
        due = None
        while self._heap and due is None:
            at, key = self._heap[0]
            if self._due.get(key) == at and key not in self._busy:
                due = at
            else:
                heapq.heappop(self._heap)
                if self._due.get(key) == at:
                    busy.append((at, key))
        for entry in busy:
            heapq.heappush(self._heap, entry)
        return due


def backoff(failures: int, draw: Callable[[], float]) -> float:
    """Returns the wait after consecutive failures: 0.5 s doubling to 60 s, half random."""
    longest: float = min(60.0, 0.5 * 2.0 ** min(failures, 10))
    return longest * (0.5 + 0.5 * draw())
