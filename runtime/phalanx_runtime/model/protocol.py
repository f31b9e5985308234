"""What a rank needs of a model, whatever computes it: the fused decoder, or a `transformers` model around our attention.

A `Source` is a model folder that was understood but not read: what is known of it before its weights are. `load` gives this
rank's part of it, a `Model`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.linear.linear import Kernels
from phalanx_runtime.model.partition import WHOLE, Stage


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are kept: dtype, device, layout of linears; and for how many positions of a request angles are made.

    has_exit: the first stage keeps norm and head too, for drafts by its first layers. is_fixed: attention is such that
    its bits do not depend on what else is in a step.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    positions: int
    has_exit: bool = False
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Keys and values that one rank keeps: KV heads of every layer, head dimension of each, windows that occur in any."""

    kv_heads: int
    head_dims: tuple[int, ...]
    windows: frozenset[int | None]


class Model(Protocol):
    """One rank's part of a model: all its layers, or those of one stage of a pipeline."""

    @property
    def kv(self) -> KvLayout:
        """The keys and values that its layers write."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters, a tied table counted once."""
        ...

    @property
    def positions(self) -> int:
        """Positions of a request that it was loaded for."""
        ...

    @property
    def vocab_size(self) -> int:
        """Scores of one token, over all ranks."""
        ...

    @property
    def width(self) -> int:
        """Size of a token's hidden state between stages."""
        ...

    def hidden(self, batch: StepBatch, caches: list[LayerCache], before: Tensor | None = None) -> Tensor:
        """What the head reads at each of the batch's `drawn` tokens: [drawn, hidden]. Writes the step's keys and values.

        Stages but the last give the hidden state of every token, [tokens, hidden], which the next takes as `before`; it may
        be overwritten.
        """
        ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows: [n, rows] from [n, hidden]. Only on the last stage."""
        ...


class Source(Protocol):
    """A model folder before its weights are read."""

    @property
    def dtype(self) -> str:
        """The dtype of its weights, as config.json names it."""
        ...

    @property
    def max_position(self) -> int:
        """Tokens of the longest request that the model was made for."""
        ...

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Weights in the linears of this rank's part. Raises ModelError when the model cannot be split so."""
        ...

    def load(self, collective: Collective, form: Form, attention: Attention | None = None, stage: Stage = WHOLE) -> Model:
        """This rank's part of the model; the collective joins the ranks of its stage. Raises ModelError, PeerLost."""
        ...
