"""The fused decoder against greedy tokens of `transformers`, for each family, on one to three ranks."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_runtime.checkpoint.overrides import FolderOverlay
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.linear.cpu import NativeLinear
from phalanx_runtime.model.linear.linear import can_pack
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import NUM_TOKENS, as_bf16, generate, prompts, reference
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner, on_ranks, with_group
from tests.runtime.tiny import FAMILIES, Family, save_tiny

Models = Callable[[Family], Path]

SHAPES: dict[str, tuple[Family, dict[str, Any]]] = {
    "9 heads, 3 kv heads": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
    ),
    "1 kv head": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "half of each head rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [4.0] * 8,
            },
        },
    ),
    "tied and scaled": ("gemma2", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family))


@pytest.mark.parametrize("pods", [[1], [2], [3], [1, 1]], ids=["tp1", "tp2", "tp3", "tp2 over two pods"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers(models: Models, family: Family, pods: list[int]) -> None:
    outputs = generate(models(family), pods, Build())
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("pods", [[2], [3]], ids=["tp2", "tp3"])
@pytest.mark.parametrize(("family", "changes"), SHAPES.values(), ids=SHAPES.keys())
def test_shapes_give_the_tokens_of_transformers(tmp_path: Path, family: Family, changes: dict[str, Any], pods: list[int]) -> None:
    folder = save_tiny(tmp_path / "model", family, **changes)
    outputs = generate(folder, pods, Build())
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_overridden_config_gives_the_tokens_of_transformers(tmp_path: Path, family: Family) -> None:
    """YaRN extends 32 positions to 128; `transformers` gets the same fields in its own config."""
    import transformers

    folder = save_tiny(tmp_path / "model", family, max_position_embeddings=32)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    config: Any = transformers.AutoConfig.from_pretrained(theirs, rope_parameters=yarn, max_position_embeddings=128)
    config.save_pretrained(theirs)
    overlay = FolderOverlay({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    outputs = generate(overlay.apply(folder), [1], Build())
    outcome = compare(reference(theirs, outputs), outputs)
    assert outcome.holds, outcome
    assert not compare(reference(folder, outputs), outputs).holds, "the override changes tokens"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"intermediate_size": 40}, r"gate_proj.weight has shape \[96, 64\]; config.json implies \[40, 64\]"),
        ({"vocab_size": 100}, r"embed_tokens.weight has shape \[320, 64\]; config.json implies \[100, 64\]"),
        ({"num_hidden_layers": 9}, "tensor model.layers.3.input_layernorm.weight is missing"),
    ],
)
def test_an_override_that_contradicts_the_weights_is_refused(models: Models, overrides: dict[str, Any], reason: str) -> None:
    overlay = FolderOverlay(overrides)
    with pytest.raises(ModelError, match=reason):
        with_group([1], lambda group: make_model_runner(overlay.apply(models("llama")), group, Build()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_kernels_give_the_tokens_of_transformers(models: Models, family: Family) -> None:
    if not can_pack(torch.float32):
        pytest.skip("this processor has no packed layout")
    build = Build(kernels=Kernels(packed=True, transposed=True))
    outputs = generate(models(family), [1], build)
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("pods", [[1], [2]], ids=["tp1", "tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels_give_the_tokens_of_transformers(tmp_path: Path, family: Family, pods: list[int]) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    folder = as_bf16(save_tiny(tmp_path / "model", family))
    build = Build(kernels=Kernels(compiled=True))
    outputs = generate(folder, pods, build, chunk=7)
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome
    num_compiled = with_group([1], lambda group: compiled_parts(make_model_runner(folder, group, build)))[0]
    assert num_compiled, "no linear was compiled"


def test_tied_table_is_stored_once_and_equal_in_bf16(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    folder = save_tiny(tmp_path / "model", "llama", tie_word_embeddings=True)

    def run(compiled: bool) -> tuple[list[list[int]], Any]:
        build = Build(torch.bfloat16, Kernels(compiled=compiled))
        requests = [DriverRequest(prompt) for prompt in prompts()]

        def work(runner: Any) -> tuple[list[list[int]], Any]:
            return Driver(runner).generate(requests, 1), runner.model.embedding.weight

        return on_ranks(folder, [1], build, work)

    (plain, copied), (fused, shared) = run(False), run(True)
    assert isinstance(copied, torch.Tensor) and not isinstance(shared, torch.Tensor)
    assert sum(a == b for a, b in zip(plain, fused, strict=True)) >= len(plain) - 1, "bf16 may change one near-tie"


def compiled_parts(runner: Any) -> int:
    return sum(isinstance(part, NativeLinear) for layer in runner.model.layers for part in (layer.qkv, layer.o, layer.down))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_batching_gives_equal_tokens_in_float64(models: Models, family: Family) -> None:
    wide = Build(dtype=torch.float64)
    whole = generate(models(family), [1], wide)
    assert whole == [stream.tokens for stream in reference(models(family), whole, torch.float64)]
    assert generate(models(family), [1], wide, chunk=3) == whole, "chunked prefill"
    assert generate(models(family), [1], wide, lag=2) == whole, "prefill during decodes"
    assert generate(models(family), [1], wide, chunk=7, lag=500) == whole, "one by one"
    assert generate(models(family), [2], wide, chunk=5) == whole, "two ranks"
    dense = Build(dtype=torch.float64, attention=DenseAttention())
    assert generate(models(family), [1], dense, chunk=6, lag=1) == whole, "the reference implementation"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_zeroed_page_changes_the_tokens(models: Models, family: Family) -> None:
    requests = [DriverRequest(prompts()[-1])]

    def with_and_without(spoil: bool) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate(requests, 1)
            if spoil:
                runner.caches[0].k[driver.pages[0][2]] = 0
            return driver.resume(12)

        return on_ranks(models(family), [1], Build(), work)

    assert with_and_without(spoil=False) != with_and_without(spoil=True)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_norms_are_held_twice(models: Models, family: Family, world_size: int) -> None:
    def held(pods: list[int]) -> int:
        return sum(with_group(pods, lambda group: make_model_runner(models(family), group, Build()).model.num_bytes))

    assert held([world_size]) <= 1.02 * held([1])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_request_replayed_from_any_point_samples_equal_tokens(models: Models, temperature: float) -> None:
    requests = [
        DriverRequest(prompt, seed=11 + i, temperature=temperature, top_p=0.95, top_k=40) for i, prompt in enumerate(prompts())
    ]
    wide = Build(dtype=torch.float64)
    whole = on_ranks(models("llama"), [1], wide, lambda runner: Driver(runner).generate(requests, NUM_TOKENS))
    replayed = [
        DriverRequest(one.prompt, one.seed, temperature, 0.95, 40, delivered=tuple(output[: 3 * i]))
        for i, (one, output) in enumerate(zip(requests, whole, strict=True))
    ]
    assert on_ranks(models("llama"), [2], wide, lambda runner: Driver(runner).generate(replayed, NUM_TOKENS, chunk=9)) == whole
    greedy = on_ranks(
        models("llama"), [1], wide, lambda runner: Driver(runner).generate([DriverRequest(p) for p in prompts()], NUM_TOKENS)
    )
    assert whole != greedy
