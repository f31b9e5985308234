"""Shapes of draft trees: each draft token follows its parent, another draft token or the request's last own token.

    parents  -1  0  1  -1  3          own - 0 - 1 - 2
                                          \\ 3 - 4

Parents precede their children; siblings are in order of probability. A chain is a tree with one child per node.
"""

from collections.abc import Sequence
from functools import lru_cache

OWN = -1
"""Parent of draft tokens right after the request's last own token."""


def chain(count: int) -> list[int]:
    """Returns the parents of a chain of `count` tokens."""
    return list(range(OWN, count - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether each token follows the one before."""
    return all(parent == at - 1 for at, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def levels(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the depth of each token in its branch, from 0."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == OWN else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=1024)
def places(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of each token among its siblings."""
    seen: dict[int, int] = {}
    found = []
    for parent in parents:
        found.append(seen.get(parent, 0))
        seen[parent] = found[-1] + 1
    return tuple(found)


def part(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Returns the parents of the kept tokens among themselves. kept: ascending, each with its parent."""
    place_of = {OWN: OWN} | {node: place for place, node in enumerate(kept)}
    return [place_of[parents[node]] for node in kept]
