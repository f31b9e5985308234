"""The fused decoder: one layer for all `FAMILIES`.

norm -> QKV linear -> (q, k norm) -> rotary -> attention -> output linear -> all-reduce (-> norm) -> residual
     -> norm -> gate-up linear -> activation * up -> down linear -> all-reduce (-> norm) -> residual

In a layer with experts a `SparseMlp` takes the place of gate-up and down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.adapters.experts import Deltas
from phalanx_runtime.model.adapters.load import ModelAdapters
from phalanx_runtime.model.adapters.slots import LayerDeltas
from phalanx_runtime.model.attention.paged import Attention, AttentionParams, LayerCache, StepBatch
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.one_shot import ATTENTION_SLOT, MLP_SLOT, OneShot
from phalanx_runtime.model.decoder.single_row import DenseLayer, RowLinears, dense_layer
from phalanx_runtime.model.layers import DecoderOps, QkNorm, VocabEmbedding
from phalanx_runtime.model.linear.linear import DenseLinear, Gated, Linear
from phalanx_runtime.model.partition import Shard, Stage
from phalanx_runtime.model.protocol import ImageEncoder, KvLayout
from phalanx_runtime.model.rope import Angles, Rope, RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """This rank's weights of a layer. Norms precede (`_in`) or follow (`_out`) each half."""

    attention_in: Tensor | None
    qkv: Linear
    qk_norm: QkNorm | None
    rope: Rope | None
    params: AttentionParams
    o: Linear
    attention_out: Tensor | None
    mlp_in: Tensor | None
    gate_up: Gated | None
    """Absent in a layer with experts."""
    down: Linear
    """The MLP's second half, or router and experts."""
    mlp_out: Tensor | None

    @property
    def dense(self) -> DenseLayer | None:
        """Its linears for a single row, if they are supported."""
        if self.attention_out is not None or self.mlp_out is not None:
            return None
        return dense_layer(
            attention_in=self.attention_in, qkv=self.qkv, o=self.o, mlp_in=self.mlp_in, gate_up=self.gate_up, down=self.down
        )


class StepLayers(Protocol):
    """All layers of a step in one call. Implemented in `decoder.cpu`."""

    def run(
        self,
        x: Tensor,
        batch: StepBatch,
        layers: Sequence[Layer],
        caches: Sequence[LayerCache],
        angles: Mapping[Rope, Angles],
    ) -> bool:
        """Adds the layers to x, [tokens, hidden], in place, or returns false if it does not support the step.

        angles: of the step, by rotary embedding.
        """
        ...


