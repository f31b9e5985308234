"""Which service is to be looked at next: one entry a key, never two workers on one key, later wishes for a busy key kept.

Plain bookkeeping; times come in as arguments.
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
        """How many keys are to be looked at now or were before, and nobody has taken yet."""
        return sum(at <= now for at in self._due.values())

    def wake(self, key: Key, at: float) -> None:
        """Look at this key at that time, or sooner if that was wished before."""
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """A key that is due and nobody works on; the caller says `done` when it is finished."""
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
        """The key may be taken again."""
        self._busy.discard(key)

    def next_due(self) -> float | None:
        """When there will be something to take; None when nothing is waiting, or only for `done`."""
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
    """Seconds to wait after so many failures in a row: 0.5 doubling to 60, of which the last half is drawn from [0, 1)."""
    longest: float = min(60.0, 0.5 * 2.0 ** min(failures, 10))
    return longest * (0.5 + 0.5 * draw())
