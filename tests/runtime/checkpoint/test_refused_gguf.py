"""GGUF files that are refused: broken, cut, hostile and unsupported ones."""

import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx_runtime.checkpoint.gguf.convert import convert, link_once
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.gguf_files import TinyGguf

REFUSALS = {
    "architecture": (TinyGguf("falcon"), "architecture 'falcon' cannot be converted, only llama, .*, gemma3"),
    "experts": (
        TinyGguf(extra_tensors={"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), np.float32)}),
        "tensor blk.0.ffn_gate_exps",
    ),
    "unknown-root": (
        TinyGguf(extra_tensors={"position_embd.weight": np.ones(8, np.float32)}),
        "tensor position_embd.weight belongs",
    ),
    "weight-scale": (
        TinyGguf(extra_tensors={"blk.0.ffn_gate.scale": np.ones(1, np.float32)}),
        "tensor blk.0.ffn_gate.scale belongs to no model",
    ),
    "rope-divisors": (
        TinyGguf(extra_tensors={"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}),
        "rope_freqs.weight is not Llama 3's scaling",
    ),
    "rope-base": (TinyGguf(extra={"llama.rope.freq_base": "x"}), "rope.freq_base must be a number above 0, it is 'x'"),
    "split": (TinyGguf(extra={"split.count": 2}), "one part of a split"),
    "rope-scaling": (TinyGguf(extra={"llama.rope.scaling.type": "su"}), "rope.scaling.type 'su' cannot be converted"),
    "no-size": (TinyGguf(drop={"llama.embedding_length"}), "has no llama.embedding_length"),
    "bad-size": (TinyGguf(extra={"llama.block_count": "many"}), "llama.block_count must be a positive integer, it is 'many'"),
    "kv-per-layer": (TinyGguf(extra={"llama.attention.head_count_kv": [2, 1]}), "head_count_kv must be a positive integer"),
    "no-epsilon": (TinyGguf(drop={"llama.attention.layer_norm_rms_epsilon"}), "layer_norm_rms_epsilon must be a number above 0"),
    "tokenizer": (TinyGguf(extra={"tokenizer.ggml.model": "bert"}), "tokenizer.ggml.model is 'bert'; .* expected: gpt2, llama"),
    "no-scores": (TinyGguf(extra={"tokenizer.ggml.model": "llama"}), "tokenizer.ggml.scores must be a list of 269 numbers"),
    "pre-tokenizer": (TinyGguf(pre="mystery"), "tokenizer.ggml.pre is 'mystery'; one of these is expected: .*smollm"),
    "no-tokens": (TinyGguf(drop={"tokenizer.ggml.tokens"}), "tokenizer.ggml.tokens must be a list of strings"),
    "merge": (TinyGguf(extra={"tokenizer.ggml.merges": ["he"]}), "has 'he', a pair is expected"),
    "token-types": (TinyGguf(extra={"tokenizer.ggml.token_type": "x"}), "token_type must be a list"),
    "template": (TinyGguf(extra={"tokenizer.chat_template": 3}), "chat_template must be a string, it is 3"),
    "eos-range": (TinyGguf(extra={"tokenizer.ggml.eos_token_id": 9999}), "eos_token_id is 9999, the vocabulary has"),
    "rope-nan": (TinyGguf(extra={"llama.rope.freq_base": float("nan")}), "rope.freq_base must be a number above 0, it is nan"),
    "no-factor": (TinyGguf(extra={"llama.rope.scaling.type": "linear"}), "scaling.factor must be a number above 0, it is None"),
    "no-divisors": (
        TinyGguf(extra_tensors={"rope_freqs.weight": np.zeros(0, np.float32)}),
        "tensor rope_freqs.weight has no values",
    ),
    "no-columns": (
        TinyGguf(extra_tensors={"blk.1.attn_q.weight": np.zeros((64, 0), np.float32)}),
        "tensor blk.1.attn_q.weight has no values",
    ),
    "odd-heads": (TinyGguf(extra={"llama.attention.head_count": 5}), "tensor blk.0.attn_q.weight has 64 rows, .* not 5 heads"),
    "unknown-merge": (TinyGguf(extra={"tokenizer.ggml.merges": ["x ☃"]}), "tokenizer.ggml.merges make no tokenizer"),
    "token-twice": (TinyGguf(extra={"tokenizer.ggml.tokens": ["a", "a"]}), "tokenizer.ggml.tokens has a token twice"),
    "rope-factors": (
        TinyGguf(extra_tensors={"rope_factors_long.weight": np.ones(8, np.float32)}),
        "llama with rope_factors is not Phi-3's scaling",
    ),
    "no-short-factors": (
        TinyGguf("phi3", extra_tensors={"rope_factors_long.weight": np.ones(8, np.float32)}),
        "phi3 with rope_factors is not Phi-3's scaling",
    ),
    "window": (TinyGguf("olmo2", extra={"olmo2.attention.sliding_window": 64}), "sliding_window: OLMo 3 cannot be converted"),
    "negative-window": (TinyGguf("phi3", extra={"phi3.attention.sliding_window": -5}), "sliding_window must be a positive .*-5"),
    "negative-heads": (
        TinyGguf(extra={"llama.attention.head_count_kv": -5}),
        "head_count_kv must be a positive integer, it is -5",
    ),
    "no-rotation": (TinyGguf(extra={"llama.rope.dimension_count": 0}), "dimension_count must be a positive integer, it is 0"),
    "many-heads": (
        TinyGguf("phi3", extra={"phi3.attention.head_count": 65}, drop={"phi3.attention.key_length"}),
        "head_count is 65, above embedding_length, 64",
    ),
    "expert-count": (
        TinyGguf(
            extra={"llama.expert_count": 4, "llama.expert_used_count": 2},
            extra_tensors={"blk.0.ffn_gate_exps.weight": np.ones((8, 4, 64), np.float32)},
        ),
        "tensor blk.0.ffn_gate_exps.weight has 8 experts, not 4",
    ),
    "separate-experts": (
        TinyGguf(
            extra={"llama.expert_count": 4, "llama.expert_used_count": 2},
            extra_tensors={"blk.0.ffn_gate.0.weight": np.ones((4, 64), np.float32)},
        ),
        "tensor blk.0.ffn_gate.0.weight belongs to no model",
    ),
    "two-norms": (
        TinyGguf("olmo2", extra_tensors={"blk.0.post_attention_norm.weight": np.ones(64, np.float32)}),
        "two tensors are model.layers.0.post_attention_layernorm.weight",
    ),
    "alignment": (TinyGguf(extra={"general.alignment": 0}), "general.alignment is 0"),
}


@pytest.mark.parametrize("old", [(2, 64), (64,)], ids=["matrix", "vector"])
def test_shape_beyond_the_file_is_refused(tmp_path: Path, old: tuple[int, ...]) -> None:
    gguf = TinyGguf(extra_tensors={"output_norm.weight": np.ones(old, np.float32)}).write(tmp_path / "tiny.gguf")
    shape = b"".join(size.to_bytes(8, "little") for size in reversed(old))
    name = b"output_norm.weight" + len(old).to_bytes(4, "little")
    gguf.write_bytes(gguf.read_bytes().replace(name + shape, name + b"\xff" * 7 + b"\x80" + shape[8:]))
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a whole GGUF file: .*output_norm\.weight"):
        convert(gguf, tmp_path / "out")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    gguf = TinyGguf(tied=False).write(tmp_path / "tiny.gguf")
    gguf.write_bytes(gguf.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelError, match="two tensors have the same name"):
        convert(gguf, tmp_path / "out")


@pytest.mark.parametrize(("tiny", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_unsupported_file_is_refused_and_leaves_no_output(tmp_path: Path, tiny: TinyGguf, reason: str) -> None:
    gguf = tiny.write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=reason) as refused:
        convert(gguf, tmp_path / "out")
    assert str(gguf) in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tiny = TinyGguf()
    tiny.tensors = dict  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"no tensor token_embd.weight"):
        convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (0, "tiny.gguf"),
        (3, "does not begin with GGUF|ends early"),
        (30, "ends early"),
        (5000, "ends early"),
        (-50, "ends early, in tensor"),
    ],
)
def test_a_cut_file_is_refused(tmp_path: Path, kept: int, reason: str) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    gguf.write_bytes(gguf.read_bytes()[:kept])
    with pytest.raises(ModelError, match=reason):
        convert(gguf, tmp_path / "out")


ONE, HUGE = (1).to_bytes(8, "little"), (1 << 40).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(40), "version 9 is not one of"),
        (
            b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"k" + b"\x63" + bytes(8),
            "value type 99 is unknown",
        ),
        (
            b"GGUF\3\0\0\0\1" + bytes(15) + b"\1" + bytes(7) + b"t\1\0\0\0\5" + bytes(7) + b"\2" + bytes(11) + bytes(64),
            r"tensor t: shape \(5,\) does not fit blocks of 32",
        ),
        (b"GGUF\3\0\0\0" + HUGE + bytes(99), "1099511627776 tensors, at most 65536"),
        (b"GGUF\3\0\0\0" + bytes(8) + HUGE + bytes(99), "1099511627776 metadata keys, at most 65536"),
        (b"GGUF\3\0\0\0" + bytes(8) + ONE + bytes(8) + b"\x09\0\0\0" + bytes(4) + HUGE, "values in an array, at most 4194304"),
        (b"GGUF\3\0\0\0" + ONE + bytes(8) + ONE + b"t\5\0\0\0" + bytes(64), "5 dimensions of tensor t, at most 4"),
    ],
    ids=["zip", "version", "value-type", "block-size", "tensors", "keys", "array", "dimensions"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        convert(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.parametrize(("number", "quantisation"), [(15, "Q8_K"), (31, "of ggml's number 31")], ids=["known", "removed"])
def test_unsupported_quantisation_of_a_tensor_is_named(tmp_path: Path, number: int, quantisation: str) -> None:
    gguf = TinyGguf(extra_tensors={"blk.1.attn_q.weight": np.ones((64, 256), np.float32)}).write(tmp_path / "tiny.gguf")
    before = b"blk.1.attn_q.weight" + struct.pack("<IQQ", 2, 256, 64)
    gguf.write_bytes(gguf.read_bytes().replace(before + struct.pack("<I", 0), before + struct.pack("<I", number)))
    reason = (
        rf"^{gguf}: tensor blk.1.attn_q.weight: quantisation {quantisation} is not supported: use a file in F32, F16, Q4_0.*Q6_K"
    )
    with pytest.raises(ModelError, match=reason):
        link_once(gguf, tmp_path / "out")


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.gguf: No such file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")
