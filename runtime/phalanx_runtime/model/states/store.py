"""The states of all rows of a rank, which steps read and write."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.errors import RowStateLost
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

    A step writes copies, which replace the states once the next step begins: a step that fails leaves them as they were. Other
    threads read and write rows that no step has.
    """

    def __init__(
        self, shapes: Mapping[StateKey, StateShape], num_rows: int, device: torch.device, num_snapshots: int = 0
    ) -> None:
        self.num_rows = num_rows
        """Rows without those of snapshots, which follow."""
        self._tensors = {
            key: torch.empty((num_rows + num_snapshots, *part.shape), dtype=part.dtype, device=device).zero_()  # allocates it now
            for key, part in sorted(shapes.items())
        }
        self.row_bytes = sum(part.num_bytes for part in shapes.values())
        """Bytes of the states of a row."""
        layers = {key.layer for key in shapes}
        self._layer_bytes = max(sum(part.num_bytes for key, part in shapes.items() if key.layer == layer) for layer in layers)
        self._num_tokens = [0] * (num_rows + num_snapshots)
        # Of the latest step: states by row, and the tokens that they include.
        self._written: dict[StateKey, dict[int, Tensor]] = {}
        self._after: dict[int, int] = {}
        self._saves: list[tuple[int, int]] = []  # (row, slot) of snapshots to save when the current step is kept
        self._lock = threading.Lock()

    def copy_bytes(self, num_rows: int) -> int:
        """Returns the bytes of states that a step of `num_rows` rows writes, plus those that its largest layer reads."""
        return num_rows * (self.row_bytes + self._layer_bytes)

    def prepare(self, loads: Sequence[tuple[int, int]], saves: Sequence[tuple[int, int]]) -> None:
        """Loads snapshots to rows, and saves others once the step that follows is kept. Pairs: (row, slot)."""
        self.keep()
        with self._lock:
            for row, slot in loads:
                self._copy(self.num_rows + slot, row)
            self._saves = list(saves)

    def begin(self, step: StepRows) -> None:
        """Starts a step. Raises RowStateLost if rows lack the state of the tokens before it: then the step has not started."""
        if self._after:
            self.keep()
        lost = {
            row: f"row {row} has the state of {self._num_tokens[row]} tokens, the step starts at {start}"
            for row, start in zip(step.rows, step.starts, strict=True)
            if start and self._num_tokens[row] != start
        }
        if lost:
            self.discard()
            raise RowStateLost(lost)
        ends = (start + count for start, count in zip(step.starts, step.counts, strict=True))
        self._after.update(zip(step.rows, ends, strict=True))

    def keep(self) -> None:
        """Keeps what the latest step has written."""
        with self._lock:
            for key, rows in self._written.items():
                for row, state in rows.items():
                    self._tensors[key][row].copy_(state)
            for row, num_tokens in self._after.items():
                self._num_tokens[row] = num_tokens
            for row, slot in self._saves:
                self._copy(row, self.num_rows + slot)
            self._written, self._after, self._saves = {}, {}, []

    def discard(self) -> None:
        """Drops what the latest step has written, and its snapshots."""
        with self._lock:
            self._written, self._after, self._saves = {}, {}, []

    def assume(self, row: int, num_tokens: int) -> None:
        """Counts the states of a row, whatever they are, as those of `num_tokens` tokens."""
        self.discard()
        self._num_tokens[row] = num_tokens

    def zero(self, row: int) -> None:
        """Sets the states of a row to zero."""
        for tensor in self._tensors.values():
            tensor[row].zero_()

    def gather(self, keys: Sequence[StateKey], rows: Sequence[int]) -> dict[StateKey, Tensor]:
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

    def scatter(self, states: Mapping[StateKey, Tensor], rows: Sequence[int]) -> None:
        """Writes states of some rows, [rows, ...] each."""
        for key, state in states.items():
            self._written.setdefault(key, {}).update(zip(rows, state.unbind(0), strict=True))

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors.values():
            tensor[target].copy_(tensor[source])
        self._num_tokens[target] = self._num_tokens[source]

    def _save_now(self, row: int) -> None:
        """Saves the snapshot of a row that the latest step has written, if it is to be saved."""
        for slot in [slot for saved, slot in self._saves if saved == row]:
            for key, tensor in self._tensors.items():
                tensor[self.num_rows + slot].copy_(self._written.get(key, {}).get(row, tensor[row]))
            self._num_tokens[self.num_rows + slot] = self._after.get(row, self._num_tokens[row])
        self._saves = [pair for pair in self._saves if pair[0] != row]

    def read(self, row: int, num_tokens: int) -> bytes:
        """Returns the states of a row that no step has. Raises ValueError if they are not those of `num_tokens` tokens."""
        with self._lock:
            found = self._after.get(row, self._num_tokens[row])
            if found != num_tokens:
                raise ValueError(f"row {row} has the state of {found} tokens, not of {num_tokens}")
            parts = [self._written.get(key, {}).get(row, tensor[row]).to(tensor.dtype) for key, tensor in self._tensors.items()]
        return b"".join(part.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, row: int, num_tokens: int, data: memoryview) -> None:
        """Sets the states of a row that no step has. A snapshot of what the row had is saved first."""
        start = 0
        with self._lock:
            self._save_now(row)
            self._after.pop(row, None)
            for key, tensor in self._tensors.items():
                self._written.get(key, {}).pop(row, None)
                size = tensor[row].nbytes
                part = torch.frombuffer(bytearray(data[start : start + size]), dtype=tensor.dtype)
                tensor[row].copy_(part.view(tensor.shape[1:]))
                start += size
            self._num_tokens[row] = num_tokens
