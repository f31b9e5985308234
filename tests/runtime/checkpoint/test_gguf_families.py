"""GGUF files of every family that can be converted, of every quantisation, and with SentencePiece's vocabulary."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from phalanx_runtime.checkpoint.gguf.convert import convert, model_config
from phalanx_runtime.checkpoint.gguf.file import GgufTensor, read_gguf
from phalanx_runtime.checkpoint.gguf.tokenizer import read_tokenizer, tokenizer_config
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.registry import Kernels
from tests.examples import examples
from tests.runtime.checkpoint.gguf_files import K_QUANTS, SCALES, TinyGguf, random_blocks
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.ranks import Build
from tests.runtime.tiny import WINDOW, save_tiny

Array = npt.NDArray[Any]
Kind = GGMLQuantizationType
KERNELS = Kernels(compiled=True)


@dataclass(frozen=True)
class Case:
    """A family of the runtime, and what its file has."""

    family: str
    arch: str
    changes: dict[str, Any]
    """Of config.json, for what a file cannot say."""
    metadata: dict[str, Any]


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
SOFTCAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}
GEMMA = {"attention.sliding_window": WINDOW}
LONG = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": 8}
FACTORS = {"short_factor": [1.0, 1.5, 2.5, 4.0], "long_factor": [8.0] * 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.25,
    "partial_rotary_factor": 0.5,
}
CASES = [
    Case("qwen3", "qwen3", {}, {}),
    Case("mistral", "llama", {"sliding_window": None}, {}),
    Case("mixtral", "llama", {"sliding_window": None}, EXPERTS),
    Case("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}, EXPERTS | {"expert_feed_forward_length": 32}),
    Case("phi3", "phi3", {"sliding_window": WINDOW, "original_max_position_embeddings": 128}, GEMMA),
    Case(
        "phi3",
        "phi3",
        {"rope_parameters": LONGROPE | FACTORS, "original_max_position_embeddings": 128, "sliding_window": None},
        LONG,
    ),
    Case("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, {}),
    Case("olmo2", "olmo2", {}, {}),
    Case("gemma", "gemma", {"tie_word_embeddings": True}, {}),
    Case("gemma2", "gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, GEMMA | SOFTCAPS),
    Case(
        "gemma3_text",
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        GEMMA | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
]


def stored_values(name: str, values: Array, raw: dict[str, Any]) -> Array:
    """Returns the tensor as llama.cpp's converter writes it."""
    if raw["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if raw["model_type"] in ("mistral", "mixtral", "llama", "smollm3") and heads:
        split = values.reshape(raw[heads], 2, -1, values.shape[1])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
    return values


def write_family(case: Case, source: Path, exact: Path, path: Path, kind: Kind = Kind.Q8_0) -> None:
    """Writes the checkpoint as a GGUF file, its matrices rounded or of random codes, and its numbers to `exact`."""
    raw = json.loads((source / "config.json").read_text())
    names = gguf.get_tensor_name_map(next(key for key, name in MODEL_ARCH_NAMES.items() if name == case.arch), 6)
    stored: dict[str, list[Array]] = {}
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        values = written = tensor.numpy()
        if values.ndim == 2 and kind in SCALES:
            written = random_blocks(kind, values.shape, seed=len(kept))
            values = dequantize(written, kind)
        elif values.ndim == 2:  # blocks are in rows, so rows in another order are rounded equally
            values = written = dequantize(quantize(values, kind), kind)
        kept[name] = torch.from_numpy(values)
        stem, suffix = name.rsplit(".", 1)
        shown = f"{names.get_name(re.sub(r'experts[.][0-9]+', 'experts', stem))}.{suffix}"
        stored.setdefault(shown, []).append(stored_values(name, written, raw))
    shutil.copytree(source, exact)
    save_file(kept, exact / "model.safetensors", {"format": "pt"})
    content = {name: parts[0] if len(parts) == 1 else np.stack(parts) for name, parts in stored.items()}
    content |= {
        f"rope_factors_{name[:-7]}.weight": np.array(FACTORS[name], np.float32) for name in FACTORS if case.metadata == LONG
    }
    sizes = {"block_count": raw["num_hidden_layers"], "context_length": 256, "rope.dimension_count": 16}
    numbers = {
        "rope.freq_base": raw["rope_parameters"].get("rope_theta", 10000.0),
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
    }
    extra = {f"{case.arch}.{key}": value for key, value in {**sizes, **numbers, **case.metadata}.items()}
    TinyGguf(case.arch, quantization=kind, extra=extra, content=content).write(path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {len(case.metadata)}")
def test_families_give_the_tokens_of_transformers(tmp_path: Path, case: Case) -> None:
    """Dequantised by `convert`, and as the file has them on one rank and on two."""
    source, exact = save_tiny(tmp_path / "model", case.family, rms_norm_eps=1e-5, **case.changes), tmp_path / "exact"
    write_family(case, source, exact, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    outputs = generate(tmp_path / "converted", [1], Build())
    expected = reference(exact, outputs)
    assert compare(expected, outputs).holds
    packed = locate(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache").dir
    for ranks in (1, 2):
        assert compare(expected, generate(packed, [ranks], Build(kernels=KERNELS))).holds, ranks
    assert compare(expected, generate(packed, [1], Build())).holds


@pytest.mark.parametrize(("arch", "layers", "scalar"), [("gemma2", 46, 16), ("gemma2", 42, 32), ("gemma3", 62, 16)])
def test_largest_gemma_scales_queries_by_another_size(tmp_path: Path, arch: str, layers: int, scalar: int) -> None:
    """The file does not say it. Here hidden size / heads is 16, and a head has 32 dimensions."""
    metadata = {**GEMMA, **SOFTCAPS, "block_count": layers, "attention.key_length": 32}
    extra: dict[str, object] = {f"{arch}.{key}": value for key, value in metadata.items()}
    file = read_gguf(TinyGguf(arch, extra=extra).write(tmp_path / "tiny.gguf"))
    assert model_config(file)["query_pre_attn_scalar"] == scalar


def scales_and_offsets(block: bytes) -> list[tuple[int, int]]:
    """Returns the scale and the offset of each 32 weights of Q4_K and Q5_K: 6 bits each, the last four in pieces."""
    found = [(block[i] & 63, block[i + 4] & 63) for i in range(4)]
    return found + [(block[i + 8] & 15 | block[i] >> 6 << 4, block[i + 8] >> 4 | block[i + 4] >> 6 << 4) for i in range(4)]


def halves(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def q4_k(block: bytes) -> list[float]:
    scales, codes = scales_and_offsets(block[4:16]), block[16:]
    return [
        halves(block, 0) * scales[i // 32][0] * (codes[i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15)
        - halves(block, 2) * scales[i // 32][1]
        for i in range(256)
    ]


def q5_k(block: bytes) -> list[float]:
    scales, high, codes = scales_and_offsets(block[4:16]), block[16:48], block[48:]
    values = [(codes[i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15) + 16 * (high[i % 32] >> i // 32 & 1) for i in range(256)]
    return [
        halves(block, 0) * scales[i // 32][0] * value - halves(block, 2) * scales[i // 32][1] for i, value in enumerate(values)
    ]


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    found = []
    for i in range(256):
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        code = low[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
        code |= (high[32 * half + at] >> 2 * quarter & 3) << 4
        found.append(halves(block, 208) * int(scales[i // 16]) * (code - 32))
    return found


DEFINITIONS: dict[Kind, Callable[[bytes], list[float]]] = {Kind.Q4_K: q4_k, Kind.Q5_K: q5_k, Kind.Q6_K: q6_k}


@pytest.mark.parametrize("kind", DEFINITIONS, ids=lambda kind: kind.name)
def test_k_quants_have_the_weights_of_their_definition(kind: Kind) -> None:
    raw = random_blocks(kind, (3, 512), seed=1)
    by_block = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    expected = np.array([DEFINITIONS[kind](block.tobytes()) for block in by_block]).reshape(3, 512)
    np.testing.assert_allclose(GgufTensor("w", (3, 512), kind, raw).float32(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_give_the_tokens_of_transformers(tmp_path: Path, kind: Kind) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64, "rope.dimension_count": 64}
    source, exact = save_tiny(tmp_path / "model", "qwen2", rms_norm_eps=1e-5, **wide), tmp_path / "exact"
    write_family(Case("qwen2", "qwen2", wide, sizes), source, exact, tmp_path / "tiny.gguf", kind)
    packed = locate(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache").dir
    outputs = generate(packed, [1], Build(kernels=KERNELS))
    assert len({*map(tuple, outputs)}) > 3
    expected = reference(exact, outputs)
    assert compare(expected, outputs).holds
    assert compare(expected, generate(packed, [2], Build(kernels=KERNELS))).holds


PIECES = [
    "\u2581",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "1",
    "2",
    "\u2581h",
    "he",
    "ll",
    "lo",
    "hell",
    "hello",
    "\u2581hello",
    "wo",
    "rd",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<|user|>"]
SPM_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
SPM_SCORES = [0.0] * 259 + [-float((7 * at) % len(PIECES)) for at in range(len(PIECES))] + [0.0]


def sentencepiece_file(**more: object) -> TinyGguf:
    tokenizer = {"model": "llama", "tokens": SPM_TOKENS, "token_type": SPM_KINDS, "scores": SPM_SCORES, **more}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    extra: dict[str, object] = {f"tokenizer.ggml.{key}": value for key, value in {**tokenizer, **ids}.items()}
    unused = {f"tokenizer.ggml.{key}" for key in ("merges", "pre", "add_bos_token")}
    return TinyGguf(extra=extra, drop=unused - extra.keys())


def spm_ids(text: str, *, has_prefix: bool) -> list[int]:
    """Returns the ids by definition: the pair of neighbours with the best score is joined, the first of equal ones."""
    symbols = list((("\u2581" if has_prefix and text else "") + text).replace(" ", "\u2581"))
    scores = {piece: SPM_SCORES[SPM_TOKENS.index(piece)] for piece in PIECES}
    while pairs := [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = set(PIECES)
    return [one for s in symbols for one in ([SPM_TOKENS.index(s)] if s in known else [3 + byte for byte in s.encode()])]


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    """By whether a text begins with a space."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    files = {flag: sentencepiece_file(add_space_prefix=flag).write(folder / f"{flag}.gguf") for flag in (False, True)}
    return {flag: read_tokenizer(read_gguf(path)) for flag, path in files.items()}


@settings(max_examples=examples(150), deadline=None)
@given(
    text=st.text(st.one_of(st.sampled_from("helo word12 \n\u00e9\u4f60"), st.characters(codec="utf-8")), max_size=30),
    has_prefix=st.booleans(),
)
def test_sentencepiece_joins_the_best_pair_first(sentencepieces: dict[bool, Tokenizer], text: str, has_prefix: bool) -> None:
    tokenizer = sentencepieces[has_prefix]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == spm_ids(text, has_prefix=has_prefix)
    assert "\u2581" in text or tokenizer.decode(ids) == text


def test_sentencepiece_adds_the_begin_unless_told(tmp_path: Path) -> None:
    file = read_gguf(sentencepiece_file().write(tmp_path / "a.gguf"))
    assert read_tokenizer(file).encode("hello<|user|>").ids == [1, SPM_TOKENS.index("\u2581hello"), len(SPM_TOKENS) - 1]
    assert tokenizer_config(file)["add_bos_token"] is True
    silent = read_gguf(sentencepiece_file(add_bos_token=False).write(tmp_path / "b.gguf"))
    assert read_tokenizer(silent).encode("").ids == [] and tokenizer_config(silent)["add_bos_token"] is False


@pytest.mark.parametrize(("arch", "between"), [("phi3", []), ("llama", ["\u2581", "<0x0A>"])])
def test_special_tokens_of_phi_3_take_spaces(tmp_path: Path, arch: str, between: list[str]) -> None:
    tiny = sentencepiece_file()
    tiny.architecture = arch
    tokenizer = read_tokenizer(read_gguf(tiny.write(tmp_path / "tiny.gguf")))
    found = [[SPM_TOKENS[index] for index in tokenizer.encode(f"{token}\n hello").ids] for token in ("<|user|>", "<s>")]
    assert found[0] == ["<s>", "<|user|>", *between, "\u2581hello"]
    assert found[1] == ["<s>", "<s>", "\u2581", "<0x0A>", "\u2581hello"]


def test_pieces_of_sentencepiece_are_bounded(tmp_path: Path) -> None:
    kinds, scores = [*SPM_KINDS, 1], [*SPM_SCORES, 0.0]
    tiny = sentencepiece_file(tokens=[*SPM_TOKENS, "x" * 1001], token_type=kinds, scores=scores)
    with pytest.raises(ModelError, match="a token of 1001 characters, at most 1000"):
        read_tokenizer(read_gguf(tiny.write(tmp_path / "tiny.gguf")))
