"""Draws of a draft, ahead of the request's own: from scores that are changed as the request's will be on this path.

Where there is one stage, the rank that drafts is the one that draws, and has each row's state: what was drawn for it. Behind
proposals a copy of the row goes on as if they were drawn, so penalties, bad words and grammar count them too. With several
stages the rows are the last stage's; here is known what follows from parameters alone: bias, allowed tokens, `min_tokens` and
bad words of one token. What a draft does not know costs acceptance, never a token.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from phalanx_runtime.core.plan import NewRow
from phalanx_runtime.rank.changes import change
from phalanx_runtime.rank.row import Row
from phalanx_runtime.rank.sampling import Draw, Rivals, draw, draw_several


@dataclass(frozen=True, slots=True)
class Place:
    """Where a draft draws: for this row, behind these proposals."""

    row: int
    draw: Draw
    behind: tuple[int, ...] = ()


class Ahead:
    """The rows of one step, and how they go on along what is proposed. `params`: all rows; `rows`: those whose state is known."""

    def __init__(self, params: Mapping[int, NewRow], rows: Mapping[int, Row], vocab_size: int) -> None:
        self._params = params
        self._known = rows
        self._vocab_size = vocab_size
        self._copies: dict[tuple[int, tuple[int, ...]], Row] = {}

    def draw(self, scores: Tensor, places: Sequence[Place], count: int = 1) -> list[Rivals]:
        """So many tokens of each place, the draw first; none where nothing can be drawn. One alone comes without its share.

        scores: [places, vocabulary], raw.
        """
        scores, nowhere = self.changed(scores, places)
        draws = [place.draw for place in places]
        several = draw_several(scores, draws, count) if count > 1 else [Rivals([one], [0.0]) for one in draw(scores, draws)]
        return [Rivals([], []) if at in nowhere else one for at, one in enumerate(several)]

    def changed(self, scores: Tensor, places: Sequence[Place]) -> tuple[Tensor, Set[int]]:
        """The scores that these places draw from, and the places that can draw nothing: theirs are minus infinity.

        scores: [places, vocabulary], raw; they stay as they are.
        """
        rows = [self._row(place.row, place.behind) for place in places]
        special = [at for at, row in enumerate(rows) if row.is_special(places[at].draw.index)]
        if not special:
            return scores, frozenset()
        found = change(scores, rows, special, [places[at].draw.index for at in special])
        for at in found.failed:
            found.scores[found.places[at]] = -torch.inf
        whole = scores.to(found.scores.dtype, copy=True)
        return whole.index_copy_(0, torch.tensor(special, device=scores.device), found.scores), found.failed.keys()

    def _row(self, number: int, behind: tuple[int, ...]) -> Row:
        """A copy of the row that had these drawn, too."""
        known = self._copies.get((number, behind))
        if known is None:
            known = _behind(self._row(number, behind[:-1]), behind[-1]) if behind else self._start(number)
            self._copies[number, behind] = known
        return known

    def _start(self, number: int) -> Row:
        if number in self._known:
            return self._known[number].copy()
        asked = self._params[number].sampling
        words = [word for word in asked.bad_words if len(word) == 1]
        plain = msgspec.structs.replace(
            asked, grammar=None, bad_words=words, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        )
        return Row(NewRow(number, plain), self._vocab_size, None)


def _behind(row: Row, token: int) -> Row:
    """The row with one token more; itself where that changes nothing."""
    if not row.has_state:
        return row
    one = row.copy()
    one.drew(token)
    return one
