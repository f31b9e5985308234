"""Compressed pages give the same tokens under every schedule: what is read of a page depends on its own tokens alone.

In float64, without near-ties, where keys and values of equal tokens have equal codes. Each test also runs with a lag.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api.engine_config import KvCacheDtype
from phalanx_api.speculation import Method, Speculation
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.equality.schedules import Disturbance, compare_runs
from tests.runtime.equality.trees import LIMITS, make_config
from tests.runtime.moving_engines import RULES, running_groups
from tests.runtime.moving_requests import KINDS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

DTYPES: tuple[KvCacheDtype, ...] = ("int8", "fp8", "int4")
dtypes = pytest.mark.parametrize("kv_cache_dtype", DTYPES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama")


def build(kv_cache_dtype: KvCacheDtype, **more: Any) -> Build:
    return Build(**{"dtype": torch.float64, "num_pages": 40, "kv_cache_dtype": kv_cache_dtype, **more})


@dtypes
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
def test_chunks_prefixes_and_copies_on_write_change_no_token(
    model: Path, kv_cache_dtype: KvCacheDtype, ranks: int, stages: int
) -> None:
    setup = build(kv_cache_dtype, stages=stages)
    scheduler = on_ranks(model, [ranks], setup, partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.sharing.hit_tokens > 3 * 28
    assert scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@dtypes
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_preemptions_change_no_token(tmp_path: Path, kv_cache_dtype: KvCacheDtype, family: str) -> None:
    """Also with sliding windows, and with softcaps."""
    folder = save_tiny(tmp_path / "model", family)
    disturbance = Disturbance(budget=24, lag=2, thief=5)
    scheduler = on_ranks(folder, [1], build(kv_cache_dtype), partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0


@dtypes
def test_any_model_of_transformers_has_compressed_pages(model: Path, kv_cache_dtype: KvCacheDtype) -> None:
    setup = build(kv_cache_dtype, level="transformers")
    scheduler = on_ranks(model, [1], setup, partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.pool.counters.copied > 0


def answers(folder: Path, setup: Build, config: SchedulerConfig, pods: list[int]) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), ROOMY, config, runner.fitting), counter

    return on_ranks(folder, pods, setup, work)


@dtypes
def test_two_ranks_give_the_tokens_of_one(model: Path, kv_cache_dtype: KvCacheDtype) -> None:
    one, two = (answers(model, build(kv_cache_dtype, num_pages=200), SchedulerConfig(), [ranks])[0] for ranks in (1, 2))
    assert_equal(two, one)


@dtypes
def test_codes_are_read(model: Path, kv_cache_dtype: KvCacheDtype) -> None:
    """Rounded keys and values change logprobs."""
    plain, rounded = (answers(model, build(name, num_pages=200), SchedulerConfig(), [1])[0] for name in ("auto", kv_cache_dtype))
    details = [[one.details for one in some] for some in (plain, rounded)]
    assert details[0] != details[1]


@dtypes
@pytest.mark.parametrize(("method", "limits"), [("draft", "together"), ("draft", "preempted"), ("self_draft", "preempted")])
def test_draft_trees_give_the_tokens_of_plain_decoding(
    tmp_path: Path, kv_cache_dtype: KvCacheDtype, method: Method, limits: str
) -> None:
    """A self-draft reads and writes the compressed pages of its target's first layers."""
    settings: dict[str, Any] = {"speculative_method": method}
    if method == "draft":
        folder = save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=2)
        settings["draft_dir"] = str(save_draft(folder, tmp_path / "draft", noise=0.03))
    else:
        folder = save_target(tmp_path / "model")
        settings["draft_exit"] = str(save_exit(folder, tmp_path / "exit"))
    bounds, num_pages = LIMITS[limits]
    plain, _ = answers(folder, build(kv_cache_dtype, num_pages=200), SchedulerConfig(), [1])
    setup = build(kv_cache_dtype, num_pages=num_pages, speculative=settings)

    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), bounds, make_config(method), runner.fitting), counter

    served, counter = on_ranks(folder, [1], setup, work)
    assert_equal(served, plain)
    assert counter.num_branched > 0, "accepted branches were relocated"
    assert 0.1 < counter.num_accepted / counter.num_proposed < 0.9
    if limits == "preempted":
        assert len(counter.admitted) > len(served)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "pods", "stages"),
    [("int8", [2], 1), ("fp8", [1], 1), ("int4", [1], 1), ("int4", [1, 1], 2)],
    ids=["int8-tp2", "fp8", "int4", "int4-pp2"],
)
def test_moved_requests_continue_with_equal_tokens(
    model: Path, kv_cache_dtype: KvCacheDtype, pods: list[int], stages: int
) -> None:
    with running_groups(model, [pods, pods], build(kv_cache_dtype, num_pages=120, stages=stages)) as field:
        router = field.mover
        submitted = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded", "schema")]
        plain = undisturbed(router, submitted)
        assert moved_back_and_forth(router, submitted, plain) > 0


def test_moved_speculating_requests_continue_with_equal_tokens(model: Path) -> None:
    few: dict[str, Any] = {"allowed_token_ids": [3, 4, 5]}
    rules = replace(RULES, speculation=SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False))
    with running_groups(model, [[1], [1]], build("int4", num_pages=120), rules=rules) as field:
        router = field.mover
        submitted = [make_request("greedy", presence_penalty=0.1, **few), make_request("seeded", temperature=0.5, **few)]
        plain = undisturbed(router, [msgspec.structs.replace(one, speculation=Speculation("none")) for one in submitted])
        assert moved_back_and_forth(router, submitted, plain) > 0
