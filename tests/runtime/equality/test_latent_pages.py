"""Pages of latents give the tokens of `transformers` under every schedule. In float64, without near-ties."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.engine_config import KvCacheDtype
from phalanx_api.speculation import Tree
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.runtime.equality.groups import groups
from tests.runtime.equality.schedules import Disturbance
from tests.runtime.equality.windows import FULL, Run, generate, make_requests, reference, with_few_tokens
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import KINDS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build
from tests.runtime.tiny import INDEX_DIM, INDEXED, LATENT_DIM, LATENTS, save_tiny

BUILD = Build(dtype=torch.float64, num_pages=48)
FAMILIES = *LATENTS, INDEXED
NGRAM = SpeculationConfig(method="ngram", num_tokens=6, is_adaptive=False)
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family))


@pytest.fixture(scope="module")
def expected(models: Models) -> Callable[[str], dict[int, list[int]]]:
    """Returns the tokens of `transformers` by family."""
    return cache(lambda family: generate(models(family), greedy()))


def greedy() -> dict[int, wire.Request]:
    return {
        handle: msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, temperature=0.0))
        for handle, request in make_requests().items()
    }


@groups
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_shared_prefixes_change_no_token(
    models: Models, expected: Callable[[str], dict[int, list[int]]], family: str, pods: list[int], stages: int
) -> None:
    run = Run(Disturbance(budget=16), requests=greedy())
    ran = run.on(models(family), pods, replace(BUILD, num_pages=100, stages=stages), expected(family))
    assert ran.scheduler.sharing.hit_tokens > 100
    assert ran.scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@pytest.mark.parametrize("family", FAMILIES)
def test_preemptions_and_host_memory_change_no_token(
    models: Models, expected: Callable[[str], dict[int, list[int]]], family: str
) -> None:
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=2, requests=greedy())
    ran = run.on(models(family), [1], replace(BUILD, num_host_pages=60), expected(family))
    assert ran.scheduler.num_preemptions > 0 and ran.scheduler.sharing.hit_tokens > 0
    assert ran.scheduler.pool.host.counters.loaded > 0


@pytest.mark.parametrize("tree", [None, Tree([3, 2])], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["deepseek_v3", INDEXED])
def test_draft_tokens_change_no_token(models: Models, family: str, tree: Tree | None) -> None:
    folder, requests = models(family), {handle: with_few_tokens(make_requests(60)[handle]) for handle in (5, 8)}
    config = SchedulerConfig(speculation=NGRAM if tree is None else replace(NGRAM, tree=tree))
    ran = Run(config=config, requests=requests).on(folder, [1], BUILD, reference(folder, requests))
    assert 0 < ran.counter.num_accepted < ran.counter.num_proposed


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"), [(LATENTS[0], "int8"), (LATENTS[0], "fp8"), (LATENTS[0], "int4"), (INDEXED, "int8")]
)
def test_codes_of_latents_change_no_token_either(models: Models, family: str, kv_cache_dtype: KvCacheDtype) -> None:
    """Equal to undisturbed requests over the same codes, whose logprobs differ from those of plain pages."""
    folder, requests = models(family), make_requests()
    plain = reference(folder, requests, replace(FULL, kv_cache_dtype=kv_cache_dtype))
    run = Run(Disturbance(budget=24, lag=2, thief=5), requests=requests)
    ran = run.on(folder, [1], replace(BUILD, kv_cache_dtype=kv_cache_dtype), plain)
    assert ran.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 2)], ids=["one", "pp2"])
@pytest.mark.parametrize(("family", "dims"), [("deepseek_v3", 3 * LATENT_DIM), (INDEXED, 3 * LATENT_DIM + 2 * INDEX_DIM)])
def test_moved_requests_continue_with_equal_tokens(models: Models, family: str, dims: int, pods: list[int], stages: int) -> None:
    build = replace(BUILD, num_pages=120, stages=stages)
    with running_groups(models(family), [pods, pods], build) as field:
        submitted = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
        plain = undisturbed(field.mover, submitted)
        num_bytes = moved_back_and_forth(field.mover, submitted, plain)
        page_bytes = [runner.page_access().open().page_bytes for runner in field.groups[0].runners.values()]
    assert sum(page_bytes) == PAGE_SIZE * dims * 8
    assert num_bytes > 0 and num_bytes % sum(page_bytes) == 0
