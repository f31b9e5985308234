"""Sampled tokens in pinned memory of the host, which a kernel writes.

A copy would delay the next step: the device changes to its copy engine and back.
"""

import weakref
from contextlib import suppress

import torch
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.operators import operator
from phalanx_runtime.rank.device.triton_kernels import store_tokens

BLOCK = 128
NUM_SLOTS = 4
"""Steps whose tokens are kept: at most two are in flight, and the host reads one of them."""


@operator("store_tokens(Tensor(a!) host, Tensor sampled)", num_pinned=1)
def _store(host: Tensor, sampled: Tensor) -> None:
    num_rows = len(sampled)
    arguments = {"host": host, "sampled": sampled, "num_rows": num_rows, "BLOCK": BLOCK}
    launch(store_tokens, (num_blocks(num_rows, BLOCK),), arguments)


def store_variant() -> KernelVariant:
    """Returns the variant of `HostTokens`."""
    return variant_of(store_tokens, {"host": torch.int64, "sampled": torch.int64, "num_rows": 1, "BLOCK": BLOCK})


def free_after_device(owner: object, pinned: list[Tensor]) -> None:
    """Keeps pinned memory after its owner is freed, until the device has ended its work.

    Torch reuses pinned memory once no tensor has it: it does not know the kernels of ours that read or write it.
    """
    weakref.finalize(owner, _await_device, pinned).atexit = False


def _await_device(pinned: list[Tensor]) -> None:
    """`pinned`: memory that exists until this returns."""
    with suppress(RuntimeError):  # a device that failed writes no more
        torch.cuda.synchronize()


class HostTokens:
    """Slots for the tokens of steps, pinned for a GPU."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda" and torch.cuda.is_available()
        self._slots = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=is_pinned) for _ in range(NUM_SLOTS)]
        self._next = 0
        if is_pinned:
            free_after_device(self, self._slots)

    def store(self, sampled: Tensor) -> Tensor:
        """Queues the copy of tokens, [n] int64, and returns where they are afterwards: until `NUM_SLOTS` further calls."""
        slot = self._slots[self._next][: len(sampled)]
        self._next = (self._next + 1) % NUM_SLOTS
        _store(slot, sampled)
        return slot
