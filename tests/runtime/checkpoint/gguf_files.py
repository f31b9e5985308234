"""Small GGUF files with random weights, in the format of llama.cpp's converter."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from tests.runtime.tiny import WINDOW

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = 16
Array = npt.NDArray[np.float32]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: three special tokens, 256 bytes, then a token for each merge."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "Ġ 1", "Ġ hello", "e r"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<s>", "</s>", "<think>", *alphabet, *(merge.replace(" ", "") for merge in merges)], merges


@dataclass
class TinyGguf:
    """Content of the file. `drop`: metadata keys to omit."""

    architecture: str = "llama"
    pre: str = "smollm"
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32
    tied: bool = True
    add_bos: bool = False
    add_eos: bool = False
    extra: dict[str, object] = field(default_factory=dict)
    drop: set[str] = field(default_factory=set)
    extra_tensors: dict[str, Array] = field(default_factory=dict)
    content: dict[str, npt.NDArray[Any]] | None = None
    """All tensors, in place of random ones: numbers, or bytes of `quantization`."""
    formats: dict[str, GGMLQuantizationType] = field(default_factory=dict)
    """Of tensors that have another one."""

    def metadata(self) -> dict[str, object]:
        tokens, merges = vocabulary()
        arch = self.architecture
        values: dict[str, object] = {
            "general.name": "tiny",
            f"{arch}.block_count": LAYERS,
            f"{arch}.context_length": 128,
            f"{arch}.embedding_length": HIDDEN,
            f"{arch}.feed_forward_length": INNER,
            f"{arch}.attention.head_count": HEADS,
            f"{arch}.attention.head_count_kv": KV_HEADS,
            f"{arch}.attention.key_length": HEAD_DIM,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.freq_base": 500000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": self.add_bos,
            "tokenizer.ggml.add_eos_token": self.add_eos,
            "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        }
        return {key: value for key, value in (values | self.extra).items() if key not in self.drop}

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        if self.content is not None:
            return self.content
        random = np.random.default_rng(0)

        def weights(*shape: int) -> Array:
            return random.standard_normal(shape, dtype=np.float32)

        tensors = {"token_embd.weight": weights(len(vocabulary()[0]), HIDDEN), "output_norm.weight": weights(HIDDEN)}
        if not self.tied:
            tensors["output.weight"] = weights(len(vocabulary()[0]), HIDDEN)
        for layer in range(LAYERS):
            shapes = {
                "attn_norm.weight": (HIDDEN,),
                "ffn_norm.weight": (HIDDEN,),
                "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_gate.weight": (INNER, HIDDEN),
                "ffn_up.weight": (INNER, HIDDEN),
                "ffn_down.weight": (HIDDEN, INNER),
            }
            if self.architecture == "qwen2":
                shapes |= {"attn_q.bias": (HEADS * HEAD_DIM,), "attn_k.bias": (32,), "attn_v.bias": (32,)}
            if self.architecture == "qwen3":
                shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
            tensors |= {f"blk.{layer}.{name}": weights(*shape) for name, shape in shapes.items()}
        return tensors | self.extra_tensors

    def write(self, path: Path) -> Path:
        """Writes the file; returns `path`."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata().items():
            _add(writer, key, value)
        for name, values in self.tensors().items():
            kind = self.formats.get(name, self.quantization) if values.ndim >= 2 else GGMLQuantizationType.F32
            is_packed = values.dtype == np.uint8
            writer.add_tensor(name, values if is_packed else quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


Kind = GGMLQuantizationType
K_QUANTS: dict[Kind, dict[int, float]] = {
    Kind.Q4_K: {0: 5e-4, 2: 7.5 * 5e-4},
    Kind.Q5_K: {0: 2e-4, 2: 15.5 * 2e-4},
    Kind.Q6_K: {208: 1e-4},
    Kind.Q2_K: {80: 1e-2, 82: 1.5e-2},
    Kind.Q3_K: {108: 2e-3},
}
SCALES = K_QUANTS | {
    Kind.Q4_0: {0: 1e-2},
    Kind.Q4_1: {0: 1e-2, 2: -7.5e-2},
    Kind.Q5_0: {0: 5e-3},
    Kind.Q5_1: {0: 5e-3, 2: -7.5e-2},
    Kind.Q8_0: {0: 1e-3},
}
"""Where a block has scales in fp16, and values of these for which random codes give weights around 0."""
TABLES: dict[Kind, dict[int, float]] = {Kind.IQ4_NL: {0: 3e-4}, Kind.IQ4_XS: {0: 2e-5}, Kind.MXFP4: {}}
"""As above: formats whose codes are places in a table. The scales of MXFP4 are exponents."""


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    """Returns bytes of any codes, with scales that give weights of common sizes."""
    (rows, columns), (size, num_bytes) = shape, GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
    for at, scale in (SCALES | TABLES)[kind].items():
        drawn = random.uniform(0.9, 1.1, (rows, columns // size, 1)) * scale
        blocks[:, :, at : at + 2] = drawn.astype(np.float16).view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, :, 0] = random.integers(118, 121, (rows, columns // size), np.uint8)
    return blocks.reshape(rows, -1)


VOCABULARY = 320
"""More rows than the file has tokens: those of the prompts of tests."""
SIZES = {"embedding_length": 512, "feed_forward_length": 1024, "attention.key_length": 128, "rope.dimension_count": 128}
SHAPES = {
    "attn_q": (512, 512), "attn_k": (256, 512), "attn_v": (256, 512), "attn_output": (512, 512),
    "ffn_gate": (1024, 512), "ffn_up": (1024, 512), "ffn_down": (512, 1024),
}  # fmt: skip


def write_model(path: Path, kinds: dict[str, Kind], kind: Kind, *, tied: bool = True) -> Path:
    """Writes a llama of two layers whose matrices have these formats by name, or `kind`."""
    shapes = {"token_embd": (VOCABULARY, 512)} | ({} if tied else {"output": (VOCABULARY, 512)})
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()}
    content: dict[str, Any] = {"output_norm.weight": np.ones(512, np.float32)}
    for layer in range(2):
        content |= {f"blk.{layer}.{name}.weight": np.ones(512, np.float32) for name in ("attn_norm", "ffn_norm")}
    formats: dict[str, Kind] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        own = kinds.get(name.rsplit(".", 1)[-1], kind)
        content[f"{name}.weight"], formats[f"{name}.weight"] = random_blocks(own, shape, seed), own
    extra: dict[str, object] = {f"llama.{key}": value for key, value in SIZES.items()}
    return TinyGguf(quantization=kind, extra=extra, content=content, formats=formats).write(path)


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
OSS = {
    "expert_count": 4, "expert_used_count": 2, "attention.sliding_window": WINDOW, "rope.freq_base": 150000.0,
    "block_count": 3, "context_length": 256, **{f"rope.scaling.{key}": value for key, value in YARN.items()},
}  # fmt: skip
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def write_gpt_oss(source: Path, exact: Path, path: Path, kind: Kind = Kind.MXFP4, *, up: Kind | None = None) -> Path:
    """Writes the checkpoint as llama.cpp's converter does, its experts of random codes, and its numbers to `exact`."""
    content: dict[str, Array] = {}
    formats: dict[str, Kind] = {}
    kept: dict[str, torch.Tensor] = {}

    def experts(name: str, shape: tuple[int, ...], own: Kind) -> Array:
        """Returns numbers [experts, out, in] of random codes."""
        raw = [random_blocks(own, shape[1:], seed=len(content) + number) for number in range(shape[0])]
        content[name], formats[name] = np.stack(raw), own
        return np.stack([dequantize(one, own) for one in raw])

    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        values = tensor.numpy()
        stem, block = name.rpartition(".")[0], name.replace("model.layers.", "blk.").partition(".mlp")[0]
        match name.rpartition(".")[2]:
            case "gate_up_proj":
                count, inputs, outputs = values.shape
                shape = (count, outputs // 2, inputs)
                gate = experts(f"{block}.ffn_gate_exps.weight", shape, kind)
                values = np.stack((gate, experts(f"{block}.ffn_up_exps.weight", shape, up or kind)), 2)
                values = values.reshape(count, outputs, inputs).swapaxes(1, 2)
            case "down_proj":
                shape = (len(values), *values.shape[:0:-1])
                values = experts(f"{block}.ffn_down_exps.weight", shape, kind).swapaxes(1, 2)
            case "gate_up_proj_bias":
                content[f"{block}.ffn_gate_exps.bias"], content[f"{block}.ffn_up_exps.bias"] = values[:, ::2], values[:, 1::2]
            case "down_proj_bias":
                content[f"{block}.ffn_down_exps.bias"] = values
            case "sinks":
                content[f"{name.replace('model.layers.', 'blk.').partition('.self')[0]}.attn_sinks.weight"] = values
            case suffix if name.startswith("model.layers."):
                layer, _, part = stem.removeprefix("model.layers.").partition(".")
                content[f"blk.{layer}.{PARTS[part]}.{suffix}"] = values
            case _:
                roots = {"lm_head": "output", "model.embed_tokens": "token_embd", "model.norm": "output_norm"}
                content[f"{roots[stem]}.weight"] = values
        kept[name] = torch.from_numpy(np.ascontiguousarray(values))
    shutil.copytree(source, exact)
    save_file(kept, exact / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    sizes = {"feed_forward_length": inner, "expert_feed_forward_length": inner, "embedding_length": hidden}
    extra: dict[str, object] = {f"gpt-oss.{key}": value for key, value in {**OSS, **sizes}.items()}
    stored = {name: np.ascontiguousarray(values) for name, values in content.items()}
    return TinyGguf("gpt-oss", pre="gpt-4o", extra=extra, content=stored, formats=formats).write(path)
