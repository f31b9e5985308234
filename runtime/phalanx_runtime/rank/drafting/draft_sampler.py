"""Draws of a draft, ahead of the request's own: from scores that are changed as the request's will be on this path.

The rank that drafts has each row's state, what was drawn for it: as the one that draws, or from the plans where another stage
does (`drawn_rows`). Behind proposals a copy of the row goes on as if they were drawn, so penalties, bad words and grammar count
them too. What a draft does not know costs acceptance, never a token.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.rank.sampling.draw import Draw, Rivals, draw, draw_several
from phalanx_runtime.rank.sampling.logits_processors import process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Where a draft draws: for this row, behind these proposals."""

    row: int
    draw: Draw
    behind: tuple[int, ...] = ()


class DraftSampler:
    """The rows of one step, and how they go on along what is proposed. `rows`: what is known of each."""

    def __init__(self, rows: Mapping[int, SamplingRow]) -> None:
        self._known = rows
        self._copies: dict[tuple[int, tuple[int, ...]], SamplingRow] = {}

    def draw(self, scores: Tensor, places: Sequence[DraftPosition], count: int = 1) -> list[Rivals]:
        """So many tokens of each place, the draw first; none where nothing can be drawn. One alone comes without its share.

        scores: [places, vocabulary], raw.
        """
        scores, nowhere = self.changed(scores, places)
        draws = [place.draw for place in places]
        several = draw_several(scores, draws, count) if count > 1 else [Rivals([one], [0.0]) for one in draw(scores, draws)]
        return [Rivals([], []) if at in nowhere else one for at, one in enumerate(several)]

    def changed(self, scores: Tensor, places: Sequence[DraftPosition]) -> tuple[Tensor, Set[int]]:
        """The scores that these places draw from, and the places that can draw nothing: theirs are minus infinity.

        scores: [places, vocabulary], raw; they stay as they are.
        """
        rows = [self._row(place.row, place.behind) for place in places]
        special = [at for at, row in enumerate(rows) if row.is_special(places[at].draw.index)]
        if not special:
            return scores, frozenset()
        found = process_logits(scores, rows, special, [places[at].draw.index for at in special])
        for at in found.failed:
            found.scores[found.places[at]] = -torch.inf
        whole = scores.to(found.scores.dtype, copy=True)
        return whole.index_copy_(0, torch.tensor(special, device=scores.device), found.scores), found.failed.keys()

    def _row(self, number: int, behind: tuple[int, ...]) -> SamplingRow:
        """A copy of the row that had these drawn, too."""
        known = self._copies.get((number, behind))
        if known is None:
            known = _behind(self._row(number, behind[:-1]), behind[-1]) if behind else self._known[number].copy()
            self._copies[number, behind] = known
        return known


def _behind(row: SamplingRow, token: int) -> SamplingRow:
    """The row with one token more; itself where that changes nothing."""
    if not row.has_state:
        return row
    one = row.copy()
    one.drew(token)
    return one
