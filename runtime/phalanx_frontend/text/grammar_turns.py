"""Which grammar is compiled next, and which is refused: callers take turns.

A caller waits for at most one grammar of each other caller per grammar of its own. With all places taken, the caller with the
most loses its newest if it has at least two more than the caller of the added one. A grammar that several callers wait for counts
as that of the caller with the fewest, and is a loss of all.
"""

Turn = tuple[str, bytes]
"""A caller, and the hash of a grammar."""


class GrammarTurns:
    """Grammars that wait, by caller, in the order of their arrival. Several callers may wait for one grammar."""

    def __init__(self, limit: int) -> None:
        """`limit`: different grammars of all callers together."""
        self._limit = limit
        self._waiting: dict[str, dict[bytes, None]] = {}
        """The next caller is first."""

    def __len__(self) -> int:
        """Different grammars."""
        return len(self._least_of_callers())

    def add(self, turn: Turn) -> list[Turn]:
        """Adds a grammar. Returns what is refused instead: nothing, the added turn, or all turns of another grammar."""
        caller, key = turn
        refused: list[Turn] = []
        least = self._least_of_callers()
        if key not in least and len(least) >= self._limit:
            most = max(least.values())
            if most <= len(self._waiting.get(caller, ())) + 1:
                return [turn]
            newest = [other for other in least if least[other] == most][-1]
            refused = [(other, newest) for other in self._waiting if newest in self._waiting[other]]
            self._drop(newest)
        self._waiting.setdefault(caller, {})[key] = None
        return refused

    def take(self) -> bytes | None:
        """Removes and returns the next grammar, of all callers. Null if none waits."""
        if not self._waiting:
            return None
        caller = next(iter(self._waiting))
        key = next(iter(self._waiting[caller]))
        self._waiting[caller] = self._waiting.pop(caller)
        self._drop(key)
        return key

    def _least_of_callers(self) -> dict[bytes, int]:
        """Returns, for each grammar, how many its caller with the fewest waits for. The newest of the last caller is last."""
        least: dict[bytes, int] = {}
        for keys in self._waiting.values():
            for key in keys:
                least[key] = min(least.pop(key, len(keys)), len(keys))
        return least

    def _drop(self, key: bytes) -> None:
        for caller in list(self._waiting):
            self._waiting[caller].pop(key, None)
            if not self._waiting[caller]:
                del self._waiting[caller]
