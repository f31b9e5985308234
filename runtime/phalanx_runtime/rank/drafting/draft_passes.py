"""Passes of a draft: tokens proposed one behind the other, each drawn with the noise of the output index that it is for.

pass 1   what the draft lacks, and each path's own tokens               pass p   the proposals of pass p - 1 that get children

A chain has one proposal in each pass. A tree may have several: each sees the request's own tokens and those of its branch.
Behind a token that ends its request, and where nothing can be drawn, there is nothing to propose.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import OWN, chain, is_chain, levels
from phalanx_runtime.core.step_plan import Growth, NewRow, Path, StepPlan
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition
from phalanx_runtime.rank.sampling.draw import Rivals, draw_of
from phalanx_runtime.rank.step.paths import NO_TOKEN, DraftedPath

# How the proposals of one path come about: which are computed in the next pass of a draft, and how many children each gets.
#     Fixed       the plan knows the shape: pass p computes the proposals of level p that have children     BestFirst   pass p
# computes those of level p that are among the likeliest of all so far; in the end the likeliest stay
# A proposal is as likely as its share of the draft's scores, noise included, times that of its parent. So it would be if the
# target's scores differed from the draft's by noise of its own. The first child is always the draft's own draw.


class GrowingPath(Protocol):
    """One path. Proposals have the numbers in which they were added, until `drafted`."""

    @property
    def slots(self) -> list[int]:
        """Those that were computed, in the order of the slots behind the request's own token that they lie in."""
        ...

    @property
    def parents(self) -> list[int]:
        """The parents of all there are."""
        ...

    def num_rivals(self, node: int) -> int:
        """How many rivals are wanted behind this one; with two or more their shares are told."""
        ...

    def add(self, node: int, rivals: Rivals, ends: Collection[int]) -> None:
        """Gives it children. Behind those of `ends` there will be nothing."""
        ...

    def next(self) -> list[int]:
        """Those to be computed in the next pass; none when the path is drafted. They are in `slots` from now on."""
        ...

    def behind(self, node: int) -> tuple[int, ...]:
        """The tokens of its branch, its own the last."""
        ...

    def drafted(self) -> DraftedPath:
        """The path as it is told."""
        ...


def growing_path(path: Path) -> GrowingPath:
    """How this path grows."""
    return FixedTree(path.parents or chain(path.depth)) if path.growth is None else BestFirst(path.depth, path.growth)


class FixedTree:
    """A known shape."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.slots: list[int] = []
        self.parents = list(parents)
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self._levels = levels(tuple(parents))
        self._tokens = [NO_TOKEN] * len(parents)
        self._last: set[int] = set()
        self._level = 0

    def num_rivals(self, node: int) -> int:
        """One for each child that the shape has."""
        return len(self._children.get(node, ()))

    def add(self, node: int, rivals: Rivals, ends: Collection[int]) -> None:
        """Gives tokens to its children; one whose token the draft would never draw gets none."""
        for child, token, share in zip(self._children[node], rivals.tokens, rivals.shares, strict=False):
            self._tokens[child] = token if share > -math.inf else NO_TOKEN
            if token in ends:
                self._last.add(child)

    def next(self) -> list[int]:
        """Those of the next level with children."""
        level, self._level = self._level, self._level + 1
        found = [
            node
            for node in self._children
            if node != OWN and self._levels[node] == level and self._tokens[node] != NO_TOKEN and node not in self._last
        ]
        self.slots += found
        return found

    def behind(self, node: int) -> tuple[int, ...]:
        """The tokens of its branch."""
        return () if node == OWN else (*self.behind(self.parents[node]), self._tokens[node])

    def drafted(self) -> DraftedPath:
        """The tokens."""
        return DraftedPath(self._tokens)


class BestFirst:
    """A shape that follows the draft's shares: `count` proposals in the end."""

    def __init__(self, count: int, growth: Growth) -> None:
        self.slots: list[int] = []
        self.parents: list[int] = []
        self._count = count
        self._growth = growth
        self._tokens: list[int] = []
        self._levels: list[int] = []
        self._shares: list[float] = []
        self._last: set[int] = set()
        self._level = 0

    def num_rivals(self, node: int) -> int:
        """One for each child that the growth allows, two at least: their shares are compared."""
        return max(2, self._width(self._below(node)))

    def add(self, node: int, rivals: Rivals, ends: Collection[int]) -> None:
        """Gives it children."""
        own, level = 0.0 if node == OWN else self._shares[node], self._below(node)
        for token, share in zip(rivals.tokens[: self._width(level)], rivals.shares, strict=False):
            if share > -math.inf:
                if token in ends:
                    self._last.add(len(self.parents))
                self.parents.append(node)
                self._tokens.append(token)
                self._levels.append(level)
                self._shares.append(own + min(share, 0.0))

    def next(self) -> list[int]:
        """Those of the next level among the likeliest, as many as there are slots."""
        level, self._level = self._level, self._level + 1
        if level + 1 >= self._growth.levels:
            return []
        room = self._count - len(self.slots)
        found = [node for node in self._best() if self._levels[node] == level and node not in self._last][:room]
        self.slots += sorted(found)
        return sorted(found)

    def behind(self, node: int) -> tuple[int, ...]:
        """The tokens of its branch."""
        return () if node == OWN else (*self.behind(self.parents[node]), self._tokens[node])

    def drafted(self) -> DraftedPath:
        """The likeliest, each behind its parent. Where there are too few, the rest are none."""
        best = self._best()
        number = {OWN: OWN} | {node: at for at, node in enumerate(best)}
        parents = [number[self.parents[node]] for node in best]
        missing = self._count - len(best)
        parents += range(len(parents) - 1, len(parents) - 1 + missing)
        tokens = [self._tokens[node] for node in best] + [NO_TOKEN] * missing
        return DraftedPath(tokens, parents)

    def _below(self, node: int) -> int:
        """The level of its children."""
        return 0 if node == OWN else self._levels[node] + 1

    def _width(self, level: int) -> int:
        return self._growth.widths[level] if level < len(self._growth.widths) else 1

    def _best(self) -> list[int]:
        """The likeliest ones, as many as are wanted: a parent is no less likely than its children, and stands before them."""
        order = sorted(range(len(self.parents)), key=lambda node: (-self._shares[node], self._levels[node], node))
        return order[: self._count]


