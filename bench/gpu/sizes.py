"""Models and sizes that `bench.gpu` measures: those of the bounds, and tiny ones that a CPU computes in the interpreter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx_api.roofline import ModelShape, shape_of

Config = Mapping[str, Any]
"""Fields of a config.json."""
CACHE_BYTES = 256 << 20
"""Of weights or pages that alternate: several times the cache of an H100."""

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_600M: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
LLAMA_135M: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def _tiny(config: Config) -> Config:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {**config, **sizes, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. The defaults are those of the bounds."""

    is_bounded: bool = True
    """Whether figures have bounds."""
    dtype: torch.dtype = torch.bfloat16
    large: Config = field(default_factory=lambda: LLAMA_8B)
    small: Config = field(default_factory=lambda: QWEN3_600M)
    served: Config = field(default_factory=lambda: QWEN3_600M)
    """Of the trace."""
    fast: Config = field(default_factory=lambda: LLAMA_135M)
    """Of the load of many short requests."""
    copy_bytes: int = 4 << 30
    matmul_size: int = 8192
    page: int = 16
    batches: tuple[int, ...] = (1, 64, 256)
    compared_batch: int = 64
    """Batch of graphs compared with eager steps, and of kernels."""
    compares_large: bool = True
    """Whether the large model's graphs are compared too."""
    context: int = 512
    decode_steps: int = 64
    warm_steps: int = 4
    """Steps of all requests before the measured ones."""
    replays: int = 20
    """Of a captured step."""
    profiled_steps: int = 8
    """0: without the profiler."""
    kv_batch: int = 16
    kv_contexts: tuple[int, ...] = (2_000, 16_000)
    """Of decodes over pages of each KV dtype."""
    prefill: int = 2048
    prefills: int = 4
    step_tokens: int = 8192
    generated: int = 32
    """Tokens that `transformers` generates."""
    max_num_seqs: int = 256
    """Of the served models."""
    served_kv_bytes: int = 32 << 30
    trace_requests: int = 384
    max_prompt: int = 4096
    """Longer prompts of the trace are cut."""
    rate: float = 1000.0
    """Short requests per second."""
    load_s: float = 10.0
    clients: int = 8
    routers: int = 4

    def bound(self, value: float) -> float | None:
        """Returns the bound, if these sizes have bounds."""
        return value if self.is_bounded else None

    @property
    def large_shape(self) -> ModelShape:
        """Shape of the large model."""
        return shape_of(self.large)


TINY = Sizes(
    is_bounded=False,
    dtype=torch.float32,
    large=_tiny(LLAMA_8B),
    small=_tiny(QWEN3_600M),
    served=_tiny(QWEN3_600M),
    fast=_tiny(LLAMA_135M),
    copy_bytes=1 << 16,
    matmul_size=64,
    batches=(2,),
    compared_batch=2,
    compares_large=False,
    context=9,
    decode_steps=2,
    warm_steps=0,
    replays=1,
    profiled_steps=0,
    kv_batch=2,
    kv_contexts=(20,),
    prefill=24,
    prefills=1,
    step_tokens=64,
    generated=2,
    max_num_seqs=4,
    served_kv_bytes=4 << 20,
    trace_requests=4,
    max_prompt=40,
    rate=20.0,
    load_s=1.0,
    clients=1,
    routers=1,
)
