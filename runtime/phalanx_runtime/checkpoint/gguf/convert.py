"""Makes a model folder of a GGUF file: config.json, tokenizer.json, tokenizer_config.json, and its weights.

The weights are fp32 safetensors, bitwise equal to those that transformers loads, or a link to the file: it is read as it is.
"""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from phalanx_runtime.checkpoint.folder import GGUF_FILE, make_once, remove_lock
from phalanx_runtime.checkpoint.gguf.families import family_of
from phalanx_runtime.checkpoint.gguf.file import GgufFile, read_gguf
from phalanx_runtime.checkpoint.gguf.tensors import (
    LONG_DIVISORS,
    ROPE_DIVISORS,
    ROPE_TENSORS,
    SHORT_DIVISORS,
    JoinedExperts,
    StoredTensor,
    stored_tensors,
    written_tensors,
)
from phalanx_runtime.checkpoint.gguf.tokenizer import end_token_ids, read_tokenizer, tokenizer_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import ProgressBar

# Rotary embedding. GGUF stores Llama 3's scaling as a divisor per frequency (tensor rope_freqs). All Llama 3 models share the
# other parameters, so the factor is the largest divisor. Source: Llama 3.1's apply_scaling and llama.cpp's converter. Phi-3's
# divisors are two tensors, for prompts within its first context and beyond.

_DEFAULT_THETA = 10000.0
_FAST_ROTATIONS, _SLOW_ROTATIONS = 32.0, 1.0
_PLAIN_YARN = {"attn_factor": (1.0,), "yarn_attn_factor": (1.0,), "yarn_ext_factor": (1.0, -1.0), "yarn_log_multiplier": (0.0,)}
"""Fields of `rope.scaling`, and the values with which llama.cpp scales cosines and sines as YaRN does."""
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def rope_parameters(file: GgufFile, architecture: str) -> dict[str, object]:
    """Returns `rope_parameters` of config.json. Raises ModelError for an unsupported scaling."""
    theta = file.positive(f"{architecture}.rope.freq_base", _DEFAULT_THETA)
    stored = {tensor.name: tensor.float32() for tensor in file.tensors if tensor.name in ROPE_TENSORS}
    divisors = stored.get(ROPE_DIVISORS)
    kind = file.text(f"{architecture}.rope.scaling.type")
    if architecture == "phi3" and LONG_DIVISORS in stored and SHORT_DIVISORS in stored:
        return _longrope(file, theta, stored)
    if LONG_DIVISORS in stored or SHORT_DIVISORS in stored:
        raise ModelError(f"{file.path}: {architecture} with rope_factors is not Phi-3's scaling; use the safetensors checkpoint")
    scales = (f"{architecture}.rope.{key}" for key in ("scaling.factor", "scale_linear"))  # the second is the old name
    scale = next((key for key in scales if file.metadata.get(key)), None)
    if kind is None and scale is not None and divisors is None:
        kind = "linear"  # as in llama.cpp
    if kind in (None, "none"):
        plain: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
        return plain if divisors is None else _llama3(file, theta, divisors)
    if kind == "linear" and divisors is None:
        factor = file.positive(scale or f"{architecture}.rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn" and divisors is None:
        return _yarn(file, architecture, theta)
    raise ModelError(
        f"{file.path}: {architecture}.rope.scaling.type {kind!r} cannot be converted; use the safetensors checkpoint"
    )


def _yarn(file: GgufFile, architecture: str, theta: float) -> dict[str, object]:
    """Returns YaRN's parameters. gpt-oss does not round its bounds to whole pairs of dimensions, which no file says."""
    prefix = f"{architecture}.rope.scaling"
    for name, values in _PLAIN_YARN.items():
        if file.metadata.get(f"{prefix}.{name}", values[0]) not in values:
            raise ModelError(f"{file.path}: {prefix}.{name} cannot be converted; use the safetensors checkpoint")
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": file.positive(f"{prefix}.factor"),
        "original_max_position_embeddings": file.size(f"{prefix}.original_context_length"),
        "beta_fast": file.positive(f"{prefix}.yarn_beta_fast", _FAST_ROTATIONS),
        "beta_slow": file.positive(f"{prefix}.yarn_beta_slow", _SLOW_ROTATIONS),
        "truncate": architecture != "gpt-oss",
    }


def _longrope(file: GgufFile, theta: float, stored: dict[str, npt.NDArray[np.float32]]) -> dict[str, object]:
    names = {"long_factor": LONG_DIVISORS, "short_factor": SHORT_DIVISORS}
    first = file.size("phi3.rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "attention_factor": file.positive("phi3.rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": first,
        **{key: stored[name].tolist() for key, name in names.items()},
    }


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


CONVERTER_VERSION = 6
"""Part of cache keys; increment when the output for the same GGUF file changes."""


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

    def write(file: GgufFile, tensors: Sequence[StoredTensor], folder: Path) -> None:
        with open(folder / "model.safetensors", "wb") as weights:
            _write_safetensors(weights, written_tensors(file, tensors), stop, bar)

    return _make_once(gguf, out, stop, write, _no_fields)


