"""Sampling parameters and state of rows on the device, for `sample.sample_rows`: fixed tensors with one entry per row.

Token counts, biases and masks are as wide as the vocabulary: rows take slots of tensors that are allocated with the first such
row, and stay at their addresses.
"""

import math
from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.request import has_penalties
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.model.copies import to_device
from phalanx_runtime.rank.sampling.filters import make_draw
from phalanx_runtime.rank.sampling.gpu import triton_rows as columns
from phalanx_runtime.rank.sampling.gumbel import mixed_seed
from phalanx_runtime.rank.sampling.row import TokenCounts, invalid_ids_reason

NO_SLOT = -1
NO_TOP_K = 2**31 - 1


class RowFeature(IntFlag):
    """What a launch supports. One without a feature has no code for it."""

    PLAIN = 0
    FILTERS = columns.FILTERS.value
    PENALTIES = columns.PENALTIES.value
    BIAS = columns.BIAS.value
    MASKS = columns.MASKS.value


def host_only_reason(sampling: wire.Sampling, vocab_size: int) -> str | None:
    """Returns why only `TorchSampler` can sample a row.

    A grammar follows each token on the host, a long bad word depends on earlier tokens, and a gap needs the whole distribution.
    """
    if sampling.grammar is not None:
        return "grammar"
    if any(len(word) > 1 for word in sampling.bad_words):
        return "bad words of several tokens"
    if sampling.return_gaps:
        return "near-tie gaps"
    return invalid_ids_reason(sampling, vocab_size)


def pack_mask(allowed: NDArray[np.bool_]) -> Tensor:
    """Returns one bit per token in int32 words, lowest bit first, as grammars give them. allowed: [vocabulary]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32))


class SlotTensor:
    """Rows of a wide tensor, allocated with the first slot taken."""

    __slots__ = ("_device", "_dtype", "_free", "_taken", "_width", "tensor")

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor | None = None
        """[slots, width], if allocated."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[int, int] = {}
        self._width, self._dtype, self._device = width, dtype, device

    def allocate(self) -> None:
        """Allocates all slots, unless they are."""
        if self.tensor is None:
            num_slots = len(self._free) + len(self._taken)
            self.tensor = torch.zeros(num_slots, self._width, dtype=self._dtype, device=self._device)

    def take(self, owner: int) -> int:
        """Returns the slot of an owner, a free one if it has no slot; `NO_SLOT` if all are taken."""
        if owner in self._taken:
            return self._taken[owner]
        if not self._free:
            return NO_SLOT
        self.allocate()
        self._taken[owner] = self._free.pop()
        return self._taken[owner]

    def free(self, owner: int) -> None:
        """Frees the slot of an owner, if any."""
        if owner in self._taken:
            self._free.append(self._taken.pop(owner))

    def write(self, owner: int, ids: Sequence[int] | None, values: Tensor) -> None:
        """Writes a taken slot: `values` at `ids` and zero elsewhere; all values without ids."""
        assert self.tensor is not None
        target = self.tensor[self._taken[owner]]
        if ids is None:
            target.copy_(to_device(values, self._device), non_blocking=True)
        else:
            target.zero_()
            places = to_device(torch.tensor(ids, dtype=torch.int64), self._device)
            target.index_copy_(0, places, to_device(values, self._device))


