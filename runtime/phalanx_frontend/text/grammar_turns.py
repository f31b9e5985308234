"""Which grammar is compiled next, and which is refused: callers take turns.

A caller with many costly grammars delays another one's by one. With all places taken, the caller with the most loses its newest.
"""

from collections.abc import Iterable

Turn = tuple[str, bytes]
"""A caller, and the hash of a grammar."""


class GrammarTurns:
    """Grammars that wait, by caller, in the order of their arrival. Several callers may wait for one grammar."""

    def __init__(self, limit: int) -> None:
        """`limit`: grammars of all callers together."""
        self._limit = limit
        self._waiting: dict[str, dict[bytes, None]] = {}
        """The next caller is first."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, turn: Turn) -> Turn | None:
        """Adds a grammar. Returns the one that is refused instead, which may be the added one, or None while there is room."""
        caller, key = turn
        refused = None
        if len(self) >= self._limit:
            refused = self._newest_of_longest()
            if len(self._waiting[refused[0]]) <= len(self._waiting.get(caller, ())) + 1:
                return turn
            self._remove(*refused)
        self._waiting.setdefault(caller, {})[key] = None
        return refused

    def take(self) -> bytes | None:
        """Returns the next grammar, which no caller waits for any more, or None."""
        if not self._waiting:
            return None
        caller = next(iter(self._waiting))
        key = next(iter(self._waiting[caller]))
        self._waiting[caller] = self._waiting.pop(caller)
        for other in list(self._waiting):
            self._remove(other, key)
        return key

    def _newest_of_longest(self) -> Turn:
        longest = max(self._waiting, key=lambda caller: len(self._waiting[caller]))
        return longest, _last(self._waiting[longest])

    def _remove(self, caller: str, key: bytes) -> None:
        self._waiting[caller].pop(key, None)
        if not self._waiting[caller]:
            del self._waiting[caller]


def _last(keys: Iterable[bytes]) -> bytes:
    return list(keys)[-1]
