"""Proposals without a model: what followed the last tokens of a request where they occurred before, in prompt or output.

    tokens   ... a b c | d e f ........ a b c |        the last three occurred before: d e f are proposed
                       ^ there                ^ now

Places are found by the two tokens before them, the latest first, and the one wins whose tokens before it agree the longest; a
tree takes several. A token is entered once, when the request next looks, in time that does not depend on the length; so is a
look.
"""

from collections.abc import Sequence

SHORTEST = 2
"""Tokens that must agree. One alone agrees nearly everywhere and says little."""
LONGEST = 32
"""Tokens that are compared at most."""
PLACES = 8
"""Places that one look compares."""
AT_ONCE = 2048
"""Tokens that are entered in one look: a long prompt is entered over several steps, which go on without proposals."""


class Lookup:
    """The places of one request's tokens. Tokens are only ever appended."""

    __slots__ = ("_before", "_entered", "_latest")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        """The latest place behind two tokens."""
        self._before: list[int] = [0, 0]
        """For each place the one before it behind the same two tokens; 0: none."""
        self._entered = SHORTEST

    def find(self, tokens: Sequence[int], count: int, places: int = 1) -> list[tuple[list[int], int]]:
        """For so many places `count` tokens that may come next, and how many tokens agree there; the most first, of equal ones
        the latest. Fewer where there are fewer."""
        self._enter(tokens)
        end = len(tokens)
        if self._entered < end or end <= SHORTEST or count < 1:
            return []
        place, found = self._latest.get((tokens[-2], tokens[-1]), 0), list[tuple[int, int]]()
        while place and len(found) < PLACES:
            found.append((_agree(tokens, place), place))
            place = self._before[place]
        found.sort(key=lambda one: (-one[0], -one[1]))
        return [(_following(tokens, at, count), same) for same, at in found[:places]]

    def _enter(self, tokens: Sequence[int]) -> None:
        """Enters the places before the end: what follows them is known."""
        first = self._entered
        last = min(len(tokens), first + AT_ONCE)
        for place in range(first, last):
            key = (tokens[place - 2], tokens[place - 1])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = place
        self._entered = max(first, last)


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
