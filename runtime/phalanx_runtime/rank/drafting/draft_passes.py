"""Draft passes: each samples the children of the draft tokens that it computes.

    pass 1   backfilled tokens and each path's own tokens      pass p   draft tokens of pass p - 1 that get children

A draft token attends to the request's own tokens and its branch. A token that ends its request gets no children.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT, chain, is_chain, levels
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan, TreeBounds
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition
from phalanx_runtime.rank.sampling.filters import make_draw
from phalanx_runtime.rank.sampling.gumbel import RankedTokens
from phalanx_runtime.rank.step.draft_paths import NO_TOKEN, DraftedPath

# FixedTree: pass p computes the nodes of level p that have children.
# BestFirst: pass p computes those of level p among the most probable of all nodes. The probability of a node is its share of the
# draft's logits with noise, times that of its parent. The first child is the draft's own sample.


class GrowingPath(Protocol):
    """Draft tokens of one path: nodes, numbered as added."""

    @property
    def slots(self) -> list[int]:
        """Computed nodes, by slot after the request's own tokens."""
        ...

    @property
    def parents(self) -> list[int]:
        """Parent of each node."""
        ...

    def num_children(self, node: int) -> int:
        """Number of ranked tokens for `add`; a single one has no share."""
        ...

    def add(self, node: int, ranked: RankedTokens, ends: Collection[int]) -> None:
        """Adds children; those in `ends` stay leaves."""
        ...

    def next_nodes(self) -> list[int]:
        """Adds the nodes of the next pass to `slots` and returns them; empty at the end."""
        ...

    def branch(self, node: int) -> tuple[int, ...]:
        """Tokens from the root to this node."""
        ...

    def drafted(self) -> DraftedPath:
        """Returns the draft tokens of the path."""
        ...


def growing_path(path: DraftPath) -> GrowingPath:
    """Makes the path's tree."""
    return FixedTree(path.parents or chain(path.depth)) if path.tree_bounds is None else BestFirst(path.depth, path.tree_bounds)


class FixedTree:
    """A tree of known shape."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.slots: list[int] = []
        self.parents = list(parents)
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self._levels = levels(tuple(parents))
        self._tokens = [NO_TOKEN] * len(parents)
        self._ends: set[int] = set()
        self._level = 0

    def num_children(self, node: int) -> int:
        """Children in the shape."""
        return len(self._children.get(node, ()))

    def add(self, node: int, ranked: RankedTokens, ends: Collection[int]) -> None:
        """Sets the children's tokens."""
        for child, token, log_share in zip(self._children[node], ranked.tokens, ranked.log_shares, strict=False):
            self._tokens[child] = token if log_share > -math.inf else NO_TOKEN
            if token in ends:
                self._ends.add(child)

    def next_nodes(self) -> list[int]:
        """Nodes of the next level with children."""
        level, self._level = self._level, self._level + 1
        nodes = [
            node
            for node in self._children
            if node != ROOT and self._levels[node] == level and self._tokens[node] != NO_TOKEN and node not in self._ends
        ]
        self.slots += nodes
        return nodes

    def branch(self, node: int) -> tuple[int, ...]:
        """Tokens from the root."""
        return () if node == ROOT else (*self.branch(self.parents[node]), self._tokens[node])

    def drafted(self) -> DraftedPath:
        """Returns the draft tokens of the path."""
        return DraftedPath(self._tokens)


class BestFirst:
    """A tree of the `count` most probable nodes."""

    def __init__(self, count: int, growth: TreeBounds) -> None:
        self.slots: list[int] = []
        self.parents: list[int] = []
        self._count = count
        self._growth = growth
        self._tokens: list[int] = []
        self._levels: list[int] = []
        self._log_shares: list[float] = []
        self._ends: set[int] = set()
        self._level = 0

    def num_children(self, node: int) -> int:
        """Children that the growth allows, at least two."""
        return max(2, self._width(self._child_level(node)))

    def add(self, node: int, ranked: RankedTokens, ends: Collection[int]) -> None:
        """Adds children."""
        own, level = 0.0 if node == ROOT else self._log_shares[node], self._child_level(node)
        for token, log_share in zip(ranked.tokens[: self._width(level)], ranked.log_shares, strict=False):
            if log_share > -math.inf:
                if token in ends:
                    self._ends.add(len(self.parents))
                self.parents.append(node)
                self._tokens.append(token)
                self._levels.append(level)
                self._log_shares.append(own + min(log_share, 0.0))

    def next_nodes(self) -> list[int]:
        """The most probable nodes of the next level, at most the free slots."""
        level, self._level = self._level, self._level + 1
        if level + 1 >= self._growth.levels:
            return []
        room = self._count - len(self.slots)
        nodes = sorted([node for node in self._best() if self._levels[node] == level and node not in self._ends][:room])
        self.slots += nodes
        return nodes

    def branch(self, node: int) -> tuple[int, ...]:
        """Tokens from the root."""
        return () if node == ROOT else (*self.branch(self.parents[node]), self._tokens[node])

    def drafted(self) -> DraftedPath:
        """The most probable nodes, padded with NO_TOKEN."""
        best = self._best()
        number = {ROOT: ROOT} | {node: at for at, node in enumerate(best)}
        parents = [number[self.parents[node]] for node in best]
        missing = self._count - len(best)
        parents += range(len(parents) - 1, len(parents) - 1 + missing)
        tokens = [self._tokens[node] for node in best] + [NO_TOKEN] * missing
        return DraftedPath(tokens, parents)

    def _child_level(self, node: int) -> int:
        return 0 if node == ROOT else self._levels[node] + 1

    def _width(self, level: int) -> int:
        return self._growth.widths[level] if level < len(self._growth.widths) else 1

    def _best(self) -> list[int]:
        """The `count` most probable nodes, parents first."""
        order = sorted(range(len(self.parents)), key=lambda node: (-self._log_shares[node], self._levels[node], node))
        return order[: self._count]


