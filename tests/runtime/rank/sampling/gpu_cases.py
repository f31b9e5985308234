"""Launches of `sample_rows` and the reference for them: on the GPU, or in Triton's interpreter without one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.filters import make_draw
from phalanx_runtime.rank.sampling.gpu.row_state import RowState
from phalanx_runtime.rank.sampling.gpu.sample import SamplingWorkspace, make_workspace, sample_rows
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS
from phalanx_runtime.rank.sampling.gumbel import sample
from phalanx_runtime.rank.sampling.logits_processors import process_logits
from phalanx_runtime.rank.sampling.logprobs import near_tie_gap
from phalanx_runtime.rank.sampling.row import SamplingRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR_TIE = 2e-5
"""Of the standard deviation of logits / T, as DESIGN.md defines it."""


@dataclass(slots=True)
class Rows:
    """Rows admitted to the device and to the reference."""

    vocab_size: int
    samplings: Sequence[wire.Sampling]
    prompt: list[int] = field(default_factory=lambda: [*range(0, 100, 2), 2, 4])
    block: int = 1024
    num_candidates: int = 1 << 14
    state: RowState = field(init=False)
    workspace: SamplingWorkspace = field(init=False)
    reference: list[SamplingRow] = field(init=False)

    def __post_init__(self) -> None:
        self.state = RowState(self.vocab_size, len(self.samplings) + 2, DEVICE, num_slots=len(self.samplings))
        self.workspace = make_workspace(self.vocab_size, 64, DEVICE, self.block, self.num_candidates)
        new = [NewRow(row, sampling, len(self.prompt), self.prompt) for row, sampling in enumerate(self.samplings)]
        assert all([self.state.admit(one) for one in new])
        self.reference = [SamplingRow(one, self.vocab_size, UNSUPPORTED_GRAMMARS) for one in new]

    def sampled(self, logits: Tensor, rows: Sequence[int], indices: Sequence[int], is_final: bool = True) -> list[int]:
        """Returns the tokens of one launch."""
        tokens = torch.full((len(rows),), -2, dtype=torch.int64, device=DEVICE)
        sample_rows(
            logits.to(DEVICE),
            torch.tensor(rows, dtype=torch.int32, device=DEVICE),
            torch.tensor(indices, dtype=torch.int32, device=DEVICE),
            self.state,
            tokens,
            workspace=self.workspace,
            is_final=is_final,
        )
        found: list[int] = tokens.tolist()
        return found

    def processed(self, logits: Tensor, rows: Sequence[int], indices: Sequence[int]) -> Tensor:
        """Returns the processed logits of the reference."""
        places = list(range(len(rows)))
        return process_logits(logits, [self.reference[row] for row in rows], places, indices).logits

    def check(self, logits: Tensor, rows: Sequence[int], indices: Sequence[int]) -> list[int]:
        """Samples and asserts equality with the reference, near-ties aside. Returns the tokens, after both counted them."""
        tokens = self.sampled(logits, rows, indices)
        processed = self.processed(logits, rows, indices)
        draws = [make_draw(self.samplings[row], index) for row, index in zip(rows, indices, strict=True)]
        expected = sample(processed, draws)
        for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            if token != expected[at]:
                gap = near_tie_gap(logits[at].double(), processed[at].double(), draws[at])
                assert gap < NEAR_TIE, (token, expected[at], gap, draws[at])
            assert processed[at, token] > -torch.inf
            self.reference[row].append(token)
        return tokens
