"""What could be proposed for a request, as a tree with the likeliest proposals first: each comes after its parent.

    a draft    by how often drafts of a level and place were accepted: what will be drafted is not known yet
    a lookup   what followed where the last tokens occurred before, merged where it begins alike

So the first few of them are a tree again, and the best one of so many.
"""

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_api.speculation import MAX_DEPTH
from phalanx_runtime.core.acceptance import Share, draft_grade, lookup_grade
from phalanx_runtime.core.draft_tree import OWN, chain


@dataclass(slots=True)
class Candidates:
    """Of each its parent, its level, its grade, and the chance that it is accepted with its branch, which only falls.

    tokens: empty where a draft is to make them.
    """

    parents: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, order=True)
class _Open:
    """The next child of one proposal; the likeliest of all is the least. `before`: the chance of its parent."""

    unlikelihood: float
    number: int
    parent: int
    level: int
    place: int
    before: float


def drafted(share: Share, count: int, widths: Sequence[int]) -> Candidates:
    """So many drafted proposals, the likeliest of all trees of these widths. A second child is no likelier than the first."""
    if not widths:
        return _drafted_chain(share, count)
    found, open_, made = Candidates(), list[_Open](), 0

    def grow(parent: int, level: int, place: int, before: float, most: float) -> None:
        nonlocal made
        if level < MAX_DEPTH and place < width(widths, level):
            chance = min(most, before * share(draft_grade(level, place)))
            heapq.heappush(open_, _Open(-chance, made, parent, level, place, before))
            made += 1

    grow(OWN, 0, 0, 1.0, 1.0)
    while open_ and len(found.parents) < count:
        best = heapq.heappop(open_)
        found.parents.append(best.parent)
        found.levels.append(best.level)
        found.grades.append(draft_grade(best.level, best.place))
        found.chances.append(-best.unlikelihood)
        grow(len(found.parents) - 1, best.level + 1, 0, -best.unlikelihood, -best.unlikelihood)
        grow(best.parent, best.level, best.place + 1, best.before, -best.unlikelihood)
    return found


def _drafted_chain(share: Share, count: int) -> Candidates:
    """The same where there is one child everywhere."""
    grades = [draft_grade(level) for level in range(min(count, MAX_DEPTH))]
    chances = list(accumulate((min(1.0, share(grade)) for grade in grades), operator.mul))
    return Candidates(chain(len(grades)), list(range(len(grades))), grades, chances)


def looked_up(share: Share, count: int, widths: Sequence[int], lines: Sequence[tuple[list[int], int]]) -> Candidates:
    """So many proposals of what was found: tokens that may follow, and how many tokens agree before them, the most first."""
    parents, levels, grades, tokens, chances = list[int](), list[int](), list[int](), list[int](), list[float]()
    children: dict[int, dict[int, int]] = {}
    for line, agreed in lines:
        node, chance = OWN, 1.0
        for level, token in enumerate(line):
            known = children.setdefault(node, {})
            if token not in known:
                if len(known) >= width(widths, level):
                    break
                grade = lookup_grade(agreed + level, len(known))
                known[token] = len(parents)
                parents.append(node)
                levels.append(level)
                grades.append(grade)
                tokens.append(token)
                chances.append(chance * share(grade))
            node = known[token]
            chance = chances[node]
    order = sorted(range(len(parents)), key=lambda node: (-chances[node], node))[:count]
    number = {OWN: OWN} | {node: at for at, node in enumerate(order)}
    return Candidates(
        [number[parents[node]] for node in order],
        [levels[node] for node in order],
        [grades[node] for node in order],
        [chances[node] for node in order],
        [tokens[node] for node in order],
    )


def width(widths: Sequence[int], level: int) -> int:
    """How many children a tree of these widths has at a level."""
    return widths[level] if level < len(widths) else 1
