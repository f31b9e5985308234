"""Models whose pages have latents, against `transformers` and the same models with the keys and values of all heads in pages."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.kv_cache.latents import sizes
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.generic import source
from phalanx_runtime.model.generic.latent import LatentProjection, keep_latents
from phalanx_runtime.model.generic.layers import AttentionCall, kv_layout, register
from phalanx_runtime.model.generic.load import make_empty_model
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import RankReady
from tests.architectures.table import PAGE, causal_classes, read
from tests.architectures.tiny import make_config
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, prompts, reference
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner, on_ranks, with_group
from tests.runtime.served import Served, serve
from tests.runtime.tiny import LATENT_DIM, LATENTS, save_tiny

LAYERS = 3
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", LATENTS)
def test_families_give_the_tokens_of_transformers(models: Models, family: str, world_size: int) -> None:
    """In float32, by the kernels that serve."""
    outputs = generate(models(family), [world_size], Build(), chunk=7, lag=2)
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("family", LATENTS)
def test_latents_give_the_logits_of_keys_and_values(models: Models, family: str) -> None:
    def answers(has_latents: bool) -> tuple[bool, list[Served]]:
        def work(runner: ModelRunner) -> tuple[bool, list[Served]]:
            return runner.model.kv.is_latent, serve(runner, requests(), ROOMY, SchedulerConfig(), runner.fitting)

        return on_ranks(models(family), [1], Build(torch.float64, num_pages=200, has_latents=has_latents), work)

    (is_latent, absorbed), (is_also, expanded) = answers(True), answers(False)
    assert is_latent and not is_also
    assert_equal(absorbed, expanded)


def test_configs_of_the_hub_give_equal_tokens(tmp_path: Path) -> None:
    """With scaled rotary embeddings, fields of the checkpoint's own code, and tensors of the layer for drafts."""
    folder = save_tiny(tmp_path / "model", "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    yarn = {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    config |= {
        "rope_theta": 10000,
        "rope_scaling": {**yarn, "original_max_position_embeddings": 16},
        "auto_map": {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (path,) = folder.glob("*.safetensors")
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.ones(8, 16)}, path, {"format": "pt"})
    outputs = generate(folder, [1], Build(), chunk=7, lag=2)
    assert compare(reference(folder, outputs), outputs).holds


def test_kernels_of_gpus_leave_latents_to_torch(models: Models) -> None:
    attention = TritonAttention()
    outputs = generate(models("deepseek_v3"), [1], Build(attention=attention))
    assert compare(reference(models("deepseek_v3"), outputs), outputs).holds
    assert attention.num_computed == 0


def test_a_zeroed_page_changes_the_tokens(models: Models) -> None:
    def tokens(spoil: bool) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate([DriverRequest(prompts()[-1])], 1)
            assert [len(cache.tensors) for cache in runner.caches] == [1] * LAYERS
            if spoil:
                runner.caches[0].k[driver.pages[0][2]] = 0
            return driver.resume(12)

        return on_ranks(models("deepseek_v3"), [1], Build(), work)

    assert tokens(spoil=False) != tokens(spoil=True)


@pytest.mark.parametrize("family", LATENTS)
def test_ranks_split_the_heads(models: Models, family: str) -> None:
    """Each has all latents."""

    def held(world_size: int) -> list[tuple[int, int, int]]:
        def rank(group: Any) -> tuple[int, int, int]:
            model: Any = make_model_runner(models(family), group, Build()).model
            return model.num_bytes, model.kv.kv_heads, model.kv.head_dims[0]

        return with_group([world_size], rank)

    ((whole, *_),) = held(1)
    parts = held(2)
    assert [part[1:] for part in parts] == [(1, LATENT_DIM)] * 2
    assert max(part[0] for part in parts) < 0.75 * whole


def loaded(folder: Path) -> RankReady:
    spec = with_settings(make_spec(folder, 0, 1), dtype="float32", kv_cache_memory_bytes=1 << 20)
    return load_rank(spec, SoloCollective(), torch.device("cpu"), System())[1]


def test_pages_have_the_latent_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with and without latents exchange no pages."""
    latent = loaded(models("deepseek_v3"))
    monkeypatch.setattr(source, "keep_latents", lambda *_: {})
    whole = loaded(models("deepseek_v3"))
    assert latent.memory is not None and latent.memory.kv_bytes_per_token == LAYERS * LATENT_DIM * 4
    assert whole.memory is not None and whole.memory.kv_bytes_per_token == LAYERS * 4 * 2 * 24 * 4
    assert latent.num_pages >= 6 * whole.num_pages
    assert "latent1x32x3" in latent.served.layout and "heads4x24x3" in whole.served.layout


def test_layers_without_latents_beside_others_are_refused() -> None:
    calls = [AttentionCall(4, 1, 32, None, is_latent=True), AttentionCall(4, 1, 32, None)]
    with pytest.raises(ModelError, match="only some of its layers have latents"):
        kv_layout(calls)


def test_another_kind_of_projection_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As would be a linear with its rows in another order."""
    absorb = LatentProjection.absorb
    monkeypatch.setattr(LatentProjection, "absorb", lambda self, q, key: absorb(self, q, key).flip(1))
    with pytest.raises(ModelError, match="its attention over latents gives other results"):
        loaded(models("deepseek_v3"))


def test_every_class_with_a_latent_keeps_it() -> None:
    """Of those that work; docs/kv-cache.md names them."""
    rows, text = read(PAGE.read_text()), (PAGE.parent / "kv-cache.md").read_text()
    found = []
    register()
    for class_name, model_type in causal_classes().items():
        config = make_config(model_type) if rows[class_name].outcome.status == "works" else None
        if config is not None and "kv_lora_rank" in {field.name for field in fields(config.get_text_config())}:
            assert keep_latents(make_empty_model(config, torch.float32, None), bool), class_name
            assert f"`{class_name}`" in text
            found.append(class_name)
    assert len(found) >= 14


def test_the_page_has_the_bytes_of_published_models() -> None:
    assert "\n".join(sizes()) in (PAGE.parent / "kv-cache.md").read_text()
