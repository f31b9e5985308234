"""config.json is read as `transformers` means it, and what we cannot compute is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ARCHITECTURES, ModelConfig, parse_config, read_config
from phalanx_runtime.model.partition import Span, cut_evenly, num_linear_weights, partition

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**BASE, **changes})


def test_what_is_left_out_has_the_defaults_of_the_family() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.max_position, config.tied) == (4, 16, 2048, False)
    assert (config.rope.theta, config.rope.kind, config.rms_norm_eps) == (10000.0, "default", 1e-6)
    assert config.windows == (None, None, None)
    assert parsed(head_dim=48).head_dim == 48


@pytest.mark.parametrize(
    ("architecture", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", (False, False, False), False),
        ("MistralForCausalLM", (False, False, False), False),
        ("Qwen2ForCausalLM", (True, False, False), False),
        ("Qwen3ForCausalLM", (False, False, False), True),
    ],
)
def test_families_differ_in_biases_and_norms(architecture: str, biases: tuple[bool, ...], qk_norm: bool) -> None:
    config = parsed(architectures=[architecture])
    assert ((config.qkv_bias, config.o_bias, config.mlp_bias), config.qk_norm) == (biases, qk_norm)


def test_asked_for_biases_are_there() -> None:
    config = parsed(attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES = {
    "theta alone": ({"rope_theta": 5e5}, ("default", 5e5, 1.0)),
    "no scaling": ({"rope_theta": 5e5, "rope_scaling": None}, ("default", 5e5, 1.0)),
    "old linear": ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 1e4, 2.0)),
    "new linear": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}, ("linear", 7.0, 2.0)),
    "old llama3": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, ("llama3", 5e5, 8.0)),
    "new llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, ("llama3", 5e5, 8.0)),
}


@pytest.mark.parametrize(("fields", "rope"), ROPES.values(), ids=ROPES.keys())
def test_rope_is_read_as_written_by_transformers_4_and_5(fields: dict[str, Any], rope: tuple[str, float, float]) -> None:
    config = parsed(**fields)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == rope


WINDOWS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
    "mistral without": ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
    "qwen2 not used": ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None, None)),
    "qwen2 by layer number": (
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        (None, None, 8),
    ),
    "qwen3 by layer types": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        (None, 8, None),
    ),
    "llama has none": ({"sliding_window": 8}, (None, None, None)),
}


@pytest.mark.parametrize(("fields", "windows"), WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parsed(**fields).windows == windows


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
    "no architecture": ({"architectures": None, "model_type": "bert"}, "'bert'"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn.*llama3"),
    "rope of another kind": ({"rope_scaling": "linear"}, "rope_parameters"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "heads": ({"num_key_value_heads": 3}, "multiple"),
    "missing": ({"hidden_size": None}, "hidden_size"),
    "negative": ({"vocab_size": -5}, "vocab_size"),
    "no number": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "layer types": ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "layer_types": ["x"]}, "layer_types"),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parsed(**fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "does not exist"), ("{", "cannot be read"), ("[]", "no JSON object")],
    ids=["missing", "broken", "list"],
)
def test_a_config_file_that_is_none_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=said):
        read_config(tmp_path)


def test_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "torch_dtype": "bfloat16"}))
    assert read_config(tmp_path).dtype == "bfloat16"
    assert parsed(dtype="float16").dtype == "float16"


@settings(deadline=None)
@given(total=st.integers(1, 500), parts=st.integers(1, 20))
def test_even_cuts_cover_everything_once(total: int, parts: int) -> None:
    spans = cut_evenly(total, parts)
    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(total))
    assert max(span.size for span in spans) - min(span.size for span in spans) <= 1


@settings(deadline=None, max_examples=200)
@given(
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 8),
    mlp=st.integers(16, 3000),
    vocab=st.integers(16, 1000),
    world_size=st.integers(1, 16),
)
def test_shards_cover_the_model_once(kv_heads: int, group: int, mlp: int, vocab: int, world_size: int) -> None:
    config = parsed(
        num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, head_dim=8, intermediate_size=mlp, vocab_size=vocab
    )
    ranks_of_a_head = -(-world_size // kv_heads)
    if ranks_of_a_head > group and world_size > kv_heads:
        with pytest.raises(ModelError, match="tensor-parallel size"):
            partition(config, world_size)
        return
    shards = partition(config, world_size)
    for total, spans in (
        (kv_heads * group, [shard.heads for shard in shards]),
        (mlp, [shard.mlp for shard in shards]),
        (vocab, [shard.vocab for shard in shards]),
    ):
        assert [index for span in spans for index in range(span.start, span.stop)] == list(range(total))
        assert all(span.size for span in spans)
    for shard in shards:
        wanted = {head // group for head in range(shard.heads.start, shard.heads.stop)}
        assert wanted == set(range(shard.kv_heads.start, shard.kv_heads.stop))
    if world_size <= kv_heads:
        assert sum(shard.kv_heads.size for shard in shards) == kv_heads


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="5 is more than the model's 4 attention heads"):
        partition(parsed(), 5)
    with pytest.raises(ModelError, match="MLP columns"):
        partition(parsed(intermediate_size=2), 3)


def test_a_rank_with_fewer_heads_gets_more_of_the_mlp() -> None:
    smol = parsed(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        num_hidden_layers=30,
    )
    first, second = partition(smol, 2)
    assert (first.heads, second.heads) == (Span(0, 6), Span(6, 9))
    assert first.mlp.size < second.mlp.size and first.mlp.size % 16 == 0
    ours, theirs = num_linear_weights(smol, first), num_linear_weights(smol, second)
    assert abs(ours - theirs) < 0.01 * ours


def test_the_families_are_those_that_the_tests_make() -> None:
    assert ARCHITECTURES == ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
