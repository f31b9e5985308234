"""Parsing of config.json, unsupported fields, and the partition over ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig, parse_config, read_json
from phalanx_runtime.model.families import FAMILIES, HeadNorms
from phalanx_runtime.model.partition import Span, cut_evenly, num_linear_weights, partition
from phalanx_runtime.model.rope import Rope
from tests.runtime import tiny

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**BASE, **changes})


def test_missing_fields_have_the_family_defaults() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.max_position, config.tied) == (4, 16, 2048, False)
    assert config.rms_norm_eps == 1e-6 and config.ropes == (Rope(theta=10000.0),) * 3
    assert config.windows == (None, None, None)
    assert parsed(head_dim=48).head_dim == 48


SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
}
"""Fields without which a model is refused."""
BEYOND = {"gpt_oss": {"rope_parameters"}}
"""By family: fields with defaults in `transformers` that no fine-tuned model has."""


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    import transformers

    mapping: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind: Any = transformers.CONFIG_MAPPING[family]
    named = {"architectures": [mapping[family]]}
    complete = {**kind(rms_norm_eps=0.25).to_dict(), **named}
    for field in complete.keys() - SIZES - BEYOND.get(family, set()) - {"architectures"}:
        raw = {name: value for name, value in complete.items() if name != field}
        assert parse_config(raw) == parse_config({**kind.from_dict(dict(raw)).to_dict(), **named}), field


@pytest.mark.parametrize(
    ("architecture", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", (False, False, False), "none"),
        ("Qwen2ForCausalLM", (True, False, False), "none"),
        ("Qwen3ForCausalLM", (False, False, False), "head"),
        ("Olmo2ForCausalLM", (False, False, False), "whole"),
    ],
)
def test_families_differ_in_biases_and_norms(architecture: str, biases: tuple[bool, ...], qk_norm: HeadNorms) -> None:
    config = parsed(architectures=[architecture])
    assert ((config.qkv_bias, config.o_bias, config.mlp_bias), config.qk_norm) == (biases, qk_norm)


@pytest.mark.parametrize(
    ("fields", "num_labels"),
    [({}, 2), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"num_labels": 1}, 1), ({"id2label": {}}, 2)],
)
def test_classifiers_have_the_labels_of_their_config(fields: dict[str, Any], num_labels: int) -> None:
    config = parsed(architectures=["LlamaForSequenceClassification"], **fields)
    assert (config.architecture, config.num_labels, config.tied) == ("LlamaForCausalLM", num_labels, True)
    assert parsed(**fields).num_labels == 0


def test_requested_biases_are_loaded() -> None:
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
def test_rope_of_transformers_4_and_5_is_read(fields: dict[str, Any], rope: tuple[str, float, float]) -> None:
    (read,) = set(parsed(**fields).ropes)
    assert read is not None and (read.kind, read.theta, read.factor) == rope


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
    "gemma 2 by turns": ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}, (8, None, 8)),
    "gemma 3 but each nth": (
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 3},
        (8, 8, None),
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
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "dynamic.*llama3"),
    "rope of another kind": ({"rope_scaling": "linear"}, "rope_parameters"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "both ways": ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "take an encoder"),
    "both ways in another spelling": ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "is_causal"),
    "heads": ({"num_key_value_heads": 3}, "multiple"),
    "missing": ({"hidden_size": None}, "hidden_size"),
    "negative": ({"vocab_size": -5}, "vocab_size"),
    "no number": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "unhashable activation": ({"hidden_act": ["silu"]}, "hidden_act"),
    "too many layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 10000"),
    "too wide heads": ({"head_dim": 10**9}, "head_dim must be a whole number from 1 to 65536"),
    "too wide heads by default": ({"hidden_size": 10**9, "num_attention_heads": 1, "num_key_value_heads": 1}, "exceeds 65536"),
    "too large": ({"vocab_size": 10**30}, "vocab_size must be a whole number"),
    "too many digits": ({"vocab_size": 10**5000}, "vocab_size .* not a number of 16610 bits"),
    "not finite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a number up to 1e"),
    "no theta": ({"rope_theta": 0}, "rope_theta must be above 0"),
    "no share": ({"partial_rotary_factor": 2}, "partial_rotary_factor must be above 0 and at most 1"),
    "no scale": ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be above 0"),
    "equal bounds of llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor must be greater",
    ),
    "yarn of one": ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_theta of yarn"),
    "yarn that shrinks": ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -9}}, "mscale"),
    "longrope of one": (
        {
            "max_position_embeddings": 8,
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 1},
        },
        "original_max_position_embeddings",
    ),
    "longrope of nothing": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0]}}, "short_factor"),
    "layer types": ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "layer_types": ["x"]}, "layer_types"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_field_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        parsed(**fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "does not exist"), ("{", "cannot be read"), ("[]", "expected a JSON object"), ("[" * 100_000, "cannot be read")],
    ids=["missing", "broken", "list", "deep"],
)
def test_invalid_config_file_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_json(tmp_path)


def test_gemma_3_turns_its_sliding_layers_otherwise() -> None:
    old = parsed(architectures=["Gemma3ForCausalLM"], sliding_window=8, sliding_window_pattern=2, rope_theta=5e5)
    assert old.ropes == (Rope(theta=10000.0), Rope(theta=5e5), Rope(theta=10000.0))
    kinds = {"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 3e3}}
    new = parsed(
        architectures=["Gemma3ForCausalLM"], sliding_window=8, sliding_window_pattern=2, rope_parameters=kinds, dtype="bfloat16"
    )
    assert new.ropes == (Rope(theta=3e3), Rope(theta=7e5), Rope(theta=3e3))


def test_some_layers_of_smollm3_do_not_turn() -> None:
    config = parsed(architectures=["SmolLM3ForCausalLM"], no_rope_layer_interval=2)
    assert config.ropes == (Rope(theta=2000000.0), None, Rope(theta=2000000.0))
    with pytest.raises(ModelError, match="no_rope_layers has 1"):
        parsed(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1])


def test_a_longrope_keeps_to_its_first_range() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8}
    fields = {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 512, "rope_scaling": rope}
    assert parsed(**fields, original_max_position_embeddings=128).max_position == 128
    with pytest.raises(ModelError, match="short_factor"):
        parsed(**{**fields, "rope_scaling": {"type": "longrope"}})


def test_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "torch_dtype": "bfloat16"}))
    assert parse_config(read_json(tmp_path)).dtype == "bfloat16"
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
        expected = {head // group for head in range(shard.heads.start, shard.heads.stop)}
        assert expected == set(range(shard.kv_heads.start, shard.kv_heads.stop))
    if world_size <= kv_heads:
        assert sum(shard.kv_heads.size for shard in shards) == kv_heads


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="5 exceeds the model's 4 attention heads"):
        partition(parsed(), 5)
    with pytest.raises(ModelError, match="MLP columns"):
        partition(parsed(intermediate_size=2), 3)


def test_rank_with_fewer_heads_gets_more_mlp() -> None:
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
    weights = [num_linear_weights(smol, shard) for shard in (first, second)]
    assert abs(weights[0] - weights[1]) < 0.01 * weights[0]


def test_the_families_are_those_that_the_tests_make() -> None:
    import transformers

    mapping: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {mapping[family] for family in tiny.FAMILIES} == set(FAMILIES)
