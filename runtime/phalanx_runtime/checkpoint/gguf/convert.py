"""Converts a GGUF file to a model folder: fp32 safetensors, config.json, tokenizer.json, tokenizer_config.json.

Tensors are bitwise equal to those that transformers loads. llama.cpp interleaves query and key rows of Llama models: its row
(head, i, half) becomes row (head, half, i).
"""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from phalanx_runtime.checkpoint.folder import make_once, remove_lock
from phalanx_runtime.checkpoint.gguf.file import GgufFile, GgufTensor, read_gguf
from phalanx_runtime.checkpoint.gguf.tokenizer import read_tokenizer, tokenizer_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import ProgressBar

# Rotary embedding. GGUF stores Llama 3's scaling as a divisor per frequency (tensor rope_freqs). All Llama 3 models share the
# other parameters, so the factor is the largest divisor. Source: Llama 3.1's apply_scaling and llama.cpp's converter.

ROPE_DIVISORS = "rope_freqs.weight"
_DEFAULT_THETA = 10000.0
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def rope_parameters(file: GgufFile, architecture: str) -> dict[str, object]:
    """Returns `rope_parameters` of config.json. Raises ModelError for an unsupported scaling."""
    theta = file.positive(f"{architecture}.rope.freq_base", _DEFAULT_THETA)
    divisors = next((tensor.float32() for tensor in file.tensors if tensor.name == ROPE_DIVISORS), None)
    kind = file.text(f"{architecture}.rope.scaling.type")
    if kind in (None, "none"):
        plain: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
        return plain if divisors is None else _llama3(file, theta, divisors)
    if kind == "linear" and divisors is None:
        factor = file.positive(f"{architecture}.rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise ModelError(
        f"{file.path}: {architecture}.rope.scaling.type {kind!r} cannot be converted; use the safetensors checkpoint"
    )


def _llama3(file: GgufFile, theta: float, divisors: npt.NDArray[np.float32]) -> dict[str, object]:
    factor = float(divisors.max(initial=1.0))
    if not divisors.size or not np.allclose(divisors, llama3_divisors(theta, len(divisors), factor), rtol=1e-4):
        raise ModelError(f"{file.path}: {ROPE_DIVISORS} is not Llama 3's scaling; use the safetensors checkpoint")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }


def llama3_divisors(theta: float, num_frequencies: int, factor: float) -> npt.NDArray[np.float64]:
    """Returns a divisor per frequency: 1 for short wavelengths, `factor` for long ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(num_frequencies) / num_frequencies)
    share = (_ORIGINAL_POSITIONS / wavelengths - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    unscaled = np.clip(share, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - unscaled) / factor + unscaled)
    return divisors


CONVERTER_VERSION = 2
"""Part of cache keys; increment when the output for the same GGUF file changes."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def convert(gguf: Path, out: Path, bar: ProgressBar | None = None) -> None:
    """Writes the model folder `out` atomically. Needs memory for the largest tensor.

    Raises ModelError, also if `out` exists and is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ModelError(f"{out} exists already: give the folder another name or remove it")
    if out.is_dir():
        out.rmdir()
    convert_once(gguf, out, bar=bar)
    remove_lock(out)


def convert_once(gguf: Path, out: Path, stop: threading.Event | None = None, bar: ProgressBar | None = None) -> Path:
    """Returns `out`, converted if absent. Setting `stop` aborts. `bar` receives the bytes written. Raises ModelError."""
    stop = stop or threading.Event()

    def make(part: Path) -> None:
        try:
            _write_folder(read_gguf(gguf), part, stop, bar)
        except ModelError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise error if str(gguf) in str(error) else ModelError(f"{gguf}: {error}") from error
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    return make_once(out, make, stop)


def _write_folder(file: GgufFile, folder: Path, stop: threading.Event, bar: ProgressBar | None) -> None:
    config = model_config(file)
    heads = {part: config[name] for part, name in _INTERLEAVED.items()} if config["model_type"] == "llama" else {}
    read_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    _write_json(folder / "generation_config.json", _special_ids(file))
    _write_json(folder / "config.json", config)
    with open(folder / "model.safetensors", "wb") as out:
        tensors = [_renamed(file, tensor) for tensor in file.tensors if tensor.name != ROPE_DIVISORS]
        _write_safetensors(out, tensors, heads, stop, bar)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(file: GgufFile) -> dict[str, object]:
    """Returns the content of config.json. Raises ModelError where no exact conversion exists."""
    architecture = file.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {architecture!r} cannot be converted, only {', '.join(_ARCHITECTURES)}")
    if (file.number("split.count") or 1) > 1:
        raise ModelError(f"{file.path} is one part of a split GGUF file: join the parts first")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    rope = rope_parameters(file, architecture)
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "rms_norm_eps": file.positive(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
    }
    return config | _sizes(file, architecture) | _special_ids(file)


def _sizes(file: GgufFile, architecture: str) -> dict[str, object]:
    def size(key: str) -> int:
        value = _required(file, f"{architecture}.{key}")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{file.path}: {architecture}.{key} must be a positive integer, it is {value!r:.40}")
        return value

    heads, hidden = size("attention.head_count"), size("embedding_length")
    kv_heads = file.number(f"{architecture}.attention.head_count_kv")
    return {
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "max_position_embeddings": size("context_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "num_hidden_layers": size("block_count"),
        "head_dim": file.number(f"{architecture}.attention.key_length") or hidden // heads,
    }


def _special_ids(file: GgufFile) -> dict[str, object]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.number(f"tokenizer.ggml.{gguf_name}_token_id") for name, gguf_name in names.items()}
    return {name: index for name, index in ids.items() if index is not None}


def _required(file: GgufFile, key: str) -> object:
    if key not in file.metadata:
        raise ModelError(f"{file.path} has no {key}")
    return file.metadata[key]


def _renamed(file: GgufFile, tensor: GgufTensor) -> tuple[str, GgufTensor]:
    """Returns checkpoint name and tensor. Raises ModelError for an unknown tensor."""
    match tensor.name.split("."):
        case [root, kind] if root in _ROOTS:
            return f"{_ROOTS[root]}.{kind}", tensor
        case ["blk", layer, part, kind] if part in _LAYER_PARTS:
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{kind}", tensor
    raise ModelError(f"{file.path}: tensor {tensor.name} belongs to no model that can be converted")


def _write_safetensors(
    out: BinaryIO, tensors: list[tuple[str, GgufTensor]], heads: dict[str, object], stop: threading.Event, bar: ProgressBar | None
) -> None:
    """Writes one tensor at a time. Source: the safetensors format description."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + 4 * int(np.prod(tensor.shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    for values in _values(tensors, heads):
        if stop.is_set():
            raise ModelError("the conversion was stopped")
        out.write(values.data)
        if bar is not None:
            bar("converting", out.tell(), end + 8 + len(encoded))


def _values(tensors: list[tuple[str, GgufTensor]], heads: dict[str, object]) -> Iterator[npt.NDArray[np.float32]]:
    for _, tensor in tensors:
        values = tensor.float32()
        num_heads = heads.get(tensor.name.split(".")[-2])
        if num_heads is None:
            yield values
        elif values.shape[0] % (2 * int(str(num_heads))):
            raise ModelError(f"tensor {tensor.name} has {values.shape[0]} rows, which are not {num_heads} heads of even size")
        else:
            yield _deinterleaved(values, int(str(num_heads)))


def _deinterleaved(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorders rows (head, i, half) to (head, half, i)."""
    split = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
