"""The variants of a model's quantised linears and embedding, which depend on their weights."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.model.linear.linear import PlainGated, StackedLinear


@runtime_checkable
class ListedLinear(Protocol):
    """A linear or a table of rows with kernels of its own."""

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """Returns the variants of any number of rows. `add`: those that add to a residual."""
        ...


def quantized_variants(model: Decoder, dtype: torch.dtype, world_size: int) -> list[KernelVariant]:
    """Returns the variants of all layers and the head, each once. `world_size`: ranks that share a layer."""
    found: dict[KernelVariant, None] = {}
    for linear, add in dict.fromkeys(_linears(model, world_size)):
        for part in linear.linears if isinstance(linear, StackedLinear) else [linear]:
            if isinstance(part, ListedLinear):
                found |= dict.fromkeys(part.variants(dtype, add=add and part is linear))
    return list(found)


def _linears(model: Decoder, world_size: int) -> Iterator[tuple[object, bool]]:
    """Yields all linears, and whether each adds to the residual."""
    yield getattr(getattr(model, "embedding", None), "weight", None), False
    for layer in model.layers:
        yield layer.qkv, False
        yield layer.o, world_size == 1 and layer.attention_out is None
        if isinstance(layer.gate_up, PlainGated):
            yield layer.gate_up.linear, False
            yield layer.down, world_size == 1 and layer.mlp_out is None
    yield getattr(model, "head", None), False
