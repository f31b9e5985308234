"""Shapes of published models, whose kernels images contain for each size of tensor parallelism that divides them."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.partition import Shard, partition

WORLD_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class CommonShape:
    """What kernels depend on in config.json."""

    architecture: str
    widths: tuple[int, int]
    """Of hidden states and of the MLP."""
    heads: tuple[int, int, int]
    """Query heads, KV heads, and their dimension."""
    vocab_size: int
    sliding_window: int | None = None

    def config(self) -> ModelConfig:
        """Returns the parsed config; with a layer of each kind of window."""
        (hidden, inner), (heads, kv_heads, dim) = self.widths, self.heads
        return parse_config(
            {
                "architectures": [self.architecture],
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": 6,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": dim,
                "vocab_size": self.vocab_size,
                "sliding_window": self.sliding_window,
                "max_position_embeddings": 8192,
            }
        )

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yields number of ranks and part of each rank."""
        config = self.config()
        for world_size in WORLD_SIZES:
            try:
                yield from ((world_size, shard) for shard in partition(config, world_size))
            except ModelError:  # more ranks than heads
                return


SHAPES: dict[str, CommonShape] = {
    "SmolLM2 135M": CommonShape("LlamaForCausalLM", (576, 1536), (9, 3, 64), 49152),
    "SmolLM2 1.7B": CommonShape("LlamaForCausalLM", (2048, 8192), (32, 32, 64), 49152),
    "Llama 3.2 1B": CommonShape("LlamaForCausalLM", (2048, 8192), (32, 8, 64), 128256),
    "Llama 3.2 3B": CommonShape("LlamaForCausalLM", (3072, 8192), (24, 8, 128), 128256),
    "Llama 3.1 8B": CommonShape("LlamaForCausalLM", (4096, 14336), (32, 8, 128), 128256),
    "Llama 3.3 70B": CommonShape("LlamaForCausalLM", (8192, 28672), (64, 8, 128), 128256),
    "Mistral 7B v0.3": CommonShape("MistralForCausalLM", (4096, 14336), (32, 8, 128), 32768),
    "Qwen2.5 0.5B": CommonShape("Qwen2ForCausalLM", (896, 4864), (14, 2, 64), 151936),
    "Qwen2.5 1.5B": CommonShape("Qwen2ForCausalLM", (1536, 8960), (12, 2, 128), 151936),
    "Qwen2.5 7B": CommonShape("Qwen2ForCausalLM", (3584, 18944), (28, 4, 128), 152064),
    "Qwen2.5 32B": CommonShape("Qwen2ForCausalLM", (5120, 27648), (40, 8, 128), 152064),
    "Qwen3 0.6B": CommonShape("Qwen3ForCausalLM", (1024, 3072), (16, 8, 128), 151936),
    "Qwen3 8B": CommonShape("Qwen3ForCausalLM", (4096, 12288), (32, 8, 128), 151936),
    "Qwen3 32B": CommonShape("Qwen3ForCausalLM", (5120, 25600), (64, 8, 128), 151936),
    "Phi-3 mini": CommonShape("Phi3ForCausalLM", (3072, 8192), (32, 32, 96), 32064, 2047),
    "OLMo 2 7B": CommonShape("Olmo2ForCausalLM", (4096, 11008), (32, 32, 128), 100352),
    "Gemma 2 2B": CommonShape("Gemma2ForCausalLM", (2304, 9216), (8, 4, 256), 256000, 4096),
    "Gemma 2 9B": CommonShape("Gemma2ForCausalLM", (3584, 14336), (16, 8, 256), 256000, 4096),
    "Gemma 3 1B": CommonShape("Gemma3ForCausalLM", (1152, 6912), (4, 1, 256), 262144, 512),
}
"""By name."""
