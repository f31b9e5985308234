"""Passes of a draft: tokens proposed one behind the other, each drawn with the noise of the output index that it is for.

pass 1   what the draft has to compute, up to each path's own token     pass p   the proposal of pass p - 1, where p <= depth

Behind a token that ends its request, and where nothing can be drawn, there is nothing to propose.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.plan import NewRow, Path, StepPlan
from phalanx_runtime.rank.ahead import Place
from phalanx_runtime.rank.draft_rows import Piece
from phalanx_runtime.rank.paths import NO_TOKEN
from phalanx_runtime.rank.sampling import draw_of

Choose = Callable[[Tensor, Sequence[Place]], list[int]]
"""The tokens that are drawn from these hidden states, the same ones on every rank that takes part."""


def draft(
    plan: StepPlan, first: Sequence[Piece], rows: Mapping[int, NewRow], states: Callable[[StepPlan], Tensor], choose: Choose
) -> list[list[int]]:
    """The proposals of the plan's drafted paths, in their order.

    `states` computes a small plan over the same rows and gives the state behind each of its draws. `first` holds a drawn piece
    for each of the paths.
    """
    paths = [path for path in plan.paths if path.is_drafted]
    indexes = dict(plan.draws)
    proposed: dict[int, list[int]] = {path.request: [] for path in paths}
    depths = {path.request: path.depth for path in paths}
    pieces = list(first)
    while pieces:
        wanted = [piece.request for piece in pieces if piece.drawn]
        hidden = states(_small(plan, pieces))
        if not wanted:
            break
        asked = [(plan.rows[at], indexes[at] + len(proposed[at])) for at in wanted]
        draws = [draw_of(rows[row].sampling, index) for row, index in asked]
        places = [Place(row, one, tuple(proposed[at])) for at, (row, _), one in zip(wanted, asked, draws, strict=True)]
        for request, place, token in zip(wanted, places, choose(hidden[: len(wanted)], places), strict=True):
            proposed[request].append(token)
            if token == NO_TOKEN or _ends(rows[place.row].sampling, token, place.draw.index):
                proposed[request] += [NO_TOKEN] * (depths[request] - len(proposed[request]))
        pieces = [_next(plan, path, proposed[path.request]) for path in paths if len(proposed[path.request]) < path.depth]
    return [proposed[path.request] for path in paths]


def _ends(sampling: wire.Sampling, token: int, index: int) -> bool:
    """Whether a request ends with this token at this output index."""
    return token in sampling.stop_token_ids and index + 1 >= sampling.min_tokens


def own_pieces(plan: StepPlan) -> list[Piece]:
    """The own tokens of each drafted path: the first pass of a draft that never lags."""
    depths = {path.request: path.depth for path in plan.paths if path.is_drafted}
    pieces = []
    for request, end in enumerate(accumulate(plan.counts)):
        if request in depths:
            own = plan.tokens[end - plan.counts[request] : end - depths[request]]
            pieces.append(Piece(request, plan.starts[request], own, drawn=True))
    return pieces


def _next(plan: StepPlan, path: Path, proposed: Sequence[int]) -> Piece:
    """The latest proposal, which nobody has computed yet."""
    own = plan.counts[path.request] - path.depth
    return Piece(path.request, plan.starts[path.request] + own + len(proposed) - 1, [proposed[-1]], drawn=True)


def _small(plan: StepPlan, pieces: Sequence[Piece]) -> StepPlan:
    """These pieces as a plan over the same rows."""
    return StepPlan(
        plan.step,
        [],
        [plan.rows[piece.request] for piece in pieces],
        [piece.start for piece in pieces],
        [len(piece.tokens) for piece in pieces],
        [[] for _ in pieces],
        [token for piece in pieces for token in piece.tokens],
        [(at, 0) for at, piece in enumerate(pieces) if piece.drawn],
    )
