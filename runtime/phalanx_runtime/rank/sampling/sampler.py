"""Samples the tokens of a step on the sampling rank:

    raw logits ------------------------------------> logprobs
        -> masks: grammar, allowed tokens, bad words, ends before min_tokens
        -> bias -> repetition, then frequency and presence penalty
        -> / temperature -> top-k -> top-p -> min-p -> Gumbel noise -> argmax

Tokens depend on the request's tokens alone. With draft tokens a row samples along its path (`verification`): all indices at once
without state, else token by token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.filters import Draw, make_draw
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS, GrammarSource
from phalanx_runtime.rank.sampling.gumbel import sample
from phalanx_runtime.rank.sampling.logits_processors import ProcessedLogits, process_logits
from phalanx_runtime.rank.sampling.logprobs import near_tie_gap, token_details
from phalanx_runtime.rank.sampling.row import COMPLETE, SamplingRow
from phalanx_runtime.rank.sampling.verification import VerificationNode, VerificationRun
from phalanx_runtime.rank.step.draft_paths import DraftedPath

EMPTY_PATH = DraftedPath([])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens of all draws, in order; fields as in `core.step_plan.StepResult`."""

    tokens: list[int]
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    taken: list[tuple[int, list[int]]] = field(default_factory=list)


class Sampler(Protocol):
    """Samples on one device, see `registry`."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def grammars(self) -> GrammarSource:
        """Grammars of the rows."""
        ...

    @property
    def rows(self) -> Mapping[int, SamplingRow]:
        """Admitted rows."""
        ...

    def admit(self, new: NewRow) -> None:
        """Starts a row."""
        ...

    def num_fitting(self, row: int, tokens: Sequence[int], index: int) -> int:
        """Returns how many of `tokens` the row may sample from output index `index` on; all if not admitted."""
        ...

    def sample(self, logits: Tensor, draws: Sequence[tuple[int, int]], paths: Sequence[DraftedPath] = ()) -> SampledTokens:
        """Samples for each (row, output index) along its path; one token each without `paths`.

        logits: [draws and draft tokens, vocabulary], raw, unchanged; per draw one row after the own tokens, then one after each
        draft token.
        """
        ...


class TorchSampler:
    """Reference for any device of torch."""

    def __init__(self, vocab_size: int, grammars: GrammarSource = UNSUPPORTED_GRAMMARS) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._rows: dict[int, SamplingRow] = {}

    @property
    def rows(self) -> Mapping[int, SamplingRow]:
        """Admitted rows."""
        return self._rows

    def admit(self, new: NewRow) -> None:
        """Starts a row."""
        self._rows[new.row] = SamplingRow(new, self.vocab_size, self.grammars)

    def num_fitting(self, row: int, tokens: Sequence[int], index: int) -> int:
        """Returns how many of `tokens` may follow."""
        state = self._rows.get(row)
        return len(tokens) if state is None else state.num_fitting(tokens, index)

    def sample(self, logits: Tensor, draws: Sequence[tuple[int, int]], paths: Sequence[DraftedPath] = ()) -> SampledTokens:
        """Samples along the paths. See `Sampler`."""
        paths = paths or [EMPTY_PATH] * len(draws)
        firsts = accumulate((1 + len(path.tokens) for path in paths), initial=0)
        runs = [
            VerificationRun(self._rows[row], index, first, path.tokens, path.parents)
            for first, (row, index), path in zip(firsts, draws, paths, strict=False)
        ]
        nodes = [node for run in runs for node in run.next_nodes()]
        while nodes:
            _sample_nodes(logits if len(nodes) == len(logits) else _select(logits, nodes), nodes)
            nodes = [node for run in runs for node in run.next_nodes()]
        failures = [(draw, run.failure) for draw, run in enumerate(runs) if run.failure is not None]
        has_details = any(run.wants_details for run in runs)
        return SampledTokens(
            tokens=[token for run in runs for token in run.tokens],
            details=[detail for run in runs for detail in run.all_details()] if has_details else [],
            ended=[draw for draw, run in enumerate(runs) if run.is_complete],
            failed=[(draw, failure) for draw, failure in failures if failure != COMPLETE],
            over=[draw for draw, failure in failures if failure == COMPLETE],
            runs=[len(run.tokens) for run in runs] if any(path.tokens for path in paths) else [],
            taken=[
                (draw, run.accepted) for draw, run in enumerate(runs) if run.accepted and run.accepted[-1] >= len(run.accepted)
            ],
        )


def _select(logits: Tensor, nodes: Sequence[VerificationNode]) -> Tensor:
    return logits.index_select(0, torch.tensor([node.logits_row for node in nodes], device=logits.device))


def _sample_nodes(logits: Tensor, nodes: Sequence[VerificationNode]) -> None:
    """Samples at these nodes. logits: [nodes, vocabulary]."""
    rows = [node.run.row for node in nodes]
    draws = [make_draw(node.run.row.sampling, node.index) for node in nodes]
    special = [at for at, row in enumerate(rows) if row.needs_processing(draws[at].index)]
    processed = process_logits(logits, rows, special, [draws[at].index for at in special]) if special else None
    tokens = _sample_processed(logits, draws, processed)
    added: list[int] = []
    for at, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
        failure = processed.failed.get(at) if processed is not None else None
        if node.run.add(node, token, failure):
            added.append(at)
    _add_details(logits, nodes, draws, processed, [at for at in added if nodes[at].run.wants_details])


def _sample_processed(logits: Tensor, draws: Sequence[Draw], processed: ProcessedLogits | None) -> list[int]:
    if processed is None:
        return sample(logits, draws)
    tokens = [0] * len(draws)
    if len(processed.places) < len(draws):
        tokens = sample(logits, [None if at in processed.places else draw for at, draw in enumerate(draws)])
    special = [None if at in processed.failed else draws[at] for at in processed.places]
    for at, token in zip(processed.places, sample(processed.logits, special), strict=True):
        tokens[at] = token
    return tokens


def _add_details(
    raw: Tensor,
    nodes: Sequence[VerificationNode],
    draws: Sequence[Draw],
    processed: ProcessedLogits | None,
    selected: Sequence[int],
) -> None:
    if not selected:
        return
    tops = [nodes[at].run.row.sampling.logprobs or 0 for at in selected]
    tokens = [nodes[at].token for at in selected]
    for at, detail in zip(selected, token_details(raw, tokens, tops, selected), strict=True):
        run = nodes[at].run
        if run.row.sampling.return_gaps:
            logits = raw[at] if processed is None or at not in processed.places else processed.logits[processed.places[at]]
            detail = msgspec.structs.replace(detail, gap=near_tie_gap(raw[at], logits, draws[at]))
        run.details.append(detail)
