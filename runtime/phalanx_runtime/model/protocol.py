"""The model interface of a rank, for the fused decoder and for `transformers` models with our attention.

A `ModelFolder` is a parsed model folder before its weights are read; `load` returns this rank's part of it, a `Model`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import WHOLE, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How weights are stored on the rank."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    # Rotary angles are computed for this many positions of a request.
    positions: int
    # The first stage keeps the final norm and the head too, for self-drafts.
    has_exit: bool = False
    # Attention is batch-invariant: a token's bits do not depend on the rest of its step.
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one rank's KV cache: KV heads of every layer, head dimension of each layer, sliding windows in use."""

    kv_heads: int
    head_dims: tuple[int, ...]
    windows: frozenset[int | None]


class Model(Protocol):
    """One rank's part of a model: all layers, or those of one pipeline stage."""

    @property
    def kv(self) -> KvLayout:
        """Shape of the KV cache that its layers write."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters; a tied table counts once."""
        ...

    @property
    def positions(self) -> int:
        """Positions of a request that it was loaded for."""
        ...

    @property
    def vocab_size(self) -> int:
        """Logits per token, over all ranks."""
        ...

    @property
    def width(self) -> int:
        """Size of the hidden state between stages."""
        ...

    def hidden(self, batch: StepBatch, caches: list[LayerCache], before: Tensor | None = None) -> Tensor:
        """Returns the head's input at each token in the batch's `drawn`: [drawn, hidden]. Writes the KV cache.

        Stages other than the last return the hidden state of every token, [tokens, hidden]; the next stage receives it as
        `before` and may overwrite it.
        """
        ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Returns logits of this rank's vocabulary rows: [n, rows] from [n, hidden]. Last stage only."""
        ...


class ModelFolder(Protocol):
    """A model folder before its weights are read."""

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as in config.json."""
        ...

    @property
    def max_position(self) -> int:
        """The model's maximum request length in tokens."""
        ...

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Returns the number of linear weights of this rank. Raises ModelError when the model cannot be split this way."""
        ...

    def load(self, collective: Collective, form: Form, attention: Attention | None = None, stage: Stage = WHOLE) -> Model:
        """Returns this rank's part of the model; `collective` joins the ranks of its stage. Raises ModelError, PeerLost."""
        ...
