"""Models of `transformers` with paged attention against `transformers` and the fused decoder; unsupported models."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.generic.source import GenericModel
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.source import open_model
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, prompts, reference
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner, on_ranks, with_group
from tests.runtime.tiny import FAMILIES, MIXTURES, save_tiny

Models = Callable[[str], Path]
GENERIC = Build(level="transformers")
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""Divisible by three ranks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family, **HEADS))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_families_give_the_tokens_of_transformers(models: Models, family: str, world_size: int) -> None:
    outputs = generate(models(family), [world_size], GENERIC)
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_both_levels_and_transformers_give_the_same_tokens(models: Models, family: str) -> None:
    fused, generic = (generate(models(family), [1], build) for build in (Build(level="fused"), GENERIC))
    expected = reference(models(family), fused)
    assert compare(expected, fused).holds and compare(expected, generic).holds


@pytest.mark.parametrize("build", [Build(level="fused"), GENERIC], ids=["fused", "generic"])
def test_tied_checkpoint_has_either_tensor_or_two(tmp_path: Path, build: Build) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    outputs = generate(folder, [2], build)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert generate(folder, [2], build) == outputs, "the stored head has other numbers than the embedding"
    assert compare(reference(folder, outputs), outputs).holds
    tied = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    outputs, tensors = generate(tied, [2], build), load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tied / "model.safetensors", {"format": "pt"})
    assert generate(tied, [2], build) == outputs, "the head alone is stored"


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_every_way_of_batching_gives_the_same_tokens(models: Models, family: str) -> None:
    wide = Build(dtype=torch.float64, level="transformers")
    whole = generate(models(family), [1], wide)
    assert generate(models(family), [1], wide, chunk=3) == whole, "chunked prefill"
    assert generate(models(family), [1], wide, lag=2) == whole, "prefill during decodes"
    assert generate(models(family), [1], wide, chunk=7, lag=500) == whole, "one by one"


def test_a_zeroed_page_changes_the_tokens(models: Models) -> None:
    def tokens(spoil: bool) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate([DriverRequest(prompts()[-1])], 1)
            if spoil:
                runner.caches[0].k[driver.pages[0][2]] = 0
            return driver.resume(12)

        return on_ranks(models("mixtral"), [1], GENERIC, work)

    assert tokens(spoil=False) != tokens(spoil=True)


def test_the_level_is_chosen_by_the_architecture(models: Models) -> None:
    def level(family: str, build: Build) -> type:
        return with_group([1], lambda group: type(make_model_runner(models(family), group, build).model))[0]

    assert level("llama", Build()) is Decoder
    assert level("llama", GENERIC) is GenericModel
    assert level("qwen2_moe", Build()) is GenericModel
    with pytest.raises(ModelError, match="Qwen2MoeForCausalLM is not supported"):
        open_model(models("qwen2_moe"), "fused")


def test_ranks_share_the_parameters(models: Models) -> None:
    def held(world_size: int) -> list[int]:
        return with_group([world_size], lambda group: make_model_runner(models("mixtral"), group, GENERIC).model.num_bytes)

    (whole,) = held(1)
    assert max(held(2)) < 0.7 * whole and sum(held(2)) < 1.1 * whole


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention of its own": ("xlm", {"emb_dim": 64, "n_layers": 2, "n_heads": 4}, "AttentionInterface"),
}


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_attention_is_refused_with_the_reason(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    folder = save_tiny(tmp_path / "model", kind, **changes)
    with pytest.raises(ModelError, match=reason):
        generate(folder, [1], GENERIC)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("T5ForConditionalGeneration", "t5", "model_type t5 is no causal language model of transformers"),
        ("WhisperForConditionalGeneration", "whisper", "it is an encoder-decoder"),
        ("BartForConditionalGeneration", "bart", "it is an encoder-decoder"),
        ("PaliGemmaForConditionalGeneration", "paligemma", "model_type paligemma is no causal language model"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(tmp_path: Path, name: str, kind: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": kind}))
    with pytest.raises(ModelError, match=f"architecture {name} is not supported: .*; through transformers: {reason}"):
        open_model(tmp_path)


def test_unsplittable_model_is_refused_with_the_reason(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="4 is more than the model's 3 KV heads"):
        generate(models("mixtral"), [4], GENERIC)
    folder = save_tiny(tmp_path / "model", "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=256)
    with pytest.raises(ModelError, match="plan"):
        generate(folder, [2], GENERIC)


def test_int8_weights_are_refused(models: Models) -> None:
    with pytest.raises(ModelError, match="quantization"):
        generate(models("qwen2_moe"), [1], Build(kernels=Kernels(precision="int8")))


def with_code(source: Path, folder: Path, **fields: Any) -> Path:
    """Returns `folder` as the checkpoint `source` with code that leaves a file when it runs. `fields`: of config.json."""
    shutil.copytree(source, folder)
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code, **fields}))
    return folder


def test_code_of_a_known_class_is_never_run(models: Models, tmp_path: Path) -> None:
    """As in the checkpoints of DeepSeek V2 and V3: the classes of `transformers` compute it."""
    folder = with_code(models("qwen2_moe"), tmp_path / "model")
    assert generate(folder, [1], GENERIC) == generate(models("qwen2_moe"), [1], GENERIC)
    assert not (folder / "ran").exists()


def test_a_model_that_needs_its_code_is_refused(models: Models, tmp_path: Path) -> None:
    folder = with_code(models("qwen2_moe"), tmp_path / "model", model_type="own", architectures=["OwnForCausalLM"])
    with pytest.raises(ModelError, match="has no class for it, and the code of the checkpoint"):
        open_model(folder)
    assert not (folder / "ran").exists()
