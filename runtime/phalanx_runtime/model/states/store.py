"""The states of all rows of a rank, which steps read and write."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


BeforeDrafts = dict[int, dict[int, dict[StateKey, Tensor]]]
"""States before each draft token, by row and number of tokens that they include."""


@dataclass(frozen=True, slots=True)
class _StepWrites:
    """What the latest step writes; the states do not change before it is kept."""

    states: dict[StateKey, dict[int, Tensor]] = field(default_factory=dict)
    """By row."""
    ends: dict[int, int] = field(default_factory=dict)
    """Tokens that the states of each row include after it."""
    draft_starts: dict[int, int] = field(default_factory=dict)
    """Tokens before the draft tokens of a row that has some."""
    before_drafts: BeforeDrafts = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    """Rows by slot, of the snapshots to save when it is kept."""


class RowStates:
    """Tensors [rows, ...], and how many tokens each row's states include.

    A step writes copies, which replace the states once the next step begins: a step that fails leaves them as they were. Other
    threads read and write rows that no step has.

    After draft tokens a row keeps the states before each of them, until its next step starts after the accepted ones.
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
        self._host: dict[StateKey, Tensor] = {}  # of the slots after those of the device
        self._step = _StepWrites()
        self._before_drafts: BeforeDrafts = {}  # of kept steps
        self._kept_together: list[set[int]] = []  # rows of a step: what they keep is parts of the same tensors
        self._lock = threading.Lock()

    @property
    def layout(self) -> str:
        """Names the states of a row in the order of their bytes."""
        return " ".join(
            f"{key.layer}{key.kind}{key.number}{[*part.shape[1:]]}{part.dtype}" for key, part in self._tensors.items()
        )

    def copy_bytes(self, num_rows: int, num_drafts: int = 0) -> int:
        """Returns the bytes of states that a step of `num_rows` rows writes, plus those that its largest layer reads.

        num_drafts: draft tokens of each row, whose states a row keeps.
        """
        return num_rows * ((1 + num_drafts) * self.row_bytes + self._layer_bytes)

    def open_host(self, num_slots: int) -> None:
        """Allocates slots for snapshots in host memory, after those of the device."""
        is_pinned = next(iter(self._tensors.values())).device.type == "cuda"
        for key, tensor in self._tensors.items():
            self._host[key] = torch.zeros((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=is_pinned)
        self._num_tokens += [0] * num_slots

    def prepare(
        self, loads: Sequence[tuple[int, int]], saves: Sequence[tuple[int, int]], stores: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Loads snapshots to rows, stores others in host memory, and saves others once the step that follows is kept.

        loads, saves: (row, slot); stores: (slot, slot in host memory).
        """
        self.keep()
        with self._lock:
            for row, slot in loads:
                self._copy(self.num_rows + slot, row)
            for slot, host_slot in stores:
                self._copy(self.num_rows + slot, self.num_rows + host_slot)
            self._step.saves.update((slot, row) for row, slot in saves)  # the last one of each slot

    def lost(self, rows: Sequence[int], starts: Sequence[int]) -> dict[int, str]:
        """Returns the rows without the state of the tokens before `starts`, with the reason of each, once all steps are kept."""
        return {
            row: f"row {row} has the state of {self._num_tokens[row]} tokens, the step starts at {start}"
            for row, start in zip(rows, starts, strict=True)
            if start and self._num_tokens[row] != start and start not in self._before_drafts.get(row, {})
        }

    def begin(self, step: StepRows) -> None:
        """Starts a step. Raises RowStateLost if rows lack the state of the tokens before it: then the step has not started."""
        if self._step.ends:
            self.keep()
        if lost := self.lost(step.rows, step.starts):
            self.discard()
            raise RowStateLost(lost)
        drafts = step.drafts or [0] * len(step.rows)
        with self._lock:
            for row, start, count, depth in zip(step.rows, step.starts, step.counts, drafts, strict=True):
                for key, state in self._before_drafts.pop(row, {}).get(start, {}).items():
                    self._tensors[key][row].copy_(state)
                    self._num_tokens[row] = start
                self._step.ends[row] = start + count
                if depth:
                    self._step.draft_starts[row], self._step.before_drafts[row] = start + count - depth, {}
            self._divide_kept(step.rows)

    def _divide_kept(self, rows: Sequence[int]) -> None:
        """Copies what rows still keep of tensors that `rows` have left: a row that ended would keep the memory of all."""
        left = [together for together in self._kept_together if not together.isdisjoint(rows)]
        self._kept_together = [together for together in self._kept_together if together.isdisjoint(rows)]
        kept = [list(self._before_drafts.get(row, {}).values()) for row in set().union(*left).difference(rows)]
        for index in range(max(map(len, kept), default=0)):
            # By tensor: each is freed before the next one is copied.
            for key in self._tensors:
                for states in (states[index] for states in kept if index < len(states) and key in states[index]):
                    states[key] = states[key].clone()

    def keep(self) -> None:
        """Keeps what the latest step has written."""
        with self._lock:
            step = self._step
            for key, rows in step.states.items():
                for row, state in rows.items():
                    self._tensors[key][row].copy_(state)
            for row, num_tokens in step.ends.items():
                self._num_tokens[row] = num_tokens
            if step.before_drafts:
                self._before_drafts.update(step.before_drafts)
                self._kept_together.append(set(step.ends))
            for slot, row in step.saves.items():
                self._save(row, slot)
            self._step = _StepWrites()

    def discard(self) -> None:
        """Drops what the latest step has written, and its snapshots."""
        with self._lock:
            self._step = _StepWrites()

    def assume(self, row: int, num_tokens: int) -> None:
        """Counts the states of a row, whatever they are, as those of `num_tokens` tokens."""
        self.discard()
        self._before_drafts.pop(row, None)
        self._num_tokens[row] = num_tokens

    def zero(self, row: int) -> None:
        """Sets the states of a row, or of a slot after the rows, to zero."""
        for key in self._tensors:
            self._at(key, row).zero_()

    def gather(self, keys: Sequence[StateKey], rows: Sequence[int]) -> dict[StateKey, Tensor]:
        """Returns copies of the states of some rows, [rows, ...] each, as this step has left them."""
        index = torch.tensor(rows, device=next(iter(self._tensors.values())).device)
        states = {}
        for key in keys:
            states[key] = self._tensors[key].index_select(0, index)
            written = self._step.states.get(key, {})
            for i, row in enumerate(rows):
                if row in written:
                    states[key][i].copy_(written[row])
        return states

    def scatter(self, states: Mapping[StateKey, Tensor], rows: Sequence[int], ends: Sequence[int] = ()) -> None:
        """Writes states of some rows, [rows, ...] each. ends: tokens that they include, of rows with draft tokens."""
        step = self._step
        for key, state in states.items():
            parts = state.unbind(0)
            step.states.setdefault(key, {}).update(zip(rows, parts, strict=True))
            for row, end, part in zip(rows, ends, parts, strict=bool(ends)):
                if row in step.draft_starts and step.draft_starts[row] <= end < step.ends[row]:
                    step.before_drafts[row].setdefault(end, {})[key] = part

    def _save(self, row: int, slot: int) -> None:
        """Saves the kept state of a row: the one before its draft tokens, if it has some, as they may be taken back."""
        kept, target = self._before_drafts.get(row), self.num_rows + slot
        if not kept:
            self._copy(row, target)
            return
        first = min(kept)
        for key, state in kept[first].items():
            self._tensors[key][target].copy_(state)
        self._num_tokens[target] = first

    def _copy(self, source: int, target: int) -> None:
        self._before_drafts.pop(target, None)
        for key in self._tensors:
            self._at(key, target).copy_(self._at(key, source))
        self._num_tokens[target] = self._num_tokens[source]

    def _at(self, key: StateKey, row: int) -> Tensor:
        """Returns a state of a row, or of a slot, which follow the rows."""
        tensor = self._tensors[key]
        return tensor[row] if row < len(tensor) else self._host[key][row - len(tensor)]

    def _save_now(self, row: int) -> None:
        """Saves the snapshot of a row that the latest step has written, if it is to be saved."""
        step = self._step
        num_tokens = step.draft_starts.get(row, step.ends.get(row, self._num_tokens[row]))
        for slot in [slot for slot, saved in step.saves.items() if saved == row]:
            for key, state in self._states_of(row, num_tokens).items():
                self._tensors[key][self.num_rows + slot].copy_(state)
            self._num_tokens[self.num_rows + slot] = num_tokens
            del step.saves[slot]

    def _states_of(self, row: int, num_tokens: int) -> dict[StateKey, Tensor]:
        """Returns the states of a row that include `num_tokens` tokens. Raises ValueError if it has none."""
        step = self._step
        latest = step.ends.get(row, self._num_tokens[row])
        if latest == num_tokens:
            return {key: step.states.get(key, {}).get(row, tensor[row]) for key, tensor in self._tensors.items()}
        before_drafts = step.before_drafts if row in step.ends else self._before_drafts
        found = before_drafts.get(row, {}).get(num_tokens)
        if found is None:
            raise ValueError(f"row {row} has the state of {latest} tokens, not of {num_tokens}")
        return found

    def read(self, row: int, num_tokens: int) -> bytes:
        """Returns the states of a row that no step has. Raises ValueError if they are not those of `num_tokens` tokens."""
        with self._lock:
            found = self._states_of(row, num_tokens)
            parts = [found[key].to(tensor.dtype) for key, tensor in self._tensors.items()]
        return b"".join(part.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for part in parts)

    def read_snapshot(self, slot: int, num_tokens: int) -> list[memoryview] | None:
        """Returns a snapshot in pieces, valid until the next plan; none if it is not of `num_tokens` tokens."""
        row = self.num_rows + slot
        if self._num_tokens[row] != num_tokens:
            return None
        return [_bytes_of(self._at(key, row).cpu()) for key in self._tensors]

    def fill_snapshot(self, slot: int, num_tokens: int, data: memoryview) -> None:
        """Sets a snapshot in host memory that no plan uses. Thread-safe."""
        row, start = self.num_rows + slot, 0
        for key in self._tensors:
            target = _bytes_of(self._at(key, row))
            target[:] = data[start : start + len(target)]
            start += len(target)
        self._num_tokens[row] = num_tokens

    def write(self, row: int, num_tokens: int, data: memoryview) -> None:
        """Sets the states of a row that no step has. A snapshot of what the row had is saved first."""
        start = 0
        with self._lock:
            self._save_now(row)
            for by_row in (self._step.ends, self._step.draft_starts, self._step.before_drafts, self._before_drafts):
                by_row.pop(row, None)
            for key, tensor in self._tensors.items():
                self._step.states.get(key, {}).pop(row, None)
                size = tensor[row].nbytes
                part = torch.frombuffer(bytearray(data[start : start + size]), dtype=tensor.dtype)
                tensor[row].copy_(part.view(tensor.shape[1:]))
                start += size
            self._num_tokens[row] = num_tokens


def _bytes_of(state: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of the host."""
    return state.flatten().view(torch.uint8).numpy().data
