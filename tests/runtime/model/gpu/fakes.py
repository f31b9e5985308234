"""A decoder of any shape and its steps, on fake tensors of a GPU: within `FakeTensorMode(allow_non_fake_inputs=True)`."""

from typing import Any

import torch

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.feedback import Feedback, KvRounding
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.paged import AttentionParams, StepBatch
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.decoder.load import NORM_NAMES
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.sparse import ExpertWeights, Routing, SparseMlp
from phalanx_runtime.model.layers import HeadNorm
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.single_row import TritonRowLinears
from phalanx_runtime.model.mixture import Mixture
from phalanx_runtime.model.partition import Shard, Stage, partition
from phalanx_runtime.model.rope import RopeTable
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE = 16


class FakeRanks:
    """Rank 0 of a collective whose sums launch nothing."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def fake_rounding(kv_heads: int, dim: int) -> KvRounding:
    """Returns the calibration of a layer."""
    kinds = (((dim,), torch.float32), ((dim,), torch.int64), ((dim, dim), torch.float32), ((dim,), torch.float32))
    keys, values = (Feedback(*(empty(kv_heads, *shape, dtype=dtype) for shape, dtype in kinds)) for _ in range(2))
    return KvRounding(keys, values)


def fake_experts(config: ModelConfig, mixture: Mixture, shard: Shard) -> SparseMlp:
    span, inner, hidden = shard.experts, shard.expert_mlp.size, config.hidden_size
    weights = ExpertWeights(gate_up=empty(span.size, 2 * inner, hidden), down=empty(span.size, hidden, inner))
    routing = Routing(per_token=mixture.per_token, norm_topk_prob=mixture.norm_topk_prob)
    router = DenseLinear(empty(mixture.num_experts, hidden), None)
    return SparseMlp(router, GroupedExperts(weights, span, routing, config.activation))


def fake_layer(config: ModelConfig, shard: Shard, index: int) -> Layer:
    hidden, dim = config.hidden_size, config.head_dim
    heads = shard.heads.size * dim
    projected = heads + 2 * shard.kv_heads.size * dim
    mixture = config.mixture
    gate_up = DenseLinear(empty(2 * shard.mlp.size, hidden), None)
    weight = torch.float32 if config.norm_offset else DTYPE  # as `load` adds the offset
    norms = [None if name is None else empty(hidden, dtype=weight) for name in NORM_NAMES[config.norms]]
    return Layer(
        attention_in=norms[0],
        qkv=DenseLinear(empty(projected, hidden), empty(projected) if config.qkv_bias else None),
        qk_norm=HeadNorm(empty(dim, dtype=weight), empty(dim, dtype=weight), 1e-6) if config.qk_norm == "head" else None,
        rope=config.ropes[index],
        params=AttentionParams(config.windows[index], config.scale, config.softcap),
        o=DenseLinear(empty(hidden, heads), None),
        attention_out=norms[1],
        mlp_in=norms[2],
        gate_up=PlainGated(gate_up, config.activation, TritonOps().gate) if mixture is None else None,
        down=DenseLinear(empty(hidden, shard.mlp.size), None) if mixture is None else fake_experts(config, mixture, shard),
        mlp_out=norms[3],
    )


def fake_decoder(config: ModelConfig, world_size: int = 1) -> Decoder:
    """Rank 0 of a decoder without embedding."""
    shard = partition(config, world_size)[0]
    ropes = {
        rope: RopeTable(rope, config.head_dim, config.max_position, DTYPE, CUDA) for rope in set(config.ropes) if rope is not None
    }
    collective: Any = FakeRanks(world_size)
    decoder = Decoder(
        config, shard, collective=collective, ropes=ropes, attention=TritonAttention(), ops=TritonOps(), stage=Stage(1, 3)
    )
    decoder.row_linears = TritonRowLinears()
    decoder.head = DenseLinear(empty(shard.vocab.size, config.hidden_size), None)
    decoder.layers = [fake_layer(config, shard, index) for index in range(config.num_layers)]
    return decoder


def fake_batch(runs: list[tuple[int, int]], kv_heads: int) -> StepBatch:
    """`runs`: tokens of each request before the step and in it."""
    pages = [list(range(-(-(before + count) // PAGE))) for before, count in runs]
    plan = StepPlan(
        step=1,
        admitted=[NewRow(row, wire.Sampling(max_tokens=1, seed=0)) for row in range(len(runs))],
        rows=list(range(len(runs))),
        starts=[before for before, _ in runs],
        counts=[count for _, count in runs],
        pages=pages,
        tokens=[0] * sum(count for _, count in runs),
        draws=[],
    )
    return BatchBuilder(CacheShape(PAGE, kv_heads, 1 << 10), DTYPE, CUDA).build(plan)
