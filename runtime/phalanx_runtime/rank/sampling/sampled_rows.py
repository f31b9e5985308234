"""Mirrors rows of the sampling rank on the rank that drafts, from the plans.

history of an admitted row           as on the sampling rank
accepted draft tokens                those before the row's next start
token sampled after them             in the next plan of the row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.sampling.grammar import GrammarSource
from phalanx_runtime.rank.sampling.row import SamplingRow


@dataclass(slots=True)
class _MirroredRow:
    num_tokens: int
    first: int = 0
    """Position of the first draft token."""
    draft_tokens: Sequence[int] = field(default_factory=list)


class SampledRowMirror:
    """Mirrors rows with state."""

    def __init__(self, vocab_size: int, grammars: GrammarSource) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._rows: dict[int, SamplingRow] = {}
        self._mirrored: dict[int, _MirroredRow] = {}

    @property
    def rows(self) -> Mapping[int, SamplingRow]:
        """Each row, as of the last `update`."""
        return self._rows

    def update(self, plan: StepPlan) -> None:
        """Updates the rows to the state in which this plan is sampled."""
        for new in plan.admitted:
            row = self._rows[new.row] = SamplingRow(new, self._vocab_size, self._grammars)
            self._mirrored.pop(new.row, None)
            if row.has_state:
                self._mirrored[new.row] = _MirroredRow(len(new.history))
        depths, strays = {path.request: path.depth for path in plan.paths}, dict(plan.relocations)
        for request, end in enumerate(accumulate(plan.counts)):
            mirrored = self._mirrored.get(plan.rows[request])
            if mirrored is not None:
                start = plan.starts[request]
                own = plan.tokens[end - plan.counts[request] : end - depths.get(request, 0)]
                accepted = _accepted_tokens(mirrored, start, strays.get(request, []))
                self._append(plan.rows[request], start - len(accepted), [*accepted, *own])
                mirrored.first, mirrored.draft_tokens = start + len(own), ()

    def record_drafts(self, plan: StepPlan) -> None:
        """Records the draft tokens of the filled plan."""
        ends = list(accumulate(plan.counts))
        for path in plan.paths:
            mirrored = self._mirrored.get(plan.rows[path.request])
            if mirrored is not None:
                mirrored.draft_tokens = plan.tokens[ends[path.request] - path.depth : ends[path.request]]

    def _append(self, row: int, first: int, tokens: Sequence[int]) -> None:
        """Appends tokens from position `first` on, except those that the row has."""
        mirrored = self._mirrored[row]
        for token in tokens[max(0, mirrored.num_tokens - first) :]:
            self._rows[row].append(token)
            mirrored.num_tokens += 1


def _accepted_tokens(mirrored: _MirroredRow, start: int, strays: Sequence[int]) -> list[int]:
    """Returns the draft tokens before `start`, the last ones from `strays`."""
    count = start - mirrored.first
    if not 0 <= count <= len(mirrored.draft_tokens):
        return []  # computed in another group or skipped: the history has them
    nodes = [*range(count - len(strays)), *(position - mirrored.first for position in strays)]
    return [mirrored.draft_tokens[node] for node in nodes]
