"""Decoders in the shape of published models with fewer layers, without memory."""

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.model.adapters.load import ModelAdapters
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.paged import AttentionParams
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.decoder.load import choose_ops
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.sparse import ExpertWeights, Routing, SparseMlp
from phalanx_runtime.model.layers import HeadNorm, VocabEmbedding
from phalanx_runtime.model.linear.linear import Gated, Linear
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from phalanx_runtime.model.mixture import Mixture
from phalanx_runtime.model.partition import WHOLE, Shard, Stage, partition
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.rope import RopeTable

ALONE = SoloCollective()
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
POSITIONS = 8192
NUM_LAYERS = 4
"""Every layer of a model launches the same kernels; of GPT-OSS, every other one has a window."""
LLAMA_8B = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
)
QWEN3_600M = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }
)
QWEN3_30B = parse_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    }
)
GPT_OSS_20B = parse_config(
    {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    }
)


def make_decoder(config: ModelConfig, peers: Collective = ALONE, stage: Stage = WHOLE, max_loras: int = 0) -> Decoder:
    """Returns a rank of a decoder with empty weights on a GPU, with slots for adapters; within a `FakeTensorMode`."""
    ropes = {rope: RopeTable(rope, config.head_dim, POSITIONS, DTYPE, DEVICE) for rope in set(config.ropes) if rope is not None}
    layers = stage.layers(config.num_layers)
    shard = partition(config, peers.world_size)[peers.rank]
    decoder = Decoder(config, shard, peers, ropes=ropes, attention=TritonAttention(), ops=choose_ops(DEVICE), stage=stage)
    decoder.layers = [_layer(config, shard, index) for index in range(layers.start, layers.stop)]
    table = _empty(shard.vocab.size, config.hidden_size)
    decoder.embedding = VocabEmbedding(table, shard.vocab, peers)
    decoder.norm = _empty(config.hidden_size)
    decoder.head = make_linear(table if config.tied else _empty(shard.vocab.size, config.hidden_size), None, Kernels())
    if max_loras:
        options = LoadOptions(
            dtype=DTYPE,
            device=DEVICE,
            kernels=Kernels(triton=True),
            positions=POSITIONS,
            max_loras=max_loras,
            max_lora_rank=16,
        )
        decoder.adapters = ModelAdapters(config, shard, layers, options)
    return decoder


def _layer(config: ModelConfig, shard: Shard, index: int) -> Layer:
    hidden, dim = config.hidden_size, config.head_dim
    heads = shard.heads.size * dim
    norm = config.qk_norm == "head"
    return Layer(
        attention_in=_empty(hidden),
        qkv=_linear(heads + 2 * shard.kv_heads.size * dim, hidden),
        qk_norm=HeadNorm(_empty(dim), _empty(dim), config.rms_norm_eps) if norm else None,
        rope=config.ropes[index],
        params=AttentionParams(
            config.windows[index], config.scale, config.softcap, _empty(shard.heads.size) if config.has_sinks else None
        ),
        o=_linear(hidden, heads),
        attention_out=None,
        mlp_in=_empty(hidden),
        gate_up=None if config.mixture is not None else _gate_up(config, shard),
        down=_linear(hidden, shard.mlp.size) if config.mixture is None else _experts(config, config.mixture, shard),
        mlp_out=None,
    )


def _gate_up(config: ModelConfig, shard: Shard) -> Gated:
    weight = _empty(2 * shard.mlp.size, config.hidden_size)
    return make_gated(weight, None, config.activation, Kernels(), choose_ops(DEVICE).gate)


def _experts(config: ModelConfig, mixture: Mixture, shard: Shard) -> SparseMlp:
    count, hidden, inner = shard.experts.size, config.hidden_size, shard.expert_mlp.size
    has_bias = mixture.tensors.has_bias
    weights = ExpertWeights(
        gate_up=_empty(count, 2 * inner, hidden),
        down=_empty(count, hidden, inner),
        gate_up_bias=_empty(count, 2 * inner) if has_bias else None,
        down_bias=_empty(count, hidden) if has_bias else None,
    )
    routing = Routing(per_token=mixture.per_token, norm_topk_prob=mixture.norm_topk_prob)
    return SparseMlp(_linear(mixture.num_experts, hidden), GroupedExperts(weights, shard.experts, routing, config.activation))


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE)


def _linear(rows: int, columns: int) -> Linear:
    return make_linear(_empty(rows, columns), None, Kernels())
