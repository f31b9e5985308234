"""Partition of a model over ranks.

Attention is split by KV head, unevenly if necessary; more ranks than KV heads replicate a KV head and share its query heads. MLP
columns balance the weights per rank; vocabulary rows are split evenly. Each rank has columns of all experts, or whole experts.
"""

from dataclasses import dataclass

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.mixture import Mixture

MLP_UNIT = 16
"""Columns per vector register of fp32, kept together if possible."""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open interval of indices."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part."""

    heads: Span
    kv_heads: Span
    mlp: Span
    vocab: Span
    experts: Span = Span(0, 0)
    """Experts of each layer that has some."""
    expert_mlp: Span = Span(0, 0)
    """Columns of each of these experts."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads.size // self.kv_heads.size


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage. The first has the embedding, the last norm and head."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether its input is tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether its output is logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> Span:
        """Returns its layers; earlier stages take the remainder. Raises ModelError."""
        if self.count > num_layers:
            raise ModelError(f"pipeline-parallel size {self.count} is more than the model's {num_layers} layers")
        return cut_evenly(num_layers, self.count)[self.index]


WHOLE = Stage()
"""The only stage."""


def num_linear_weights(config: ModelConfig, shard: Shard, stage: Stage = WHOLE) -> int:
    """Counts this rank's linear weights, with the head. Raises ModelError."""
    layers, mixture = stage.layers(config.num_layers), config.mixture
    sparse = 0 if mixture is None else sum(mixture.layers[layers.start : layers.stop])
    rows = layers.size * 2 * config.head_dim * (shard.heads.size + shard.kv_heads.size)
    rows += (layers.size - sparse) * 3 * shard.mlp.size
    if mixture is not None:
        rows += sparse * (mixture.num_experts + 3 * shard.experts.size * shard.expert_mlp.size)  # with the router
    return config.hidden_size * (rows + (shard.vocab.size if stage.is_last else 0))


def partition(config: ModelConfig, world_size: int) -> list[Shard]:
    """Returns the shard of each rank. Raises ModelError."""
    if world_size > config.num_heads:
        raise ModelError(f"tensor-parallel size {world_size} exceeds the model's {config.num_heads} attention heads")
    if world_size > min(config.intermediate_size, config.vocab_size):
        raise ModelError(f"tensor-parallel size {world_size} exceeds the model's MLP columns or vocabulary")
    heads = _cut_heads(config, world_size)
    mlp = _cut_mlp(config, heads, world_size)
    vocab = cut_evenly(config.vocab_size, world_size)
    experts = _cut_experts(config.mixture, world_size)
    return [Shard(q, kv, mlp[rank], vocab[rank], *experts[rank]) for rank, (q, kv) in enumerate(heads)]


def cut_evenly(total: int, parts: int) -> list[Span]:
    """Splits [0, total) into sizes that differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    spans, start = [], 0
    for index in range(parts):
        stop = start + base + (index < extra)
        spans.append(Span(start, stop))
        start = stop
    return spans


def _cut_heads(config: ModelConfig, world_size: int) -> list[tuple[Span, Span]]:
    kv_heads = config.num_kv_heads
    group = config.num_heads // kv_heads
    if world_size <= kv_heads:
        return [(Span(kv.start * group, kv.stop * group), kv) for kv in cut_evenly(kv_heads, world_size)]
    cuts = []
    for head, ranks in enumerate(cut_evenly(world_size, kv_heads)):
        if ranks.size > group:
            raise ModelError(
                f"tensor-parallel size {world_size} would split the {group} query heads of one KV head over {ranks.size} ranks"
            )
        for part in cut_evenly(group, ranks.size):
            cuts.append((Span(head * group + part.start, head * group + part.stop), Span(head, head + 1)))
    return cuts


def _cut_experts(mixture: Mixture | None, world_size: int) -> list[tuple[Span, Span]]:
    """Returns the experts of each rank and their columns."""
    if mixture is None:
        return [(Span(0, 0), Span(0, 0))] * world_size
    size = mixture.intermediate_size
    if mixture.is_parallel:
        return [(experts, Span(0, size)) for experts in cut_evenly(mixture.num_experts, world_size)]
    if world_size > size:
        raise ModelError(f"tensor-parallel size {world_size} exceeds the {size} columns of an expert")
    unit = MLP_UNIT if size % MLP_UNIT == 0 and size >= MLP_UNIT * world_size else 1
    spans = cut_evenly(size // unit, world_size)
    return [(Span(0, mixture.num_experts), Span(span.start * unit, span.stop * unit)) for span in spans]


def _cut_mlp(config: ModelConfig, heads: list[tuple[Span, Span]], world_size: int) -> list[Span]:
    """Balances attention: a column has 3 weights per hidden unit, a head 2 * dim."""
    unit = MLP_UNIT if config.intermediate_size % MLP_UNIT == 0 and config.intermediate_size >= MLP_UNIT * world_size else 1
    attention = [(q.size + kv.size) * 2 * config.head_dim / 3 for q, kv in heads]
    total = sum(attention) + config.intermediate_size
    remaining = config.intermediate_size // unit
    spans, start = [], 0
    for rank in range(world_size):
        others = world_size - rank - 1
        balanced = round((total / world_size - attention[rank]) / unit)
        size = remaining if others == 0 else min(max(balanced, 1), remaining - others)
        spans.append(Span(start * unit, (start + size) * unit))
        start, remaining = start + size, remaining - size
    return spans
