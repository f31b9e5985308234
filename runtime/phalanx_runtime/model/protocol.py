"""Interface of models: a `ModelFolder` loads this rank's part, a `Model`."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention.feedback import KvRounding
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import WHOLE, Stage
from phalanx_runtime.progress import WeightProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Storage of weights, and features to prepare."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    positions: int
    """Maximum request length."""
    has_exit: bool = False
    """The first stage loads norm and head too, for self-drafts."""
    num_readers: int = 1
    """Files to read at once; each mapped file counts as memory on a CPU."""
    is_batch_invariant: bool = False
    """See `invariant`."""
    max_loras: int = 0
    """Slots for adapters; 0: none."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    has_lora_experts: bool = True
    """Slots have memory for experts."""
    progress: WeightProgress | None = field(default=None, compare=False)
    """Counts the tensors that are read."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one rank's KV cache."""

    kv_heads: int
    """KV heads of every layer on this rank."""
    head_dims: tuple[int, ...]
    """Head dimension by layer."""
    windows: tuple[int | None, ...]
    """By layer the sliding window, or the size of the blocks within which tokens attend, if any."""
    has_blocks: bool = False
    """Whether `windows` are blocks, of one size."""
    is_unused: bool = False
    """The rank has no attention layers; its only one here counts tokens."""
    is_latent: bool = False
    """Keys are the values too: pages have no others."""
    roundings: tuple[KvRounding, ...] = field(default=(), compare=False)
    """How compressed pages round keys and values, by layer, if the model is calibrated."""

    @property
    def num_vectors(self) -> int:
        """Of a token and KV head: key and value, or the key alone."""
        return 1 if self.is_latent else 2


class ImageEncoder(Protocol):
    """Computes embeddings of images."""

    num_levels: int
    """Embeddings of a token: one for its place in the input, others that are added after the first layers."""
    request_bytes: int
    """Most bytes of the embeddings of the images of one request."""

    def blank(self) -> wire.Image:
        """Returns an image of one tile, for measurements."""
        ...

    def peak_bytes(self, measured: int) -> int:
        """Returns the most memory that encoding an image takes. `measured`: that of `blank`."""
        ...

    def encode(self, image: wire.Image) -> Tensor:
        """Returns the embeddings of an image, [tokens, levels * hidden]. Raises ValueError for tiles of another size."""
        ...


class Model(Protocol):
    """One rank's part of a model."""

    @property
    def kv(self) -> KvLayout:
        """Shape of its KV cache."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    @property
    def positions(self) -> int:
        """Maximum request length."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the whole vocabulary."""
        ...

    @property
    def width(self) -> int:
        """Hidden size."""
        ...

    @property
    def embedding_size(self) -> int:
        """Length of the vectors of pooled requests; 0: it computes none. Equal on all ranks."""
        ...

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        """Writes the KV cache; returns the head's input at `logits_indices`, [n, hidden].

        Other stages than the last return all hidden states, [tokens, hidden]: the next stage's input, which it may overwrite.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns this rank's logits, [n, rows], from [n, hidden]. Last stage only."""
        ...

    def pooled_states(self, hidden: Tensor) -> Tensor:
        """Returns rows whose last ones are the states of the pooled tokens, after the final norm. `hidden`: of the same step."""
        ...


class ModelFolder(Protocol):
    """A parsed model folder."""

    @property
    def dtype(self) -> str:
        """Stored dtype."""
        ...

    @property
    def max_position(self) -> int:
        """Maximum request length."""
        ...

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Returns the number of this rank's linear weights. Raises ModelError."""
        ...

    def load(
        self, collective: Collective, options: LoadOptions, attention: Attention | None = None, stage: Stage = WHOLE
    ) -> Model:
        """Loads this rank's part. `collective`: ranks of its stage. Raises ModelError, PeerLost."""
        ...
