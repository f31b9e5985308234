"""Rows as the drawer knows them, on the rank that drafts where another one draws: followed from the plans.

    admitted      the history of a row whose draws depend on it, as the drawer gets it
    accepted      what was proposed behind a row and lies before its next start
    drawn last    the first tokens of the next plan that computes the row

So before a row drafts it is as far as the drawer's. A row without state is not followed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.sampling.grammar import RankGrammars
from phalanx_runtime.rank.sampling.row import SamplingRow


@dataclass(slots=True)
class _MirroredRow:
    """`num_known`: tokens that the row has. `proposed`: the latest ones, of which the first would stand at position `first`."""

    num_known: int
    first: int = 0
    proposed: Sequence[int] = field(default_factory=list)


class SampledRowMirror:
    """All rows. `grammars` compiles what nobody compiled before."""

    def __init__(self, vocab_size: int, grammars: RankGrammars | None) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._rows: dict[int, SamplingRow] = {}
        self._followed: dict[int, _MirroredRow] = {}

    @property
    def rows(self) -> Mapping[int, SamplingRow]:
        """What is known of each row."""
        return self._rows

    def follow(self, plan: StepPlan) -> None:
        """Brings the rows up to what the drawer knows when it draws for this plan."""
        for new in plan.admitted:
            row = self._rows[new.row] = SamplingRow(new, self._vocab_size, self._grammars)
            self._followed.pop(new.row, None)
            if row.has_state:
                self._followed[new.row] = _MirroredRow(len(new.history))
        depths, strays = {path.request: path.depth for path in plan.paths}, dict(plan.strays)
        for request, end in enumerate(accumulate(plan.counts)):
            one = self._followed.get(plan.rows[request])
            if one is not None:
                start = plan.starts[request]
                own = plan.tokens[end - plan.counts[request] : end - depths.get(request, 0)]
                accepted = _accepted(one, start, strays.get(request, []))
                self._add(plan.rows[request], start - len(accepted), [*accepted, *own])
                one.first, one.proposed = start + len(own), ()

    def proposed(self, plan: StepPlan) -> None:
        """Hears what is proposed in this plan, which has the drafted tokens."""
        ends = list(accumulate(plan.counts))
        for path in plan.paths:
            one = self._followed.get(plan.rows[path.request])
            if one is not None:
                one.proposed = plan.tokens[ends[path.request] - path.depth : ends[path.request]]

    def _add(self, row: int, first: int, tokens: Sequence[int]) -> None:
        """The row has these tokens from position `first` on, some of which it may know."""
        one = self._followed[row]
        for token in tokens[max(0, one.num_known - first) :]:
            self._rows[row].drew(token)
            one.num_known += 1


def _accepted(one: _MirroredRow, start: int, strays: Sequence[int]) -> list[int]:
    """Of what was proposed, the tokens that lie before this start; in these slots the last of them, if they lie elsewhere."""
    count = start - one.first
    if not 0 <= count <= len(one.proposed):
        return []  # it was computed elsewhere, or skipped over: its history has it
    nodes = [*range(count - len(strays)), *(at - one.first for at in strays)]
    return [one.proposed[node] for node in nodes]
