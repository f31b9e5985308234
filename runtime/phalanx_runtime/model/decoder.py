"""The fused decoder: one block for Llama, Mistral, Qwen2 and Qwen3.

norm -> one QKV linear -> (q, k norm) -> rotary -> pages and attention -> output linear -> sum over ranks -> residual
     -> norm -> one gate-up linear -> silu * up -> down linear -> sum over ranks -> residual
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention import Attention, AttentionForm, LayerCache, StepBatch
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.layers import RopeTable, VocabEmbedding, rms_norm, rotate, swiglu
from phalanx_runtime.model.linear import Kernels, Linear, make_linear
from phalanx_runtime.model.native.attention import choose_attention
from phalanx_runtime.model.partition import Shard, Span, partition
from phalanx_runtime.model.protocol import Form, KvLayout
from phalanx_runtime.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder block, this rank's part."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    form: AttentionForm


class Decoder:
    """One rank's part of the model. `num_bytes` are those of its parameters, a tied table counted once."""

    def __init__(self, config: ModelConfig, shard: Shard, collective: Collective, rope: RopeTable, attention: Attention) -> None:
        self.config = config
        self.shard = shard
        self.kv = KvLayout(shard.kv_heads.size, (config.head_dim,) * config.num_layers, frozenset(config.windows))
        self.layers: list[Layer] = []
        self.num_bytes = 0
        self.vocab_size = config.vocab_size
        self.positions = rope.cos.shape[0]
        self._collective = collective
        self._rope = rope
        self._attention = attention
        self.embedding: VocabEmbedding
        self.norm: Tensor
        self.head: Linear

    def hidden(self, batch: StepBatch, caches: list[LayerCache]) -> Tensor:
        """What the head reads at each of the batch's `drawn` tokens: [drawn, hidden]. Writes the step's keys and values."""
        x = self.embedding(batch.tokens)
        cos, sin = self._rope.at(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            self._block(layer, x, cos, sin, cache, batch)
        return rms_norm(x.index_select(0, batch.drawn), self.norm, self.config.rms_norm_eps)

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's vocabulary rows: [n, rows] from [n, hidden]."""
        return self.head(hidden)

    def _block(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """One decoder block; adds to x in place."""
        eps = self.config.rms_norm_eps
        q, k, v = self._heads(layer, rms_norm(x, layer.input_norm, eps), cos, sin)
        x.add_(self._sum(layer.o(self._attention(q, k, v, cache, batch, layer.form))))
        x.add_(self._sum(layer.down(swiglu(layer.gate_up(rms_norm(x, layer.post_norm, eps))))))

    def _heads(self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of h: [tokens, heads, head_dim] each, rotated."""
        heads, kv_heads = self.shard.heads.size, self.shard.kv_heads.size
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            qk = torch.cat((rms_norm(qk[:, :heads], layer.q_norm, eps), rms_norm(qk[:, heads:], layer.k_norm, eps)), 1)
        qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], v

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self._collective.world_size == 1 else self._collective.all_reduce(partial)


def load(
    folder: Path,
    config: ModelConfig,
    collective: Collective,
    form: Form,
    attention: Attention | None = None,
) -> Decoder:
    """This rank's part of the checkpoint in `folder`. Raises ModelError."""
    shard = partition(config, collective.world_size)[collective.rank]
    rope = RopeTable(config.rope, config.head_dim, form.positions, form.dtype, form.device)
    model = Decoder(config, shard, collective, rope, attention or choose_attention(form.device))
    with Checkpoint(folder, form.dtype, form.device) as checkpoint:
        loader = _Loader(config, shard, checkpoint, form.kernels, collective.rank)
        model.embedding = VocabEmbedding(loader.vocab("model.embed_tokens.weight"), shard.vocab, collective)
        model.norm = loader.norm("model.norm.weight", config.hidden_size)
        model.layers = [loader.layer(index) for index in range(config.num_layers)]
        table = model.embedding.weight if config.tied else loader.vocab("lm_head.weight")
        model.head = make_linear(table, None, form.kernels)
        model.num_bytes = loader.num_bytes
    return model


class _Loader:
    """Reads this rank's slices and counts their bytes."""

    def __init__(self, config: ModelConfig, shard: Shard, checkpoint: Checkpoint, kernels: Kernels, rank: int) -> None:
        self.num_bytes = 0
        self._config = config
        self._shard = shard
        self._checkpoint = checkpoint
        self._kernels = kernels
        # A bias after a sum over ranks must enter it once: rank 0 brings it.
        self._first = rank == 0

    def vocab(self, name: str) -> Tensor:
        """Rows of an embedding or head."""
        return self._count(self._checkpoint.rows(name, (self._config.vocab_size, self._config.hidden_size), self._shard.vocab))

    def norm(self, name: str, size: int) -> Tensor:
        """A whole vector."""
        return self._count(self._checkpoint.vector(name, size))

    def layer(self, index: int) -> Layer:
        """One decoder block."""
        config, name = self._config, f"model.layers.{index}."
        return Layer(
            input_norm=self.norm(name + "input_layernorm.weight", config.hidden_size),
            qkv=self._qkv(name + "self_attn."),
            q_norm=self.norm(name + "self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(name + "self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            o=self._row_parallel(
                name + "self_attn.o_proj", config.num_heads * config.head_dim, self._dims(self._shard.heads), config.o_bias
            ),
            post_norm=self.norm(name + "post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._gate_up(name + "mlp."),
            down=self._row_parallel(name + "mlp.down_proj", config.intermediate_size, self._shard.mlp, config.mlp_bias),
            form=AttentionForm(config.windows[index]),
        )

    def _qkv(self, prefix: str) -> Linear:
        config, shard = self._config, self._shard
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [("q_proj", q, self._dims(shard.heads)), ("k_proj", kv, self._dims(shard.kv_heads))]
        parts.append(("v_proj", kv, self._dims(shard.kv_heads)))
        return self._column_parallel([(prefix + name, size, span) for name, size, span in parts], config.qkv_bias)

    def _gate_up(self, prefix: str) -> Linear:
        size, span = self._config.intermediate_size, self._shard.mlp
        return self._column_parallel(
            [(prefix + "gate_proj", size, span), (prefix + "up_proj", size, span)], self._config.mlp_bias
        )

    def _dims(self, heads: Span) -> Span:
        return Span(heads.start * self._config.head_dim, heads.stop * self._config.head_dim)

    def _column_parallel(self, parts: list[tuple[str, int, Span]], biased: bool) -> Linear:
        """Output rows of several linears, one below the other: (name, outputs, span of outputs)."""
        read = self._checkpoint
        weight = torch.cat([read.rows(name + ".weight", (size, self._config.hidden_size), span) for name, size, span in parts])
        bias = torch.cat([read.vector(name + ".bias", size, span) for name, size, span in parts]) if biased else None
        return self._linear(weight, bias)

    def _row_parallel(self, name: str, size: int, span: Span, biased: bool) -> Linear:
        """Input columns of one linear whose outputs are summed over the ranks."""
        weight = self._checkpoint.columns(name + ".weight", (self._config.hidden_size, size), span)
        bias = self._checkpoint.vector(name + ".bias", self._config.hidden_size) if biased and self._first else None
        return self._linear(weight, bias)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        made = make_linear(weight, bias, self._kernels)
        self.num_bytes += made.num_bytes
        return made

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor
