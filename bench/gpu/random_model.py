"""Models of random weights: a fused decoder made on its device without a file, and a folder that a server loads."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.sizes import Config, Sizes
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.layers import DecoderOps, HeadNorm, VocabEmbedding
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from phalanx_runtime.model.partition import WHOLE, partition
from phalanx_runtime.model.rope import RopeTable
from phalanx_runtime.rank.memory.kv_cache import make_caches

STD = 0.02
PLAIN = Kernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and its pages."""

    decoder: Decoder
    caches: list[LayerCache]
    pool: PoolShape
    dtype: torch.dtype
    device: torch.device


def load_random(config: Config, num_tokens: int, device: torch.device, sizes: Sizes, kv_cache_dtype: str = "auto") -> LoadedModel:
    """Makes a model with pages for `num_tokens`, of which the content is random too: zeros take less power to read."""
    decoder = make_decoder(parse_config(dict(config)), sizes.dtype, device)
    num_pages = -(-num_tokens // sizes.page)
    format = choose_format(kv_cache_dtype, decoder.kv.head_dims)
    caches = make_caches(decoder.kv, num_pages, sizes.page, sizes.dtype, device, format=format)
    fill(caches)
    return LoadedModel(decoder=decoder, caches=caches, pool=PoolShape(num_pages, sizes.page), dtype=sizes.dtype, device=device)


def fill(caches: Sequence[LayerCache]) -> None:
    """Writes random numbers to pages, or random codes with small scales."""
    for cache in caches:
        for part in (cache.k, cache.v):
            part.normal_() if cache.format is None else part.random_(0, 120)
        for scales in cache.tensors[2:]:
            scales.fill_(0.01)


@torch.no_grad()
def make_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Returns a decoder with the Triton kernels; on a CPU Triton's interpreter runs them."""
    from phalanx_runtime.model.attention.gpu import open_gpu_attention  # imports Triton
    from phalanx_runtime.model.decoder.gpu import TritonOps
    from phalanx_runtime.model.linear.single_row import TritonRowLinears

    collective, ops = SoloCollective(), TritonOps()
    ropes = {
        rope: RopeTable(rope, config.head_dim, config.max_position, dtype, device)
        for rope in set(config.ropes)
        if rope is not None
    }
    shard = partition(config, 1)[0]
    decoder = Decoder(config, shard, collective, ropes=ropes, attention=open_gpu_attention(False), ops=ops, stage=WHOLE)
    decoder.row_linears = TritonRowLinears()
    noise = _Noise(dtype, device)
    decoder.layers = [_layer(config, index, noise, ops) for index in range(config.num_layers)]
    table = noise(config.vocab_size, config.hidden_size)
    decoder.embedding = VocabEmbedding(table, shard.vocab, collective)
    decoder.norm = noise.ones(config.hidden_size)
    decoder.head = make_linear(table if config.tied else noise(config.vocab_size, config.hidden_size), None, PLAIN)
    return decoder


class _Noise:
    """Makes weights."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._chance = torch.Generator(device).manual_seed(20261125)

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0, STD, generator=self._chance)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self._dtype, device=self._device)


def _layer(config: ModelConfig, index: int, noise: _Noise, ops: DecoderOps) -> Layer:
    hidden, dim, heads = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
    has_norm = config.qk_norm == "head"
    return Layer(
        attention_in=noise.ones(hidden),
        qkv=make_linear(noise(heads + 2 * config.num_kv_heads * dim, hidden), None, PLAIN),
        qk_norm=HeadNorm(noise.ones(dim), noise.ones(dim), config.rms_norm_eps) if has_norm else None,
        rope=config.ropes[index],
        params=AttentionParams(config.windows[index], config.scale, config.softcap),
        o=make_linear(noise(hidden, heads), None, PLAIN),
        attention_out=None,
        mlp_in=noise.ones(hidden),
        gate_up=make_gated(noise(2 * config.intermediate_size, hidden), None, config.activation, PLAIN, ops.gate),
        down=make_linear(noise(hidden, config.intermediate_size), None, PLAIN),
        mlp_out=None,
    )


def weights(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor of a checkpoint in Llama's or Qwen3's shape."""
    parsed = parse_config(dict(config))
    hidden, dim, inner = parsed.hidden_size, parsed.head_dim, parsed.intermediate_size
    q, kv = parsed.num_heads * dim, parsed.num_kv_heads * dim
    yield "model.embed_tokens.weight", (parsed.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not parsed.tied:
        yield "lm_head.weight", (parsed.vocab_size, hidden)
    for layer in range(parsed.num_layers):
        name = f"model.layers.{layer}."
        for part, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            yield f"{name}self_attn.{part}_proj.weight", shape
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{name}mlp.{part}_proj.weight", shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", (hidden,)
        for norm in ("q_norm", "k_norm") if parsed.qk_norm == "head" else ():
            yield f"{name}self_attn.{norm}.weight", (dim,)


@torch.no_grad()
def write_checkpoint(folder: Path, config: Config, dtype: torch.dtype, device: torch.device) -> Path:
    """Writes a random checkpoint with a tokenizer whose every token has a printable text. Numbers are drawn on the device."""
    from safetensors.torch import save_file

    from bench.peers.checkpoint import save_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    noise = _Noise(dtype, device)
    tensors = {name: (noise(*shape) if len(shape) > 1 else noise.ones(*shape)).cpu() for name, shape in weights(config)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**config, **ends, "torch_dtype": str(dtype).removeprefix("torch.")}))
    (folder / "generation_config.json").write_text(json.dumps(ends))
    save_tokenizer(folder, int(config["vocab_size"]))
    return folder
