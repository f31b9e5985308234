"""Pages that come back from host memory give the tokens of pages that were computed here."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import HostResize, PoolShape, StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.model.source import ModelImpl
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.tiers.host_pages import NO_HOST_PAGES, HostCopies
from tests.runtime.drafts import save_draft
from tests.runtime.equality.requests import FIELDS, ROOMY, assert_equal, requests
from tests.runtime.equality.schedules import LIMITS, Disturbance, compare_runs, make_requests
from tests.runtime.equality.schedules import serve as run_requests
from tests.runtime.equality.trees import make_config
from tests.runtime.late_copies import LateCopies
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

SIZES = 20, 8, 14, 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama")


def build(**more: Any) -> Build:
    return Build(**{"dtype": torch.float64, "num_pages": 20, "num_host_pages": 30, **more})


def repeat(folder: Path, setup: Build, disturbance: Disturbance, pods: list[int]) -> Scheduler:
    """Runs each request three times; its pages leave the device in between."""
    scheduler = on_ranks(folder, pods, setup, partial(compare_runs, disturbance, num_rounds=3))
    counters = scheduler.pool.host.counters
    assert counters.stored > 0
    assert counters.loaded > 0
    return scheduler


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
def test_loaded_pages_change_no_token(model: Path, ranks: int, stages: int) -> None:
    scheduler = repeat(model, build(stages=stages), Disturbance(budget=24, lag=3), [ranks])
    assert scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


def test_a_small_host_tier_evicts_and_changes_no_token(model: Path) -> None:
    scheduler = repeat(model, build(num_host_pages=6), Disturbance(budget=24, lag=2), [1])
    assert scheduler.pool.host.counters.evicted > 0


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
def test_a_tier_that_grows_and_shrinks_changes_no_token(model: Path, ranks: int, stages: int) -> None:
    setup = build(num_host_pages=80, min_host_pages=6, stages=stages)
    scheduler = repeat(model, setup, Disturbance(budget=24, lag=3, host_sizes=SIZES), [ranks])
    host = scheduler.pool.host
    assert host.counters.resized > 20 and host.counters.moved > 5
    assert host.counters.evicted > 0


@pytest.mark.parametrize("seed", [1, 5])
def test_preempted_requests_load_their_pages(model: Path, seed: int) -> None:
    scheduler = repeat(model, build(), Disturbance(budget=24, lag=2, thief=seed), [1])
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_compressed_pages_load_as_they_are(model: Path, kv_cache_dtype: str) -> None:
    repeat(model, build(kv_cache_dtype=kv_cache_dtype), Disturbance(budget=24, lag=3), [1])


def test_any_model_of_transformers_loads_pages(model: Path) -> None:
    repeat(model, build(level="transformers"), Disturbance(budget=24, lag=3), [1])


@pytest.mark.parametrize("family", ["gemma2"])
def test_sliding_windows_read_loaded_pages(tmp_path: Path, family: str) -> None:
    repeat(save_tiny(tmp_path / "model", family), build(), Disturbance(budget=24, lag=3), [1])


class SwappedSlots(CountingRunner):
    """Loads each page from the slot of another one."""

    def start(self, plan: StepPlan) -> None:
        num_slots = self.pool.num_host_pages
        swapped = [(is_load, page, (slot + is_load) % num_slots) for is_load, page, slot in plan.host_copies]
        super().start(msgspec.structs.replace(plan, host_copies=swapped))


def test_loaded_pages_are_read(model: Path) -> None:
    """Pages of other prompts give other tokens."""

    def work(runner: ModelRunner, kind: type[CountingRunner]) -> list[dict[int, list[int]]]:
        counter = kind(runner)
        scheduler = make_scheduler(LIMITS, runner.pool)
        answers = [run_requests(counter, scheduler, make_requests(), Disturbance(lag=3)) for _ in range(3)]
        assert counter.num_loaded > 0
        return answers

    right, wrong = (on_ranks(model, [1], build(), partial(work, kind=kind)) for kind in (CountingRunner, SwappedSlots))
    assert right[0] == right[1] == right[2]
    assert wrong[2] != wrong[0]


@pytest.mark.parametrize(("level", "ranks"), [("auto", 1), ("auto", 2), ("transformers", 1)])
def test_layers_wait_for_their_own_pages(model: Path, level: ModelImpl, ranks: int) -> None:
    """The pages of a layer are loaded when the layer needs them; if they were not, tokens would differ."""

    def work(runner: ModelRunner, opened: list[LateCopies], ignores_waits: bool) -> list[dict[int, list[int]]]:
        for copies in opened:
            copies.ignores_waits = ignores_waits
        scheduler = make_scheduler(LIMITS, runner.pool)
        answers = []
        unrelated = {i: msgspec.structs.replace(make_requests()[i], prompt=list(range(i, i + 45))) for i in range(3)}
        for _ in range(2):
            answers.append(run_requests(CountingRunner(runner), scheduler, unrelated, Disturbance()))
            scheduler.pool.evict_ahead(scheduler.pool.num_pages)
        return answers

    def run(ignores_waits: bool) -> list[dict[int, list[int]]]:
        opened: list[LateCopies] = []

        def open_late(model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[LateCopies, HostCopies]:
            opened.append(LateCopies(caches, pool))
            return opened[-1], NO_HOST_PAGES

        setup = build(level=level, num_pages=40, num_host_pages=80, open_host_pages=open_late)
        answers = on_ranks(model, [ranks], setup, partial(work, opened=opened, ignores_waits=ignores_waits))
        assert all(copies.num_late > 0 for copies in opened) is not ignores_waits
        return answers

    (first, again), wrong = run(ignores_waits=False), run(ignores_waits=True)
    assert first == again == wrong[0] != wrong[1]


class UnmovedPages(CountingRunner):
    """Leaves pages of removed slots where they were."""

    def start(self, plan: StepPlan) -> None:
        resize = plan.host_resize
        super().start(msgspec.structs.replace(plan, host_resize=resize and HostResize(resize.num_slots)))


def test_moved_pages_are_read(model: Path) -> None:
    """What is in their new slot otherwise gives other tokens."""

    def work(runner: ModelRunner, kind: type[CountingRunner]) -> list[dict[int, list[int]]]:
        scheduler = make_scheduler(LIMITS, runner.pool)
        disturbance = Disturbance(lag=3, host_sizes=SIZES)
        return [run_requests(kind(runner), scheduler, make_requests(), disturbance) for _ in range(4)]

    setup = build(num_host_pages=80, min_host_pages=6)
    right, wrong = (on_ranks(model, [1], setup, partial(work, kind=kind)) for kind in (CountingRunner, UnmovedPages))
    assert right[0] == right[1] == right[2] == right[3]
    assert right != wrong


def test_draft_tokens_follow_loaded_pages(tmp_path: Path) -> None:
    """A loaded page has no keys of the draft model, which computes them again."""
    folder = save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=2)
    draft = save_draft(folder, tmp_path / "draft", noise=0.03)
    settings = {"speculative_method": "draft", "draft_dir": str(draft)}
    setup = build(num_pages=24, num_host_pages=60, speculative=settings)

    def work(runner: ModelRunner, config: SchedulerConfig) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, [*requests(), *requests()], ROOMY, config, runner.fitting), counter

    plain, _ = on_ranks(folder, [1], build(num_pages=200, num_host_pages=0), partial(work, config=SchedulerConfig()))
    served, counter = on_ranks(folder, [1], setup, partial(work, config=make_config("draft")))
    assert_equal(served, plain, [*FIELDS, *FIELDS])
    assert counter.num_loaded > 0
    assert 0.1 < counter.num_accepted / counter.num_proposed < 0.9
