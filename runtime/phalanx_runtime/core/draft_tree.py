"""Shapes of proposals: each is a token behind another proposal, its parent, or behind the request's own last token.

    parents  -1  0  1  -1  3          own - 0 - 1 - 2
                                          \\ 3 - 4

Every proposal comes after its parent. Those with one parent are its children, the likeliest first. A chain is a tree in which
each has one child.
"""

from collections.abc import Sequence
from functools import lru_cache

OWN = -1
"""The parent of proposals behind the request's own last token."""


def chain(count: int) -> list[int]:
    """The parents of so many proposals one behind the other."""
    return list(range(OWN, count - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each is behind the one before."""
    return all(parent == at - 1 for at, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def levels(parents: tuple[int, ...]) -> tuple[int, ...]:
    """How many proposals each has before it in its branch."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == OWN else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=1024)
def places(parents: tuple[int, ...]) -> tuple[int, ...]:
    """How many children of its parent come before each."""
    seen: dict[int, int] = {}
    found = []
    for parent in parents:
        found.append(seen.get(parent, 0))
        seen[parent] = found[-1] + 1
    return tuple(found)


def part(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The parents of the kept ones among themselves. kept: rising, each with its parent."""
    place_of = {OWN: OWN} | {node: place for place, node in enumerate(kept)}
    return [place_of[parents[node]] for node in kept]
