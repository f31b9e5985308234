"""N-gram proposer: draft tokens are those that followed the last tokens where they occurred before, in prompt or output.

    tokens   ... a b c | d e f ........ a b c |        the last three occurred before: d e f are proposed
                       ^ there                ^ now

Positions are found by the two tokens before them, the latest first; the position with the longest agreement wins, and a tree
takes several. Indexing a position and a lookup take constant time. Only recent tokens are indexed: a request needs 64 KiB and 4
bytes per position, at most 192 KiB.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_runtime.core.acceptance import FADE_OF_REQUEST, AcceptanceRates

SHORTEST = 2
"""Tokens that must agree: one alone occurs nearly everywhere."""
LONGEST = 32
"""Most tokens compared."""
PLACES = 8
"""Positions compared per lookup."""
AT_ONCE = 4096
"""Positions indexed per step for all requests, about a millisecond: long prompts are indexed over several steps, which have no
draft tokens for them."""
LATEST = 1 << 14
"""Indexed tokens of a long text. At twice as many the index is rebuilt with this number."""
BUCKETS = 1 << 14
"""Size of the hash table over pairs of tokens."""
TRIES = 64
"""Positions of one hash that a lookup visits."""


class NgramProposer:
    """Index of one request's tokens, which are only appended."""

    __slots__ = ("_before", "_entered", "_first", "_latest")

    def __init__(self) -> None:
        self._latest = array("I")
        """Latest position by hash; 0: empty. Allocated at the first indexed position."""
        self._before = array("I")
        """For each position the one before it with the same hash; 0: no earlier one."""
        self._first = self._entered = SHORTEST

    def enter(self, tokens: Sequence[int], most: int) -> int:
        """Indexes at most `most` positions before the end. Returns how many."""
        end = len(tokens)
        if not self._latest or end - self._first > 2 * LATEST:
            self._first = self._entered = max(SHORTEST, end - LATEST)
            self._latest, self._before = array("I", [0]) * BUCKETS, array("I")
        first = self._entered
        self._entered = max(first, min(end, first + most))
        for place in range(first, self._entered):
            at = _hash(tokens[place - 2], tokens[place - 1])
            self._before.append(self._latest[at])
            self._latest[at] = place
        return self._entered - first

    def find(self, tokens: Sequence[int], count: int, places: int = 1) -> list[tuple[list[int], int]]:
        """Returns for up to `places` positions `count` candidate tokens and the number of agreeing tokens, the longest agreement
        first, then the latest. Empty while positions are unindexed."""
        end = len(tokens)
        if self._entered < end or end <= SHORTEST or count < 1:
            return []
        before, last = tokens[-2], tokens[-1]
        place, found = self._latest[_hash(before, last)], list[tuple[int, int]]()
        for _ in range(TRIES):
            if not place or len(found) == PLACES:
                break
            if tokens[place - 1] == last and tokens[place - 2] == before:
                found.append((_agree(tokens, place), place))
            place = self._before[place - self._first]
        found.sort(key=lambda one: (-one[0], -one[1]))
        return [(_following(tokens, at, count), same) for same, at in found[:places]]


def _hash(before: int, last: int) -> int:
    """Hash of two tokens."""
    return (before * 40_503 + last) % BUCKETS


def _agree(tokens: Sequence[int], place: int) -> int:
    """How many tokens before the place are those before the end."""
    most = min(place, LONGEST)
    same = SHORTEST
    while same < most and tokens[place - same - 1] == tokens[-same - 1]:
        same += 1
    return same


def _following(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """What follows the place, and again from there where it reaches the end: then the last tokens repeat."""
    found = list(tokens[place : place + count])
    period = len(tokens) - place
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


# What an engine knows of one request that wants proposals.


@dataclass(slots=True, kw_only=True)
class RequestSpeculation:
    """By which method, how many at once at most, and how they may branch.

    num_drafted_pages: so many of its first pages a draft model has computed whole; see `catching_up`.
    """

    method: Method
    most: int
    tree: Tree = CHAIN
    lookup: NgramProposer = field(default_factory=NgramProposer)
    shares: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(FADE_OF_REQUEST))
    num_drafted_pages: int = 0
    last_step: int = 0
