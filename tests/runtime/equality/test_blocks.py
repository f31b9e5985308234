"""Layers whose tokens attend within blocks (Llama 4) hold the pages that can still be read, and change no token.

As in `test_windows` and `test_mixed_windows`, in float64: the reference keeps all pages, and has each request alone. Blocks of 20
tokens are no whole pages of 8.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.moves import MoveMode
from phalanx_api.speculation import Tree
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.runtime.equality.groups import groups
from tests.runtime.equality.schedules import Disturbance
from tests.runtime.equality.windows import FULL, Ran, Run, generate, make_requests, reference, with_few_tokens
from tests.runtime.moving_engines import running_groups, slow_clock
from tests.runtime.moving_requests import KINDS, MODES, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny

CHUNKED = "chunked_attention"
LAYERS = {"all": [CHUNKED] * 4, "some": [CHUNKED, CHUNKED, "full_attention", CHUNKED]}
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 96,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 0, 1],
    "attn_temperature_tuning": False,
}
BLOCK = 24
BUILDS = {
    "all": replace(FULL, window=BLOCK, num_pages=40, has_blocks=True),
    "some": replace(FULL, window=BLOCK, num_parts=36, has_blocks=True),
}
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models by the layers with blocks."""
    return cache(lambda kind: save_blocks(tmp_path_factory.mktemp(kind) / "model", kind))


@pytest.fixture(scope="module")
def expected(models: Models) -> Callable[[str], dict[int, list[int]]]:
    return cache(lambda kind: reference(models(kind), make_requests()))


def save_blocks(folder: Path, kind: str, block: int = BLOCK) -> Path:
    return save_tiny(folder, "llama4_text", **FIELDS, layer_types=LAYERS[kind], attention_chunk_size=block)


def num_dropped(ran: Ran) -> int:
    """Returns the pages, or parts, that requests freed before their end."""
    parts = ran.scheduler.sharing.parts
    return ran.num_dropped if parts is None else parts.num_dropped


@pytest.mark.parametrize("kind", LAYERS)
@groups
def test_chunks_hits_and_copies_change_no_token(
    models: Models, expected: Callable[[str], dict[int, list[int]]], pods: list[int], stages: int, kind: str
) -> None:
    ran = Run().on(models(kind), pods, replace(BUILDS[kind], stages=stages), expected(kind))
    assert num_dropped(ran) > 40
    assert ran.scheduler.sharing.hit_tokens > 150, "siblings share their prompt"
    assert ran.scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@pytest.mark.parametrize("kind", LAYERS)
def test_preemption_changes_no_token(models: Models, expected: Callable[[str], dict[int, list[int]]], kind: str) -> None:
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=2)
    ran = run.on(models(kind), [1], BUILDS[kind], expected(kind))
    assert ran.scheduler.num_preemptions > 0
    assert num_dropped(ran) > 80 and ran.scheduler.sharing.hit_tokens > 0


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("block", "window"), [(BLOCK, BLOCK), (20, 40)], ids=["whole pages", "split pages"])
def test_tokens_equal_those_of_transformers(tmp_path: Path, kind: str, block: int, window: int) -> None:
    folder = save_blocks(tmp_path / "model", kind, block)
    greedy = {handle: request for handle, request in make_requests().items() if handle % 2}
    ran = Run(requests=greedy).on(folder, [1], replace(BUILDS[kind], window=window), generate(folder, greedy))
    assert num_dropped(ran) > 20


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_draft_tokens_change_no_token(models: Models, tree: str, kind: str) -> None:
    requests = {h: with_few_tokens(make_requests(60)[h]) for h in (8, 5)}
    speculation = SpeculationConfig(method="ngram", num_tokens=6, is_adaptive=False)
    speculation = replace(speculation, tree=Tree([3, 2])) if tree == "tree" else speculation
    run = Run(Disturbance(budget=30), SchedulerConfig(speculation=speculation), requests=requests)
    ran = run.on(models(kind), [1], BUILDS[kind], reference(models(kind), requests))
    assert 0 < ran.counter.num_accepted < ran.counter.num_proposed
    assert num_dropped(ran) > 20


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_compressed_pages_change_no_token(models: Models, kv_cache_dtype: Any, kind: str) -> None:
    plain = reference(models(kind), make_requests(), replace(FULL, kv_cache_dtype=kv_cache_dtype))
    run = Run(Disturbance(budget=24, lag=2, thief=5))
    ran = run.on(models(kind), [1], replace(BUILDS[kind], kv_cache_dtype=kv_cache_dtype), plain)
    assert num_dropped(ran) > 40 and ran.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", LAYERS)
def test_pages_from_host_memory_change_no_token(
    models: Models, expected: Callable[[str], dict[int, list[int]]], kind: str
) -> None:
    build = replace(BUILDS[kind], num_host_pages=80, num_host_parts=60 if kind == "some" else 0)
    build = replace(build, num_pages=24) if kind == "all" else build
    ran = Run(Disturbance(budget=24, lag=2, thief=5), rounds=3).on(models(kind), [1], build, expected(kind))
    pool = ran.scheduler.pool
    assert (pool.host_parts if kind == "some" else pool.host).counters.loaded > 0 and num_dropped(ran) > 80


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_moves_send_what_can_be_read(models: Models, mode: MoveMode, kind: str) -> None:
    requests = [make_request(f"{name} {mode}", prompt=100, **KINDS[name]) for name in ("greedy", "seeded")]
    num_bytes = [sent(models(kind), requests, build, mode) for build in (FULL, BUILDS[kind])]
    assert 0 < num_bytes[1] < num_bytes[0] * 3 / 4


def sent(folder: Path, requests: list[wire.Request], build: Build, mode: MoveMode) -> int:
    """Returns the bytes that moves send. Moved requests share no page with others."""
    moved = [msgspec.structs.replace(request, cache_salt=f"{request.id} moved") for request in requests]
    roomy = replace(build, num_pages=120, num_parts=60 if build.num_parts else 0)
    with running_groups(folder, [[1], [1]], roomy, clock=slow_clock) as field:
        return moved_back_and_forth(field.mover, moved, undisturbed(field.mover, requests), [mode])
