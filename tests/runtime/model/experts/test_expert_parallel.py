"""Whole experts on each rank: tokens, parameters and the partition; models that cannot."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import parse_config
from phalanx_runtime.model.experts.sparse import ExpertList, SparseMlp
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import num_linear_weights, partition
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import as_bf16, generate, reference
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import Build, make_model_runner, with_group
from tests.runtime.tiny import save_tiny

PARALLEL = Build(has_parallel_experts=True)
WIDE = Build(torch.float64, has_parallel_experts=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family))


def local_experts(runner: Any) -> list[int]:
    found = [layer.down.experts for layer in runner.model.layers if isinstance(layer.down, SparseMlp)]
    return [len(experts.experts) for experts in found if isinstance(experts, ExpertList)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_whole_experts_on_each_rank_equal_one_rank(models: Any, family: str, world_size: int) -> None:
    outputs = generate(models(family), [world_size], PARALLEL, chunk=7)
    assert compare(reference(models(family), outputs), outputs).holds
    assert generate(models(family), [world_size], WIDE) == generate(
        models(family), [1], replace(WIDE, has_parallel_experts=False)
    )
    counts = with_group([world_size], lambda group: local_experts(make_model_runner(models(family), group, PARALLEL)))
    assert [rank[0] for rank in counts] == {1: [4], 2: [2, 2], 3: [2, 1, 1]}[world_size]


def test_a_rank_without_experts_takes_part(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "mixtral", num_local_experts=2, num_experts_per_tok=1)
    outputs = generate(folder, [3], PARALLEL)
    assert compare(reference(folder, outputs), outputs).holds


def test_compiled_experts_on_two_stages_equal_transformers(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    folder = as_bf16(save_tiny(tmp_path / "model", "mixtral"))
    outputs = generate(folder, [4], replace(PARALLEL, kernels=Kernels(compiled=True), stages=2), chunk=7)
    assert compare(reference(folder, outputs), outputs).holds


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_ranks_share_the_parameters(models: Any, family: str) -> None:
    def held(world_size: int) -> int:
        return sum(with_group([world_size], lambda group: make_model_runner(models(family), group, PARALLEL).model.num_bytes))

    assert held(1) <= held(2) <= 1.02 * held(1)


@settings(max_examples=60, deadline=None)
@given(num_experts=st.integers(1, 40), world_size=st.integers(1, 8), inner=st.integers(8, 70), is_parallel=st.booleans())
def test_ranks_have_each_column_of_each_expert_once(num_experts: int, world_size: int, inner: int, is_parallel: bool) -> None:
    config = parse_config(
        {
            "architectures": ["MixtralForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": inner,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "vocab_size": 100,
            "num_local_experts": num_experts,
            "num_experts_per_tok": 1,
        }
    )
    assert config.mixture is not None
    config = replace(config, mixture=replace(config.mixture, is_parallel=is_parallel))
    shards = partition(config, world_size)
    held = [
        (expert, column)
        for shard in shards
        for expert in range(shard.experts.start, shard.experts.stop)
        for column in range(shard.expert_mlp.start, shard.expert_mlp.stop)
    ]
    assert len(held) == len(set(held)) == num_experts * inner
    router = 2 * 64 * num_experts
    total = num_linear_weights(config, partition(config, 1)[0]) - router
    assert sum(num_linear_weights(config, shard) - router for shard in shards) == total


def test_the_setting_reaches_the_ranks(models: Any) -> None:
    assert EngineConfig().enable_expert_parallel is False

    def work(group: Any) -> list[int]:
        spec = with_settings(make_spec(models("mixtral"), group.rank, group.world_size), enable_expert_parallel=True)
        runner, _ = load_rank(spec, group, torch.device("cpu"), System())
        return local_experts(runner)

    assert with_group([2], work) == [[2, 2, 2], [2, 2, 2]]


def test_models_without_experts_are_refused(models: Any) -> None:
    with pytest.raises(ModelError, match="--enable-expert-parallel needs a model with experts"):
        open_model(models("llama"), has_parallel_experts=True)
    with pytest.raises(ModelError, match="in the fused decoder"):
        open_model(models("mixtral"), "transformers", has_parallel_experts=True)
    with pytest.raises(ModelError, match="Qwen2MoeForCausalLM is not supported"):
        open_model(models("qwen2_moe"), has_parallel_experts=True)