SampleDrafts = Callable[[Tensor, Sequence[DraftPosition], int], list[RankedTokens]]
"""Samples ranked tokens for each hidden state, equally on every rank."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one request in a pass."""

    request: int
    """Row of the plan."""
    start: int
    tokens: list[int]
    is_drafted: bool = False
    """Draft tokens follow."""


@dataclass(frozen=True, slots=True)
class _Pass:
    piece: _Piece
    nodes: list[int]
    """Parents of the sampled tokens."""
    parents: list[int]
    """Shape of all computed nodes."""


def draft(
    plan: StepPlan, rows: Mapping[int, NewRow], states: Callable[[StepPlan], Tensor], sample: SampleDrafts
) -> list[DraftedPath]:
    """Drafts the plan's drafted paths, in order. `states`: computes the hidden states of a plan's draws, [n, hidden]."""
    paths = {path.request: path for path in plan.paths if path.is_drafted}
    growing = {request: growing_path(path) for request, path in paths.items()}
    indices = dict(plan.draws)
    passes = [_Pass(piece, [ROOT] if piece.is_drafted else [], []) for piece in _first_pieces(plan)]
    while passes:
        expanded = [(entry.piece.request, node) for entry in passes for node in entry.nodes]
        hidden = states(_pass_plan(plan, passes))
        if not expanded:
            break
        positions = []
        for request, node in expanded:
            row, branch = plan.rows[request], growing[request].branch(node)
            positions.append(DraftPosition(row, make_draw(rows[row].sampling, indices[request] + len(branch)), branch))
        count = max(growing[request].num_children(node) for request, node in expanded)
        ranked = sample(hidden[: len(expanded)], positions, count)
        for (request, node), position, tokens in zip(expanded, positions, ranked, strict=True):
            growing[request].add(node, tokens, _ends(rows[position.row].sampling, position.draw.index))
        passes = [entry for request, path in paths.items() if (entry := _next_pass(plan, path, growing[request])).nodes]
    return [growing[request].drafted() for request in paths]


def _ends(sampling: wire.Sampling, index: int) -> Collection[int]:
    return sampling.stop_token_ids if index + 1 >= sampling.min_tokens else ()


def _first_pieces(plan: StepPlan) -> list[_Piece]:
    """Backfilled tokens, then the own tokens of drafted paths."""
    depths = {path.request: path.depth for path in plan.paths if path.is_drafted}
    backfills = {catch_up.request: catch_up for catch_up in plan.backfills}
    ends = list(accumulate(plan.counts))
    pieces = []
    for request in sorted(depths.keys() | backfills.keys()):
        catch_up = backfills.get(request)
        start, tokens = (plan.starts[request], []) if catch_up is None else (catch_up.start, catch_up.tokens)
        if request in depths:
            tokens = tokens + plan.tokens[ends[request] - plan.counts[request] : ends[request] - depths[request]]
        pieces.append(_Piece(request, start, tokens, is_drafted=request in depths))
    return pieces


def _next_pass(plan: StepPlan, path: DraftPath, growing: GrowingPath) -> _Pass:
    """The next nodes, in the slots after the computed ones."""
    nodes = growing.next_nodes()
    first = plan.starts[path.request] + plan.counts[path.request] - path.depth
    tokens = [growing.branch(node)[-1] for node in nodes]
    piece = _Piece(path.request, first + len(growing.slots) - len(nodes), tokens, is_drafted=True)
    slot_of = {ROOT: ROOT} | {node: slot for slot, node in enumerate(growing.slots)}
    return _Pass(piece, nodes, [slot_of[growing.parents[node]] for node in growing.slots])


def _pass_plan(plan: StepPlan, passes: Sequence[_Pass]) -> StepPlan:
    pieces = [entry.piece for entry in passes]
    return StepPlan(
        step=plan.step,
        admitted=[],
        rows=[plan.rows[piece.request] for piece in pieces],
        starts=[piece.start for piece in pieces],
        counts=[len(piece.tokens) for piece in pieces],
        pages=[[] for _ in pieces],
        tokens=[token for piece in pieces for token in piece.tokens],
        draws=[(at, 0) for at, piece in enumerate(pieces) if piece.is_drafted],
        paths=[
            DraftPath(request=at, depth=len(entry.nodes) - 1, parents=[] if is_chain(entry.parents) else entry.parents)
            for at, entry in enumerate(passes)
            if entry.parents
        ],
    )