def link_once(gguf: Path, out: Path, stop: threading.Event | None = None) -> Path:
    """Returns `out`, a folder whose weights are a link to the file. Setting `stop` aborts. Raises ModelError."""

    def link(file: GgufFile, tensors: Sequence[StoredTensor], folder: Path) -> None:
        (folder / GGUF_FILE).unlink(missing_ok=True)
        (folder / GGUF_FILE).symlink_to(gguf.absolute())

    return _make_once(gguf, out, stop or threading.Event(), link, _packed_fields)


def _make_once(
    gguf: Path,
    out: Path,
    stop: threading.Event,
    write: Callable[[GgufFile, Sequence[StoredTensor], Path], None],
    fields: Callable[[Sequence[StoredTensor]], dict[str, object]],
) -> Path:
    """`write` receives the file, the tensors of the checkpoint and the folder; `fields`: further ones of config.json."""

    def make(part: Path) -> None:
        try:
            file = read_gguf(gguf)
            tensors = stored_tensors(file)
            _write_texts(file, part, fields(tensors))
            write(file, tensors, part)
        except ModelError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise error if str(gguf) in str(error) else ModelError(f"{gguf}: {error}") from error
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    return make_once(out, make, stop)


def _no_fields(tensors: Sequence[StoredTensor]) -> dict[str, object]:
    return {}


def _packed_fields(tensors: Sequence[StoredTensor]) -> dict[str, object]:
    """Returns `quantization_config`: formats of the matrices, bytes of a weight, and share and bytes of those kept packed."""
    matrices = [one for one in tensors if len(one.shape) == 2]
    kinds = sorted({one.kind.name for one in matrices})
    for one in matrices:
        one.check_kind()
    packed = [one for one in matrices if one.kind.name.startswith(("Q", "MXFP4", "IQ4"))]
    num_weights, num_packed = (max(1, sum(one.num_weights for one in some)) for some in (matrices, packed))
    method = {
        "quant_method": "gguf",
        "formats": kinds,
        "bytes_per_weight": sum(one.num_bytes for one in matrices) / num_weights,
        "packed_bytes_per_weight": sum(one.num_bytes for one in packed) / num_packed,
        "packed_share": sum(one.num_weights for one in packed) / num_weights,
    }
    return {"quantization_config": method}


def _write_texts(file: GgufFile, folder: Path, fields: dict[str, object]) -> None:
    config = model_config(file)
    read_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    ends = {"eos_token_id": ids if len(ids) > 1 else ids[0]} if (ids := end_token_ids(file)) else {}
    _write_json(folder / "generation_config.json", _special_ids(file) | ends)
    _write_json(folder / "config.json", config | fields)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(file: GgufFile) -> dict[str, object]:
    """Returns the content of config.json. Raises ModelError where no exact conversion exists."""
    family, architecture = family_of(file), str(file.text("general.architecture"))
    if (file.number("split.count") or 1) > 1:
        raise ModelError(f"{file.path} is one part of a split GGUF file: join the parts first")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    rope = rope_parameters(file, architecture)
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
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
    config |= _sizes(file, architecture) | _special_ids(file)
    return config | family.fields(file, config)


def _sizes(file: GgufFile, architecture: str) -> dict[str, object]:
    heads, hidden = (file.size(f"{architecture}.{key}") for key in ("attention.head_count", "embedding_length"))
    if heads > hidden:
        raise ModelError(f"{file.path}: {architecture}.attention.head_count is {heads}, above embedding_length, {hidden}")
    head_dim = file.size(f"{architecture}.attention.key_length", hidden // heads)
    rotated = file.size(f"{architecture}.rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": file.size(f"{architecture}.feed_forward_length"),
        "max_position_embeddings": file.size(f"{architecture}.context_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size(f"{architecture}.attention.head_count_kv", heads),
        "num_hidden_layers": file.size(f"{architecture}.block_count"),
        "head_dim": head_dim,
        **({"partial_rotary_factor": rotated / head_dim} if architecture == "phi3" and rotated != head_dim else {}),
    }


def _special_ids(file: GgufFile) -> dict[str, object]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.number(f"tokenizer.ggml.{gguf_name}_token_id") for name, gguf_name in names.items()}
    return {name: index for name, index in ids.items() if index is not None}


def _write_safetensors(
    out: BinaryIO, tensors: Sequence[StoredTensor | JoinedExperts], stop: threading.Event, bar: ProgressBar | None
) -> None:
    """Writes one tensor at a time. Source: the safetensors format description."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in tensors:
        start, end = end, end + 4 * one.num_weights
        header[one.name] = {"dtype": "F32", "shape": list(one.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    for one in tensors:
        if stop.is_set():
            raise ModelError("the conversion was stopped")
        values = one.float32()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {one.name} has a number that is not finite")
        out.write(values.data)
        if bar is not None:
            bar("converting", out.tell(), end + 8 + len(encoded))
