"""Passes of a draft: tokens proposed one behind the other, each drawn with the noise of the output index that it is for.

pass 1   what the draft lacks, and each path's own tokens               pass p   the proposals of pass p - 1 that get children

A chain has one proposal in each pass. A tree may have several: each sees the request's own tokens and those of its branch.
Behind a token that ends its request, and where nothing can be drawn, there is nothing to propose.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import OWN, is_chain
from phalanx_runtime.core.step_plan import NewRow, Path, StepPlan
from phalanx_runtime.rank.drafting.draft_sampler import Place
from phalanx_runtime.rank.growth import Growing, growing
from phalanx_runtime.rank.sampling.draw import Rivals, draw_of
from phalanx_runtime.rank.step.paths import Drafted

Choose = Callable[[Tensor, Sequence[Place], int], list[Rivals]]
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


def draft(plan: StepPlan, rows: Mapping[int, NewRow], states: Callable[[StepPlan], Tensor], choose: Choose) -> list[Drafted]:
    """The plan's drafted paths, in their order.

    `states` computes a small plan over the same rows and gives the states behind its draws.
    """
    paths = {path.request: path for path in plan.paths if path.is_drafted}
    grown = {request: growing(path) for request, path in paths.items()}
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
            places.append(Place(row, draw_of(rows[row].sampling, indexes[request] + len(behind)), behind))
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


def _next(plan: StepPlan, path: Path, one: Growing) -> _Pass:
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
        plan.step,
        [],
        [plan.rows[piece.request] for piece in pieces],
        [piece.start for piece in pieces],
        [len(piece.tokens) for piece in pieces],
        [[] for _ in pieces],
        [token for piece in pieces for token in piece.tokens],
        [(at, 0) for at, piece in enumerate(pieces) if piece.drawn],
        paths=[
            Path(at, len(one.nodes) - 1, parents=[] if is_chain(one.parents) else one.parents)
            for at, one in enumerate(passed)
            if one.parents
        ],
    )