Choose = Callable[[Tensor, Sequence[DraftPosition], int], list[Rivals]]
"""So many of the tokens that may be drawn from each hidden state, the draw first: the same ones on every rank that takes part."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of request `request` of a plan that a draft computes, from position `start` on. `drawn`: it drafts behind them."""

    request: int
    start: int
    tokens: list[int]
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """Of one request in one pass: what is computed, behind which proposals it draws, and the shape of all that are computed."""

    piece: _Piece
    nodes: list[int]
    parents: list[int]


def draft(plan: StepPlan, rows: Mapping[int, NewRow], states: Callable[[StepPlan], Tensor], choose: Choose) -> list[DraftedPath]:
    """The plan's drafted paths, in their order.

    `states` computes a small plan over the same rows and gives the states behind its draws.
    """
    paths = {path.request: path for path in plan.paths if path.is_drafted}
    grown = {request: growing_path(path) for request, path in paths.items()}
    indexes = dict(plan.draws)
    passed = [_Pass(piece, [OWN] if piece.drawn else [], []) for piece in _first(plan)]
    while passed:
        drawn = [(one.piece.request, node) for one in passed for node in one.nodes]
        hidden = states(_small(plan, passed))
        if not drawn:
            break
        places = []
        for request, node in drawn:
            row, behind = plan.rows[request], grown[request].behind(node)
            places.append(DraftPosition(row, draw_of(rows[row].sampling, indexes[request] + len(behind)), behind))
        count = max(grown[request].num_rivals(node) for request, node in drawn)
        for (request, node), place, rivals in zip(drawn, places, choose(hidden[: len(drawn)], places, count), strict=True):
            grown[request].add(node, rivals, _ends(rows[place.row].sampling, place.draw.index))
        passed = [one for request, path in paths.items() if (one := _next(plan, path, grown[request])).nodes]
    return [grown[request].drafted() for request in paths]


def _ends(sampling: wire.Sampling, index: int) -> Collection[int]:
    """The tokens that a request ends with at this output index."""
    return sampling.stop_token_ids if index + 1 >= sampling.min_tokens else ()


def _first(plan: StepPlan) -> list[_Piece]:
    """What is caught up with, and the own tokens of each drafted path behind it."""
    depths = {path.request: path.depth for path in plan.paths if path.is_drafted}
    behind = {one.request: one for one in plan.catch_ups}
    ends = list(accumulate(plan.counts))
    pieces = []
    for request in sorted(depths.keys() | behind.keys()):
        told = behind.get(request)
        start, tokens = (plan.starts[request], []) if told is None else (told.start, told.tokens)
        if request in depths:
            tokens = tokens + plan.tokens[ends[request] - plan.counts[request] : ends[request] - depths[request]]
        pieces.append(_Piece(request, start, tokens, drawn=request in depths))
    return pieces


def _next(plan: StepPlan, path: Path, one: GrowingPath) -> _Pass:
    """The latest proposals that get children, which nobody has computed yet, behind those that were."""
    nodes = one.next()
    first = plan.starts[path.request] + plan.counts[path.request] - path.depth
    tokens = [one.behind(node)[-1] for node in nodes]
    piece = _Piece(path.request, first + len(one.slots) - len(nodes), tokens, drawn=True)
    place_of = {OWN: OWN} | {node: place for place, node in enumerate(one.slots)}
    return _Pass(piece, nodes, [place_of[one.parents[node]] for node in one.slots])


def _small(plan: StepPlan, passed: Sequence[_Pass]) -> StepPlan:
    """These pieces as a plan over the same rows."""
    pieces = [one.piece for one in passed]
    return StepPlan(
        step=plan.step,
        admitted=[],
        rows=[plan.rows[piece.request] for piece in pieces],
        starts=[piece.start for piece in pieces],
        counts=[len(piece.tokens) for piece in pieces],
        pages=[[] for _ in pieces],
        tokens=[token for piece in pieces for token in piece.tokens],
        draws=[(at, 0) for at, piece in enumerate(pieces) if piece.drawn],
        paths=[
            Path(request=at, depth=len(one.nodes) - 1, parents=[] if is_chain(one.parents) else one.parents)
            for at, one in enumerate(passed)
            if one.parents
        ],
    )
