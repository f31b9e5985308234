"""Proposals without a model: what followed the last tokens of a request where they occurred before, in prompt or output.

    tokens   ... a b c | d e f ........ a b c |        the last three occurred before: d e f are proposed
                       ^ there                ^ now

Places are found by the two tokens before them, the latest first, and the one wins whose tokens before it agree the longest; a
tree takes several. A place is entered once, in time that does not depend on the length; so is a look. Only the latest
tokens are: a request takes 64 KiB, and 4 bytes a place, at most 192 KiB in all.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_runtime.core.acceptance import FADE_OF_REQUEST, AcceptanceRates

SHORTEST = 2
"""Tokens that must agree. One alone agrees nearly everywhere and says little."""
LONGEST = 32
"""Tokens that are compared at most."""
PLACES = 8
"""Places that one look compares."""
AT_ONCE = 4096
"""Places that one step enters for all requests, about a millisecond: long prompts are entered over several steps, which go on
without proposals for them."""
LATEST = 1 << 14
"""Tokens of a long text that are entered. Once twice as many are, it begins anew with so many."""
BUCKETS = 1 << 14
"""Places are found by a hash of the two tokens before them."""
TRIES = 64
"""Places of one hash that a look goes through."""


class NgramProposer:
    """The places of one request's tokens. Tokens are only ever appended."""

    __slots__ = ("_before", "_entered", "_first", "_latest")

    def __init__(self) -> None:
        self._latest = array("I")
        """By hash the latest place; 0: none. Empty until something is entered."""
        self._before = array("I")
        """For each place from the first on the one before it with the same hash; 0: none."""
        self._first = self._entered = SHORTEST

    def enter(self, tokens: Sequence[int], most: int) -> int:
        """How many places it entered now, at most so many: those before the end, for what follows them is known."""
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
        """For so many places `count` tokens that may come next, and how many tokens agree there; the most first, of equal ones
        the latest. Fewer where there are fewer, none while some are to be entered."""
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
    """Of two tokens."""
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


@dataclass(slots=True)
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
