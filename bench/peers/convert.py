"""Converts the checkpoint: to GGUF, to OpenVINO's format, and to our quantised formats."""

import json
import shutil
import sys
from pathlib import Path

import gguf as gguf_format
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.peers.checkpoint import CONFIG, VOCABULARY, checkpoint
from bench.peers.environments import REQUIREMENTS, environment, llama_program
from tests.runtime.model import table_checkpoints
from tools.cache import cache_root, finished, key_of, key_of_folder
from tools.shell import logged

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_HEADS = {"attn_q": 9, "attn_k": 3}
_INT4 = ("--group-size", "64")
"""Groups divide both widths of the model; embedding and head become int8, as is OpenVINO's default."""
_QUANTIZING = Path(__file__).parents[2] / "runtime/phalanx_runtime/quantizing"


def quantised(scheme: str) -> Path:
    """Returns the checkpoint as `phalanx-runtime quantize --head` writes it, on text of its own (a minute)."""

    def make(folder: Path) -> None:
        program = (sys.executable, "-m", "phalanx_runtime", "quantize", str(checkpoint()), "--tokens", "4096", "--head")
        log = cache_root() / f"logs/bench-{scheme}.log"
        logged(f"quantising to {scheme}", *program, "--scheme", scheme, "--out", str(folder / "model"), log=log)

    key = key_of(checkpoint().name, key_of_folder(_QUANTIZING))
    return finished(cache_root() / f"bench-phalanx-{scheme}-{key}", make) / "model"


def packed(kind: str) -> Path:
    """Returns the checkpoint with linears in a format of `table_checkpoints`. The head becomes a linear of its own."""
    scheme, pack = table_checkpoints.KINDS[kind]
    key = key_of(checkpoint().name, Path(table_checkpoints.__file__).read_bytes())

    def make(folder: Path) -> None:
        shutil.copytree(checkpoint(), folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        for name in [name for name in weights if name.endswith(("_proj.weight", "lm_head.weight"))]:
            parts, _ = pack(weights.pop(name).float())
            weights |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
        save_file(weights, folder / "model.safetensors")
        config = {**CONFIG, "tie_word_embeddings": False, "quantization_config": scheme}
        (folder / "config.json").write_text(json.dumps(config))

    return finished(cache_root() / f"bench-phalanx-{kind}-{key}", make)


def openvino_model(weights: str) -> Path:
    pins = (REQUIREMENTS / "openvino-export.txt").read_text()

    def make(folder: Path) -> None:
        program = environment("openvino-export") / "bin/optimum-cli"
        arguments = (
            "export",
            "openvino",
            "-m",
            str(checkpoint()),
            "--task",
            "text-generation-with-past",
            "--weight-format",
            weights,
            *(_INT4 if weights == "int4" else ()),
        )
        logged(
            f"exporting to OpenVINO, {weights}", str(program), *arguments, str(folder), log=cache_root() / "logs/bench-export.log"
        )

    return finished(cache_root() / f"bench-openvino-{weights}-{key_of(checkpoint().name, pins)}", make)


def gguf(kind: str = "BF16") -> Path:
    """Returns the checkpoint in a kind of `llama-quantize`, which takes larger types for inputs that are no multiple of 256."""
    exact = finished(cache_root() / f"bench-gguf-{key_of(checkpoint().name, '3')}", _write_gguf) / "small.gguf"
    if kind == "BF16":
        return exact

    def make(folder: Path) -> None:
        program = str(llama_program("llama-quantize"))
        log = cache_root() / f"logs/bench-{kind}.log"
        logged(f"quantising to {kind}", program, str(exact), str(folder / "small.gguf"), kind, log=log)

    return finished(cache_root() / f"bench-gguf-{kind}-{key_of(exact.parent.name)}", make) / "small.gguf"


def _write_gguf(folder: Path) -> None:
    writer = gguf_format.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_block_count(30)
    writer.add_context_length(2048)
    writer.add_embedding_length(576)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf_format.LlamaFileType.MOSTLY_BF16)
    tokenizer = Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([str(tokenizer.id_to_token(token)) for token in range(VOCABULARY)])
    writer.add_token_types([gguf_format.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["\u0120t257 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, weight in load_file(checkpoint() / "model.safetensors").items():
        _add(writer, name.removesuffix(".weight"), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf_format.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    if name in ("model.embed_tokens", "model.norm"):
        new = "token_embd" if name == "model.embed_tokens" else "output_norm"
    else:
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        kind = _PARTS[part]
        new = f"blk.{layer}.{kind}"
        if kind in _HEADS:  # llama.cpp rotates neighbouring dimensions, not halves
            weight = weight.view(_HEADS[kind], 2, 32, -1).transpose(1, 2).reshape(weight.shape)
    if weight.dim() == 1:
        writer.add_tensor(f"{new}.weight", weight.float().numpy())
        return
    words = weight.contiguous().view(torch.int16).numpy().view(np.uint8)
    writer.add_tensor(f"{new}.weight", words, raw_dtype=gguf_format.GGMLQuantizationType.BF16)
