"""Shapes of draft trees: the parent of each draft token.

    parents  -1  0  1  -1  3          root - 0 - 1 - 2
                                          \\ 3 - 4

Parents precede children; siblings are in order of probability.
"""

from collections.abc import Sequence
from functools import lru_cache

ROOT = -1
"""The request's last own token."""


def chain(count: int) -> list[int]:
    """Returns the parents of a chain."""
    return list(range(ROOT, count - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether each token follows the previous one."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def levels(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the depth of each token, from 0."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=1024)
def sibling_ranks(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of each token among its siblings."""
    num_children: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(num_children.get(parent, 0))
        num_children[parent] = ranks[-1] + 1
    return tuple(ranks)


def restrict_tree(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Returns the parents of the `kept` nodes, renumbered. `kept` is ascending and contains all parents."""
    number_of = {ROOT: ROOT} | {node: number for number, node in enumerate(kept)}
    return [number_of[parents[node]] for node in kept]
