"""Rotary embeddings: frequencies and scales equal those of `transformers`, whichever fields config.json has."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from phalanx_runtime.model.config import parse_config
from phalanx_runtime.model.rope import Rope, rope_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
HEAD_DIM = 16
Fields = dict[str, Any]
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "longrope": {"factor": (None, 0.5, 8.0), "attention_factor": (None, 1.25)},
    "yarn": {"factor": (4.0,), "mscale": (None, 0.7), "mscale_all_dim": (None, 0.9), "truncate": (None, False)},
    "llama3": {"factor": (4.0,)},
    "linear": {"factor": (4.0,)},
}
"""By type: values of its fields, None for none."""
CONSTANT: dict[str, Fields] = {
    "longrope": {"short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [2.0] * 8},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def choices(kind: str) -> Iterator[tuple[Fields, Fields]]:
    """Yields fields beside the parameters, and the parameters."""
    own, original = CHOICES[kind], "original_max_position_embeddings"
    for values in product(*own.values(), (None, 64), (None, 128)):
        given = {name: value for name, value in zip([*own, original], values[:-1], strict=True) if value is not None}
        outer = {} if values[-1] is None else {original: values[-1]}
        yield outer, {"rope_type": kind, **CONSTANT.get(kind, {}), **given}


def rope_of(fields: Fields) -> Rope:
    (rope,) = parse_config({**BASE, **fields}).ropes
    assert rope is not None
    return rope


@pytest.mark.parametrize("kind", CHOICES)
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for outer, parameters in choices(kind):
        rope = rope_of({**outer, "rope_theta": 5000.0, "rope_scaling": parameters})
        assert rope_of({**outer, "rope_parameters": {**parameters, "rope_theta": 5000.0}}) == rope
        config: Any = LlamaConfig(**BASE, **outer, rope_parameters={**parameters, "rope_theta": 5000.0})
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        assert rope.kind == kind and rope.scale == pytest.approx(scale), (outer, parameters)
        torch.testing.assert_close(rope_frequencies(rope, HEAD_DIM), frequencies, rtol=1e-5, atol=0)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_scaling_changes_the_parameters_beside_it() -> None:
    plain = {"rope_type": "default", "rope_theta": 7.5e5, "partial_rotary_factor": 0.5}
    fields = {"rope_theta": 7.5e5, "partial_rotary_factor": 0.5, "rope_scaling": YARN}
    assert rope_of({"rope_parameters": plain, "rope_scaling": YARN}) == rope_of(fields)
    assert rope_of({"rope_parameters": plain, "rope_scaling": None}) == Rope(theta=7.5e5, share=0.5)
    sections = {"mrope_section": [4, 2, 2]}
    scaled = rope_of({"rope_parameters": {"rope_theta": 7.0, **sections}, "rope_scaling": YARN})
    assert scaled == rope_of({"rope_theta": 7.0, "rope_scaling": {**sections, **YARN}}) and len(scaled.axes) == 8


def test_scaling_leaves_sliding_layers_as_they_are() -> None:
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}, "sliding_attention": {"rope_theta": 3e3}}
    gemma = {**BASE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, "sliding_window_pattern": 2}
    ropes = parse_config({**gemma, "rope_parameters": kinds, "rope_scaling": {"type": "linear", "factor": 8.0}}).ropes
    assert ropes == (Rope(theta=3e3), Rope(theta=7e5, kind="linear", factor=8.0))
