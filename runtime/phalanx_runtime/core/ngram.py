"""N-gram proposer: drafts the tokens that followed an earlier occurrence of the last tokens.

    tokens   ... a b c | d e f ........ a b c |        draft tokens: d e f
                       ^ match                ^ end

The longest match wins; a tree uses several. Indexing a position and a lookup take constant time; a request needs at most 192 KiB.
"""

from array import array
from collections.abc import Sequence

MIN_MATCH = 2
MAX_MATCH = 32
"""Matching tokens."""
MAX_MATCHES = 8
MAX_INDEXED_PER_STEP = 4096
"""Positions of all requests, about 1 ms. A longer prompt takes several steps, without draft tokens."""
RECENT_POSITIONS = 1 << 14
"""Positions in a rebuilt index; it is rebuilt at twice as many."""
BUCKETS = 1 << 14

MAX_VISITED = 64
"""Positions visited per lookup."""


class NgramProposer:
    """Index of one request's tokens, which only grow."""

    __slots__ = ("_end", "_first", "_latest", "_previous")

    def __init__(self) -> None:
        self._latest = array("I")
        """Latest position by hash; 0: empty. Allocated on first use."""
        self._previous = array("I")
        """Previous position with the same hash; 0: the first."""
        self._first = self._end = MIN_MATCH
        """Positions [first, end) are indexed."""

    def extend(self, tokens: Sequence[int], max_positions: int) -> int:
        """Indexes up to `max_positions` positions. Returns their number."""
        length = len(tokens)
        if not self._latest or length - self._first > 2 * RECENT_POSITIONS:
            self._first = self._end = max(MIN_MATCH, length - RECENT_POSITIONS)
            self._latest, self._previous = array("I", [0]) * BUCKETS, array("I")
        start = self._end
        self._end = max(start, min(length, start + max_positions))
        for position in range(start, self._end):
            bucket = _hash(tokens[position - 2], tokens[position - 1])
            self._previous.append(self._latest[bucket])
            self._latest[bucket] = position
        return self._end - start

    def find(self, tokens: Sequence[int], count: int, max_matches: int = 1) -> list[tuple[list[int], int]]:
        """Returns up to `max_matches` pairs of `count` draft tokens and match length, longest first, then latest.

        Empty until all positions are indexed.
        """
        length = len(tokens)
        if self._end < length or length <= MIN_MATCH or count < 1:
            return []
        before, last = tokens[-2], tokens[-1]
        position, matches = self._latest[_hash(before, last)], list[tuple[int, int]]()
        for _ in range(MAX_VISITED):
            if not position or len(matches) == MAX_MATCHES:
                break
            if tokens[position - 1] == last and tokens[position - 2] == before:
                matches.append((_match_length(tokens, position), position))
            position = self._previous[position - self._first]
        matches.sort(key=lambda match: (-match[0], -match[1]))
        return [(_following(tokens, start, count), matching) for matching, start in matches[:max_matches]]


def _hash(before: int, last: int) -> int:
    return (before * 40_503 + last) % BUCKETS


def _match_length(tokens: Sequence[int], position: int) -> int:
    longest = min(position, MAX_MATCH)
    length = MIN_MATCH
    while length < longest and tokens[position - length - 1] == tokens[-length - 1]:
        length += 1
    return length


def _following(tokens: Sequence[int], position: int, count: int) -> list[int]:
    """Returns `count` tokens from `position` on; past the end they repeat."""
    found = list(tokens[position : position + count])
    period = len(tokens) - position
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
