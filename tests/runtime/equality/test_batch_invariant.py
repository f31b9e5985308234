"""With --batch-invariant a request in bf16 gets the tokens and the bits of logprobs that it gets alone."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.speculation import Tree
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.native.library import library
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit
from tests.runtime.equality.requests import requests
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import with_group
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
LIBRARY = library()
needs_kernel = pytest.mark.skipif(LIBRARY is None or not LIBRARY.has_bf16_dot, reason="this processor has no bf16 kernel")
ROOMY = Limits(max_model_len=768, max_num_seqs=12, max_num_batched_tokens=1024)
SIZES: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 1024}


def save(folder: Path, family: str) -> Path:
    """Saves a model of the family, with a sliding window if it has one."""
    return save_tiny(folder, family, **SIZES, **({"sliding_window": 70} if family == "mistral" else {}))


@pytest.fixture(scope="module", params=["qwen2", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param) / "model", request.param)


def make_requests() -> list[wire.Request]:
    """Returns a long request, two with a common prefix of 80 tokens, a repetitive one, and one per sampling mode."""
    common = [(7 * at + 3) % 40 for at in range(40)] * 2
    longest = [(11 * at * at + 5) % 250 for at in range(700)]
    more: list[tuple[list[int], dict[str, Any]]] = [
        (longest, {"temperature": 0.0}),
        (common, {"temperature": 0.0}),
        ([*common, 9], {"temperature": 0.9}),
        ([3, 4, 5, 3, 4, 5, 3, 4], {"temperature": 0.6, "allowed_token_ids": [3, 4, 5]}),
    ]
    own = [
        wire.Request(
            id=f"more{n}",
            epoch=1,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=40, seed=n, logprobs=2, **fields),
        )
        for n, (prompt, fields) in enumerate(more)
    ]
    longer = [msgspec.structs.replace(one.sampling, max_tokens=50) for one in requests()]
    return own + [msgspec.structs.replace(one, sampling=sampling) for one, sampling in zip(requests(), longer, strict=True)]


def load(folder: Path, group: Collective | None = None, **settings: Any) -> ModelRunner:
    fields = {"dtype": "bfloat16", "page_size": 16, "max_model_len": 768, "kv_cache_memory_bytes": 4 << 20, **settings}
    group = group or SoloCollective()
    spec = with_settings(make_spec(folder, group.rank, group.world_size), batch_invariant=True, **fields)
    return load_rank(spec, group, CPU, System())[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Served]:
    """Results of each request alone, without draft tokens."""
    runner = load(folder)
    return [serve(runner, [one], ROOMY, SchedulerConfig(prefix_caching=False), runner.fitting)[0] for one in make_requests()]


def chain_config(method: Any, num_tokens: int = 4, tree: Tree | None = None) -> SchedulerConfig:
    return SchedulerConfig(
        speculation=SpeculationConfig(
            method=method,
            num_tokens=num_tokens,
            is_adaptive=False,
            draft_methods=frozenset({method}),
            tree=tree or Tree(),
            allows_trees=False,
        )
    )


CASES: dict[str, tuple[Limits, SchedulerConfig, dict[str, Any]]] = {
    "all at once": (ROOMY, SchedulerConfig(), {}),
    "in chunks": (Limits(max_model_len=768, max_num_seqs=9, max_num_batched_tokens=37), SchedulerConfig(), {}),
    "one by one": (Limits(max_model_len=768, max_num_seqs=1, max_num_batched_tokens=300), SchedulerConfig(), {}),
    "preempted": (Limits(max_model_len=768, max_num_seqs=12, max_num_batched_tokens=256), SchedulerConfig(), {"pages": 50}),
    "lookups": (ROOMY, chain_config("ngram"), {}),
    "lookups that would branch": (ROOMY, chain_config("ngram", 6, Tree([3, 2])), {}),
    "drafts": (Limits(max_model_len=768, max_num_seqs=9, max_num_batched_tokens=64), chain_config("draft"), {"draft": 0.02}),
    "first layers": (ROOMY, chain_config("self_draft"), {"exit": True}),
}


@needs_kernel
@pytest.mark.parametrize(("limits", "config", "more"), CASES.values(), ids=CASES.keys())
def test_tokens_and_logprobs_are_those_of_a_request_alone(
    folder: Path, alone: list[Served], tmp_path: Path, limits: Limits, config: SchedulerConfig, more: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {}
    if "draft" in more:
        draft = save_draft(folder, tmp_path / "draft", noise=more["draft"])
        settings = {"speculative_method": "draft", "draft_dir": str(draft)}
    elif "exit" in more:
        settings = {"speculative_method": "self_draft", "draft_exit": str(save_exit(folder, tmp_path / "exit"))}
    elif "pages" in more:
        settings = {"kv_cache_memory_bytes": more["pages"] * 16 * 2 * 2 * 32 * 2 * 3}
    runner = load(folder, **settings)
    counter = CountingRunner(runner)
    served = serve(counter, make_requests(), limits, config, runner.fitting)
    for one, other in zip(served, alone, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish)
        assert one.details == other.details, "bitwise"
    if config.speculation.method != "none":
        assert 0 < counter.num_accepted < counter.num_proposed and counter.num_branched == 0
    if "pages" in more:
        assert len(counter.admitted) > len(served), "requests were preempted"


@needs_kernel
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_compressed_pages_are_batch_invariant(folder: Path, kv_cache_dtype: str) -> None:
    """In chunks with draft tokens, and preempted: there are pages for hardly more than the longest request."""
    roomy = load(folder, kv_cache_dtype=kv_cache_dtype)
    runner = load(folder, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=50 * (4 << 20) // roomy.pool.num_pages)
    submitted = make_requests()
    alone = [serve(roomy, [one], ROOMY, SchedulerConfig(prefix_caching=False), roomy.fitting)[0] for one in submitted]
    limits, counter = Limits(max_model_len=768, max_num_seqs=9, max_num_batched_tokens=37), CountingRunner(runner)
    together = serve(counter, submitted, limits, chain_config("ngram"), runner.fitting)
    assert [(one.tokens, one.details) for one in together] == [(one.tokens, one.details) for one in alone], "bitwise"
    assert 0 < counter.num_accepted < counter.num_proposed and counter.num_chunks > len(submitted)
    assert len(counter.admitted) > len(submitted), "requests were preempted"


@needs_kernel
@pytest.mark.parametrize("stages", [1, 2], ids=["tp2", "pp2"])
def test_several_ranks_equal_one_rank(folder: Path, tmp_path: Path, stages: int) -> None:
    draft = save_draft(folder, tmp_path / "draft", noise=0.02)
    settings = {"speculative_method": "draft", "draft_dir": str(draft), "pipeline_parallel_size": stages}

    def work(group: Collective) -> tuple[list[Served], list[Served], int]:
        runner = load(folder, group, **settings)
        if group.rank:
            runner.follow()
            return [], [], 0
        alone = [serve(runner, [one], ROOMY, SchedulerConfig(prefix_caching=False), runner.fitting)[0] for one in make_requests()]
        counter = CountingRunner(runner)
        limits = Limits(max_model_len=768, max_num_seqs=9, max_num_batched_tokens=64)
        served = serve(counter, make_requests(), limits, chain_config("draft"), runner.fitting)
        runner.dismiss()
        return served, alone, counter.num_accepted

    served, alone, accepted = with_group([2], work)[0]
    assert [(one.tokens, one.details) for one in served] == [(one.tokens, one.details) for one in alone]
    assert accepted > 0


@needs_kernel
@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("llama", {"dtype": "float32"}, "the attention kernel needs bf16"),
        ("llama", {"page_size": 8}, "pages of a multiple of 16"),
        ("qwen3", {}, "query and key norms"),
        ("gemma", {}, "logit softcap|activation"),
        ("mixtral", {}, "torch routes its experts"),
        ("llama", {"quantization": "fp8"}, "its weights are in codes"),
        ("llama", {"quantization": "int4"}, "its weights are in codes"),
        ("llama", {"model_impl": "transformers"}, "only models of the fused decoder"),
    ],
)
def test_unsupported_shape_is_refused(tmp_path: Path, family: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=f"batch-invariant: .*{why}"):
        load(save(tmp_path / "model", family), **fields)
