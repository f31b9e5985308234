"""Draws the tokens of a step on the rank that draws, and keeps for each row what its next draw depends on.

The order, for each row alone:

    raw scores ------------------------------------> logprobs
        -> masks: grammar, allowed tokens, bad words, ends before min_tokens
        -> bias -> repetition, then frequency and presence penalty
        -> / temperature -> top-k -> top-p -> min-p -> Gumbel noise -> argmax

All of it follows from the request's tokens. Rows that ask for none of it are drawn from the raw scores, without state.

Where tokens are proposed, a row is drawn at each index along its path, and its run ends with the first token that is not
proposed there (`runs`). A row without state is drawn at all places at once; one with state goes from token to token, so that what
it remembers is what was drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.draw import Draw, draw, draw_of
from phalanx_runtime.rank.sampling.grammar import RankGrammars
from phalanx_runtime.rank.sampling.logits_processors import ProcessedLogits, process_logits
from phalanx_runtime.rank.sampling.logprobs import token_details
from phalanx_runtime.rank.sampling.near_ties import logit_gap
from phalanx_runtime.rank.sampling.row import COMPLETE, SamplingRow
from phalanx_runtime.rank.sampling.verification import VerificationNode, VerificationRun
from phalanx_runtime.rank.step.paths import DraftedPath

NOTHING = DraftedPath([])
"""No proposals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens parallel to what was asked; details too, or empty. With `runs` draw i has `runs[i]` of them, one after the other.
    `taken` names positions in what was asked with the proposals that were accepted, where these are not the first ones.

    `ended`, `failed` and `over` name positions in what was asked: complete by their grammar, not drawn for the reason told (the
    token there is none), and not drawn because the grammar was complete before.
    """

    tokens: list[int]
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    taken: list[tuple[int, list[int]]] = field(default_factory=list)


class Sampler:
    """The rows, on the rank that draws. `grammars` None fails requests that have one."""

    def __init__(self, vocab_size: int, grammars: RankGrammars | None = None) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._rows: dict[int, SamplingRow] = {}

    @property
    def rows(self) -> Mapping[int, SamplingRow]:
        """What is known of each row; nothing on a rank that does not draw."""
        return self._rows

    def admit(self, new: NewRow) -> None:
        """Starts a row anew."""
        self._rows[new.row] = SamplingRow(new, self.vocab_size, self.grammars)

    def num_fitting(self, row: int, tokens: Sequence[int], index: int) -> int:
        """How many of these tokens a row may draw one after the other, from this output index on; all of a row not known here."""
        known = self._rows.get(row)
        return len(tokens) if known is None else known.num_fitting(tokens, index)

    def draw(self, scores: Tensor, asked: Sequence[tuple[int, int]], proposals: Sequence[DraftedPath] = ()) -> SampledTokens:
        """The next tokens of each (row, output index), as many as `proposals` allow, which are parallel; empty: one each.

        scores: [asked and proposed, vocabulary], raw; they stay as they are. The rows of a draw: behind what the request has,
        then behind each of its proposals.
        """
        paths = proposals or [NOTHING] * len(asked)
        firsts = accumulate((1 + len(path.tokens) for path in paths), initial=0)
        places = zip(firsts, asked, paths, strict=False)
        runs = [VerificationRun(self._rows[row], index, first, path.tokens, path.parents) for first, (row, index), path in places]
        spots = [spot for run in runs for spot in run.next()]
        while spots:
            at_all = len(spots) == len(scores)
            part = scores if at_all else scores.index_select(0, torch.tensor([s.place for s in spots], device=scores.device))
            _draw_spots(part, spots)
            spots = [spot for run in runs for spot in run.next()]
        why = [(at, run.failure) for at, run in enumerate(runs) if run.failure is not None]
        has_details = any(run.wants_details for run in runs)
        return SampledTokens(
            tokens=[token for run in runs for token in run.tokens],
            details=[detail for run in runs for detail in run.all_details()] if has_details else [],
            ended=[at for at, run in enumerate(runs) if run.is_complete],
            failed=[(at, failure) for at, failure in why if failure != COMPLETE],
            over=[at for at, failure in why if failure == COMPLETE],
            runs=[len(run.tokens) for run in runs] if any(path.tokens for path in paths) else [],
            taken=[(at, run.taken) for at, run in enumerate(runs) if run.taken and run.taken[-1] >= len(run.taken)],
        )


def _draw_spots(scores: Tensor, spots: Sequence[VerificationNode]) -> None:
    """Draws at these spots and tells their runs. scores: [spots, vocabulary]."""
    rows = [spot.run.row for spot in spots]
    draws = [draw_of(spot.run.row.sampling, spot.index) for spot in spots]
    special = [at for at, row in enumerate(rows) if row.is_special(draws[at].index)]
    changed = process_logits(scores, rows, special, [draws[at].index for at in special]) if special else None
    tokens = _draw(scores, draws, changed)
    kept: list[int] = []
    for at, (spot, token) in enumerate(zip(spots, tokens, strict=True)):
        failure = changed.failed.get(at) if changed is not None else None
        if spot.run.take(spot, token, failure):
            kept.append(at)
    _tell(scores, spots, draws, changed, [at for at in kept if spots[at].run.wants_details])


def _draw(scores: Tensor, draws: Sequence[Draw], changed: ProcessedLogits | None) -> list[int]:
    """Plain rows from the raw scores, special rows from theirs."""
    if changed is None:
        return draw(scores, draws)
    tokens = [0] * len(draws)
    if len(changed.places) < len(draws):
        tokens = draw(scores, [None if at in changed.places else one for at, one in enumerate(draws)])
    wanted = [None if at in changed.failed else draws[at] for at in changed.places]
    for at, token in zip(changed.places, draw(changed.scores, wanted), strict=True):
        tokens[at] = token
    return tokens


def _tell(
    raw: Tensor, spots: Sequence[VerificationNode], draws: Sequence[Draw], changed: ProcessedLogits | None, asked: Sequence[int]
) -> None:
    """Gives runs what was asked about the tokens that were drawn at these spots."""
    if not asked:
        return
    tops = [spots[at].run.row.sampling.logprobs or 0 for at in asked]
    tokens = [spots[at].token for at in asked]
    for at, detail in zip(asked, token_details(raw, tokens, tops, asked), strict=True):
        run = spots[at].run
        if run.row.sampling.return_gaps:
            scores = raw[at] if changed is None or at not in changed.places else changed.scores[changed.places[at]]
            detail = msgspec.structs.replace(detail, gap=logit_gap(raw[at], scores, draws[at]))
        run.details.append(detail)