class RowState:
    """Parameters, seeds and last tokens of all rows. Columns as in `triton_rows`."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        num_slots: int = 32,
        *,
        last_tokens: Tensor | None = None,
    ) -> None:
        """`num_slots`: rows with penalties, and with a bias; masks have twice as many. last_tokens: [max_rows] integers."""
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros(max_rows, columns.FLOATS.value, device=device)
        self.integers = torch.zeros(max_rows, columns.INTEGERS.value, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """`gumbel.mixed_seed` of each row."""
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device) if last_tokens is None else last_tokens
        """The token that each row sampled last: the input of its next step."""
        self.counts = SlotTensor(num_slots, vocab_size, torch.int32, device)
        """Twice the count in the output, plus 1 for tokens of the prompt."""
        self.bias = SlotTensor(num_slots, vocab_size, torch.float32, device)
        self.masks = SlotTensor(2 * num_slots, -(-vocab_size // 32), torch.int32, device)

    def allocate_slots(self) -> None:
        """Allocates all slots, whose addresses captured graphs need."""
        for slots in (self.counts, self.bias, self.masks):
            slots.allocate()

    @property
    def features(self) -> RowFeature:
        """What launches must support: filters, and what rows have slots for. It is constant once all slots are allocated."""
        features = RowFeature.FILTERS
        for feature, slots in ((RowFeature.PENALTIES, self.counts), (RowFeature.BIAS, self.bias), (RowFeature.MASKS, self.masks)):
            if slots.tensor is not None:
                features |= feature
        return features

    def admit(self, new: NewRow) -> bool:
        """Starts a row. Returns false if only the host can sample it, or no slot is free."""
        self.release(new.row)
        if host_only_reason(new.sampling, self.vocab_size) is not None:
            return False
        slots = [self._admit_counts(new), self._admit_bias(new), *self._admit_masks(new)]
        if None in slots:
            self.release(new.row)
            return False
        self._write_parameters(new, [NO_SLOT if slot is None else slot for slot in slots])
        return True

    def release(self, row: int) -> None:
        """Frees the slots of a row."""
        self.counts.free(row)
        self.bias.free(row)
        self.masks.free(2 * row)
        self.masks.free(2 * row + 1)

    def _write_parameters(self, new: NewRow, slots: list[int]) -> None:
        sampling = new.sampling
        draw = make_draw(sampling, 0)
        is_random = draw.temperature > 0
        counts, bias, mask, early_mask = slots
        top_k = draw.top_k if is_random and draw.top_k is not None else NO_TOP_K
        floats = [
            draw.temperature,
            draw.top_p if is_random else 1.0,
            math.log(draw.min_p) if is_random and draw.min_p > 0 else -math.inf,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            *[0.0] * 2,
        ]
        integers = [min(top_k, NO_TOP_K), counts, bias, mask, early_mask, sampling.min_tokens, *[0] * 2]
        self._write(self.floats, new.row, floats)
        self._write(self.integers, new.row, integers)
        self._write(self.seeds, new.row, mixed_seed(sampling.seed))

    def _write(self, target: Tensor, row: int, values: list[float] | list[int] | int) -> None:
        target[row].copy_(to_device(torch.tensor(values, dtype=target.dtype), self.device), non_blocking=True)

    def _admit_counts(self, new: NewRow) -> int | None:
        """Returns the slot, `NO_SLOT` if not needed; nothing if all are taken. So do the following."""
        if not has_penalties(new.sampling):
            return NO_SLOT
        slot = self.counts.take(new.row)
        if slot == NO_SLOT:
            return None
        prompt, output = new.history[: new.num_prompt], new.history[new.num_prompt :]
        counts = TokenCounts(prompt, output)
        in_prompt = np.arange(len(counts.ids)) < len(set(prompt))
        encoded = torch.from_numpy((2 * counts.counts + in_prompt).astype(np.int32))
        self.counts.write(new.row, counts.ids.tolist(), encoded)
        return slot

    def _admit_bias(self, new: NewRow) -> int | None:
        bias = new.sampling.logit_bias
        if not bias:
            return NO_SLOT
        slot = self.bias.take(new.row)
        if slot == NO_SLOT:
            return None
        self.bias.write(new.row, list(bias), torch.tensor(list(bias.values()), dtype=torch.float32))
        return slot

    def _admit_masks(self, new: NewRow) -> list[int | None]:
        """Returns the slots of the mask, and of the one before `min_tokens`, which also excludes the stop tokens."""
        sampling = new.sampling
        allowed = np.ones(self.vocab_size, np.bool_)
        if sampling.allowed_token_ids is not None:
            allowed = np.zeros_like(allowed)
            allowed[sampling.allowed_token_ids] = True
        allowed[[word[0] for word in sampling.bad_words]] = False
        early = allowed.copy()
        early[[token for token in sampling.stop_token_ids if 0 <= token < self.vocab_size]] = False
        needs_early = sampling.min_tokens > 0 and not np.array_equal(early, allowed)
        is_limited = not bool(allowed.all())
        late_slot = self._admit_mask(2 * new.row, allowed) if is_limited else NO_SLOT
        early_slot = self._admit_mask(2 * new.row + 1, early) if needs_early else late_slot
        return [late_slot, early_slot]

    def _admit_mask(self, owner: int, allowed: NDArray[np.bool_]) -> int | None:
        slot = self.masks.take(owner)
        if slot == NO_SLOT:
            return None
        self.masks.write(owner, None, pack_mask(allowed))
        return slot
