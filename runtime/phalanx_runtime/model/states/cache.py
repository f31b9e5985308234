"""The cache that a layer of `transformers` gets: the states of some rows."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["conv", "recurrent", "linear"]


class StateKey(NamedTuple):
    """One state of a layer."""

    layer: int
    kind: Kind
    number: int
    """Of several states of a kind."""


class RowCache:
    """Implements what layers use of `transformers.Cache`. States are [rows, ...]; layers may change them in place."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        """`states`: copies of what the rows had; empty for new rows."""
        self.states = states
        self.updated: list[StateKey] = []
        """States that the layer has set, in order."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns whether the rows have states."""
        return bool(self.states) and layer_idx is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns false: nothing is taken back."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, if the rows have any."""
        return self.states.get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the state of a recurrence, if the rows have any."""
        return self.states.get(StateKey(layer_idx, "recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of a linear attention, if the rows have any."""
        return self.states.get(StateKey(layer_idx, "linear", 0))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keeps the last inputs of a convolution, with zeros before the first. Returns all known inputs, [rows, channels, n]."""
        key = StateKey(layer_idx, "conv", state_idx)
        known, size = self.states.get(key), conv_kernel_size
        if known is not None:
            from_start, size = torch.cat([known, conv_states], -1), known.shape[-1]
        else:
            size = conv_states.shape[-1] if size is None else size
            from_start = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self._set(key, from_start[..., -size:])
        return from_start

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keeps and returns the state of a recurrence."""
        return self._set(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of a linear attention."""
        self._set(StateKey(layer_idx, "linear", 0), linear_cache)

    def _set(self, key: StateKey, state: Tensor) -> Tensor:
        self.updated.append(key)
        self.states[key] = state
        return state
