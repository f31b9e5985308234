"""The fused decoder: one block for all families of `families.FAMILIES`.

norm -> one QKV linear -> (q, k norm) -> rotary -> pages and attention -> output linear -> sum over ranks (-> norm) -> residual
     -> norm -> one gate-up linear -> activation * up -> down linear -> sum over ranks (-> norm) -> residual
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention.paged import Attention, AttentionForm, LayerCache, StepBatch
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.layers import QkNorm, Steps, VocabEmbedding
from phalanx_runtime.model.linear.linear import Gated, Linear
from phalanx_runtime.model.partition import Shard, Stage
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.model.rope import Angles, Rope, RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """This rank's weights of one decoder block. Each half may have a norm before it (`_in`) and after it (`_out`)."""

    attention_in: Tensor | None
    qkv: Linear
    qk_norm: QkNorm | None
    rope: Rope | None
    form: AttentionForm
    o: Linear
    attention_out: Tensor | None
    mlp_in: Tensor | None
    gate_up: Gated
    down: Linear
    mlp_out: Tensor | None


class Decoder:
    """One rank's part of the model. The first stage has the embedding; the last (and a self-drafting first) norm and head."""

    embedding: VocabEmbedding
    norm: Tensor
    head: Linear

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        collective: Collective,
        ropes: dict[Rope, RopeTable],
        attention: Attention,
        steps: Steps,
        stage: Stage,
    ) -> None:
        own = stage.layers(config.num_layers)
        windows = frozenset(config.windows[own.start : own.stop])
        self.config = config
        self.shard = shard
        self.kv = KvLayout(shard.kv_heads.size, (config.head_dim,) * own.size, windows)
        self.layers: list[Layer] = []
        self.num_bytes = 0
        self.vocab_size = config.vocab_size
        self.width = config.hidden_size
        self.positions = config.max_position
        self._collective = collective
        self._ropes = ropes
        self._attention = attention
        self.steps = steps
        self._is_last = stage.is_last

    def hidden(self, batch: StepBatch, caches: list[LayerCache], before: Tensor | None = None) -> Tensor:
        """Returns the input of the head or of the next stage. Writes the KV cache."""
        x = self._embed(batch.tokens) if before is None else before
        self._through(x, batch, self.layers, caches)
        return self._norm(x.index_select(0, batch.drawn), self.norm) if self._is_last else x

    def states(self, batch: StepBatch, caches: list[LayerCache], after: Sequence[int]) -> list[Tensor]:
        """Returns the hidden state of each `drawn` token after each layer count in `after` (ascending): [drawn, hidden] each.

        Writes the KV cache of those layers. First stage only.
        """
        x, first, states = self._embed(batch.tokens), 0, []
        for num_layers in after:
            part = slice(first, num_layers)
            self._through(x, batch, self.layers[part], caches[part])
            states.append(x.index_select(0, batch.drawn))
            first = num_layers
        return states

    def state_scores(self, states: Tensor) -> Tensor:
        """Returns logits of this rank's vocabulary rows from hidden states before the final norm: [n, rows] from [n, hidden]."""
        return self.scores(self._norm(states, self.norm))

    def scores(self, hidden: Tensor) -> Tensor:
        """Returns logits of this rank's vocabulary rows: [n, rows] from [n, hidden]."""
        scores = self.head(hidden)
        cap = self.config.logit_softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def _through(self, x: Tensor, batch: StepBatch, layers: Sequence[Layer], caches: Sequence[LayerCache]) -> None:
        """Computes `layers`; changes x in place."""
        angles = {rope: table.at(batch.positions) for rope, table in self._ropes.items()}
        for layer, cache in zip(layers, caches, strict=True):
            self._block(layer, x, angles, cache, batch)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scale = self.config.embedding_scale
        # The scale is rounded to the dtype of the embedding, as in the families that have one.
        return x if scale is None else x.mul_(torch.tensor(scale, dtype=x.dtype).item())

    def _block(self, layer: Layer, x: Tensor, angles: dict[Rope, Angles], cache: LayerCache, batch: StepBatch) -> None:
        """Computes one decoder block; adds to x in place."""
        turned = None if layer.rope is None else angles[layer.rope]
        q, k, v = self._heads(layer, self._norm(x, layer.attention_in), turned)
        self._add(layer.o, self._attention(q, k, v, cache=cache, batch=batch, form=layer.form), layer.attention_out, x)
        self._add(layer.down, layer.gate_up(self._norm(x, layer.mlp_in)), layer.mlp_out, x)

    def _add(self, linear: Linear, h: Tensor, norm: Tensor | None, x: Tensor) -> None:
        """Adds the linear's sum over all ranks to x, normalised where the layer has an output norm."""
        if norm is None and self._collective.world_size == 1:
            linear.add_to(x, h)
        else:
            x.add_(self._norm(self._sum(linear(h)), norm))

    def _heads(self, layer: Layer, h: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries and keys, and values of h: [tokens, heads, head_dim] each."""
        heads, kv_heads = self.shard.heads.size, self.shard.kv_heads.size
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk[:, :heads], qk[:, heads:])
        if angles is not None:
            qk = self.steps.turned(qk, angles)
        return qk[:, :heads], qk[:, heads:], v

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.steps.norm(x, weight, self.config.rms_norm_eps)

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self._collective.world_size == 1 else self._collective.all_reduce(partial)
