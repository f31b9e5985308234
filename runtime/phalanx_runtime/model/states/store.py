"""The states of all rows of a rank, which steps read and write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.states.cache import StateKey
from phalanx_runtime.model.states.step import StepRows


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of a state of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RowStates:
    """Tensors [rows, ...], and how many tokens each row's states include.

    A step writes copies, which replace the states once the next step begins: a step that fails leaves them as they were.
    """

    def __init__(self, shapes: Mapping[StateKey, StateShape], num_rows: int, device: torch.device) -> None:
        self._tensors = {
            key: torch.empty((num_rows, *part.shape), dtype=part.dtype, device=device).zero_()  # allocates it now
            for key, part in shapes.items()
        }
        self._num_tokens = [0] * num_rows
        self._written: dict[StateKey, dict[int, Tensor]] = {}
        self._step: StepRows | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._num_tokens)

    def begin(self, step: StepRows) -> None:
        """Keeps the states of the previous step. Raises RuntimeError if a row lacks the state of the tokens before the step."""
        self.keep()
        for row, start in zip(step.rows, step.starts, strict=True):
            if start and self._num_tokens[row] != start:
                raise RuntimeError(f"row {row} has the state of {self._num_tokens[row]} tokens, the step starts at {start}")
        self._step = step

    def keep(self) -> None:
        """Keeps what the latest step has written."""
        for key, rows in self._written.items():
            target = self._tensors[key]
            for row, state in rows.items():
                target[row].copy_(state)
        if self._step is not None:
            for row, start, count in zip(self._step.rows, self._step.starts, self._step.counts, strict=True):
                self._num_tokens[row] = start + count
        self._written, self._step = {}, None

    def discard(self) -> None:
        """Drops what the latest step has written."""
        self._written, self._step = {}, None

    def assume(self, row: int, num_tokens: int) -> None:
        """Counts the states of a row, whatever they are, as those of `num_tokens` tokens."""
        self.discard()
        self._num_tokens[row] = num_tokens

    def zero(self, row: int) -> None:
        """Sets the states of a row to zero."""
        for tensor in self._tensors.values():
            tensor[row].zero_()

    def read(self, keys: Sequence[StateKey], rows: Sequence[int]) -> dict[StateKey, Tensor]:
        """Returns copies of the states of some rows, [rows, ...] each, as this step has left them."""
        index = torch.tensor(rows, device=next(iter(self._tensors.values())).device)
        states = {}
        for key in keys:
            states[key] = self._tensors[key].index_select(0, index)
            written = self._written.get(key, {})
            for i, row in enumerate(rows):
                if row in written:
                    states[key][i].copy_(written[row])
        return states

    def write(self, states: Mapping[StateKey, Tensor], rows: Sequence[int]) -> None:
        """Writes states of some rows, [rows, ...] each."""
        for key, state in states.items():
            self._written.setdefault(key, {}).update(zip(rows, state.unbind(0), strict=True))