class Decoder:
    """One rank's `Model`. Only a first stage has the embedding, only a last or self-drafting one norm and head."""

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
        ops: DecoderOps,
        stage: Stage,
    ) -> None:
        layers = stage.layers(config.num_layers)
        windows = tuple(config.windows[layers.start : layers.stop])
        self.config = config
        self.shard = shard
        self.kv = KvLayout(shard.kv_heads.size, (config.head_dim,) * layers.size, windows)
        self.layers: list[Layer] = []
        self.num_bytes = 0
        self.vocab_size = config.vocab_size
        self.width = config.hidden_size
        self.embedding_size = config.num_labels or config.hidden_size
        self.positions = config.max_position
        self._collective = collective
        self._ropes = ropes
        self._attention = attention
        self.ops = ops
        self.one_shot: OneShot | None = None
        """Sums of few rows over ranks; without it the collective's."""
        self.row_linears: RowLinears | None = None
        """Linears of a single row with the norms before them; without it those of the layers, and `ops`."""
        self.step_layers: StepLayers | None = None
        """All layers in one call, in steps that it supports; without it one operation after the other."""
        self.adapters: ModelAdapters | None = None
        self.images: ImageEncoder | None = None
        """Of a model that reads images, on the first stage."""
        self.score: Tensor | None = None
        """Classification head, [labels, hidden], of a classifier's last stage."""
        self._is_last = stage.is_last

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        """See `Model`."""
        x, first = self.embed(batch) if stage_input is None else stage_input, 0
        if stage_input is None and batch.embeddings is not None:
            for values in batch.embeddings.deeper:
                self.run_layers(x, batch, self.layers[first : first + 1], caches[first : first + 1], first)
                first += 1
                x.index_add_(0, batch.embeddings.tokens, values.to(x.dtype))
        self.run_layers(x, batch, self.layers[first:], caches[first:], first)
        return self._norm(x.index_select(0, batch.logits_indices), self.norm) if self._is_last else x

    def states(self, batch: StepBatch, caches: list[LayerCache], after: Sequence[int]) -> list[Tensor]:
        """Returns hidden states at `logits_indices` after each number of layers in `after`, ascending: [n, hidden] each."""
        x, first, states = self.embed(batch), 0, []
        for num_layers in after:
            part = slice(first, num_layers)
            self.run_layers(x, batch, self.layers[part], caches[part], first)
            states.append(x.index_select(0, batch.logits_indices))
            first = num_layers
        return states

    def state_logits(self, states: Tensor) -> Tensor:
        """Returns this rank's logits, [n, rows], from hidden states before the final norm."""
        return self.logits(self._norm(states, self.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        rows, head = self.row_linears, self.head
        if rows is not None and rows.supports(hidden) and isinstance(head, DenseLinear):
            logits = rows.project(hidden, None, head, 0.0)
        else:
            logits = head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def pooled_states(self, hidden: Tensor) -> Tensor:
        """See `Model`. The vectors of a classifier are logits, in the dtype of its head."""
        return hidden if self.score is None else torch.nn.functional.linear(hidden.to(self.score.dtype), self.score)

    def run_layers(
        self, x: Tensor, batch: StepBatch, layers: Sequence[Layer], caches: Sequence[LayerCache], first: int = 0
    ) -> None:
        """Adds the layers to x, in place. `first`: index of the first of them on this rank."""
        if not layers:
            return
        angles = {rope: table.at(batch.positions, batch.cells) for rope, table in self._ropes.items()}
        rows, dense = self.row_linears, list[DenseLayer]()
        deltas: Sequence[LayerDeltas | None] = [None] * len(layers)
        if batch.adapters is not None and self.adapters is not None:
            deltas = self.adapters.of_step(batch.adapters)[first : first + len(layers)]
        elif self.step_layers is not None and self.step_layers.run(x, batch, layers, caches, angles):
            return
        elif rows is not None and self._collective.world_size == 1 and rows.supports(x):
            dense = [one for layer in layers if (one := layer.dense) is not None]
        if rows is not None and dense and len(dense) == len(layers):
            for layer, linears, cache in zip(layers, dense, caches, strict=True):
                self._run_row(rows, linears, layer, x, rotation=_rotation(layer, angles), cache=cache, batch=batch)
            return
        h = self._norm(x, layers[0].attention_in)
        following = [layer.attention_in for layer in layers[1:]] + [None]
        for layer, cache, attention_in, own in zip(layers, caches, following, deltas, strict=True):
            h = self._run_attention(layer, x, h, rotation=_rotation(layer, angles), cache=cache, batch=batch, deltas=own)
            if layer.gate_up is None:
                inner = h
            elif own is None:
                inner = layer.gate_up(h)
            else:
                inner = layer.gate_up.with_addition(h, own.gate_up)
            mlp, down = (layer.down, None) if own is None else (own.mlp(layer.down), own.down)
            h = self._add(mlp, inner, x, layer.mlp_out, attention_in, slot=MLP_SLOT, delta=down)

    def embed(self, batch: StepBatch) -> Tensor:
        """Returns the first layer's input, [tokens, hidden], in new memory."""
        x = self.embedding(batch.tokens)
        scale = self.config.embedding_scale
        if scale is not None:  # these families round it to the embedding's dtype
            x = x.mul_(torch.tensor(scale, dtype=x.dtype).item())
        if batch.embeddings is not None:
            batch.embeddings.place(x)
        return x

    def _run_attention(
        self,
        layer: Layer,
        x: Tensor,
        h: Tensor,
        *,
        rotation: Angles | None,
        cache: LayerCache,
        batch: StepBatch,
        deltas: LayerDeltas | None,
    ) -> Tensor:
        """Adds the attention of h to x. Returns the input of the MLP."""
        qkv, o = layer.qkv(h), None if deltas is None else deltas.o
        if deltas is not None:
            deltas.qkv.add(qkv, h)
        attended = self._attend(layer, qkv, rotation=rotation, cache=cache, batch=batch)
        return self._add(layer.o, attended, x, layer.attention_out, layer.mlp_in, slot=ATTENTION_SLOT, delta=o)

    def _run_row(
        self,
        rows: RowLinears,
        linears: DenseLayer,
        layer: Layer,
        x: Tensor,
        *,
        rotation: Angles | None,
        cache: LayerCache,
        batch: StepBatch,
    ) -> None:
        """Adds both halves of the layer to x, [1, hidden]."""
        eps = self.config.rms_norm_eps
        qkv = rows.project(x, linears.attention_in, linears.qkv, eps)
        rows.add(linears.o, self._attend(layer, qkv, rotation=rotation, cache=cache, batch=batch), x)
        rows.add(linears.down, rows.gate(x, linears.mlp_in, linears.gate_up, eps), x)

    def _attend(self, layer: Layer, qkv: Tensor, *, rotation: Angles | None, cache: LayerCache, batch: StepBatch) -> Tensor:
        """Returns the attention of the step before the output linear, [tokens, heads * dim]."""
        if batch.await_pages is not None:
            batch.await_pages(cache)
        batch = batch.of(layer.params.window)
        num_heads = self.shard.heads.size + 2 * self.shard.kv_heads.size
        qkv = qkv.view(len(qkv), num_heads, self.config.head_dim)
        heads = self.ops.prepare_heads(qkv, layer.qk_norm, rotation, cache, batch.slots)
        return self._attention(
            heads.q, heads.k, heads.v, cache=cache, batch=batch, params=layer.params, is_written=heads.is_written
        )

    def _add(
        self,
        linear: Linear,
        h: Tensor,
        x: Tensor,
        after: Tensor | None,
        before: Tensor | None,
        *,
        slot: int,
        delta: Deltas | None = None,
    ) -> Tensor:
        """Adds the sum over ranks of the linear and `delta` to x, normalised by `after`. Returns x, normalised by `before`."""
        if after is None and self._collective.world_size == 1:
            linear.add_to(x, h)
            return self._norm(_added(x, delta, h), before)
        partial = _added(linear(h), delta, h)
        if self.one_shot is not None and self.one_shot.fits(x, after, before):
            return self.one_shot.add_norm(x, partial, after, before, self.config.rms_norm_eps, slot=slot)
        return self.ops.add_norm(x, self._all_reduce(partial), after, before, self.config.rms_norm_eps)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.ops.norm(x, weight, self.config.rms_norm_eps)

    def _all_reduce(self, partial: Tensor) -> Tensor:
        return partial if self._collective.world_size == 1 else self._collective.all_reduce(partial)


def _added(y: Tensor, delta: Deltas | None, x: Tensor) -> Tensor:
    """Returns y, with what adapters add for x."""
    if delta is not None:
        delta.add(y, x)
    return y


def _rotation(layer: Layer, angles: dict[Rope, Angles]) -> Angles | None:
    return None if layer.rope is None else angles[layer.rope]
