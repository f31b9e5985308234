"""Models that mix layers with a window and layers with full attention give the tokens of requests that keep all pages and parts.

As in `test_windows`, in float64: the reference keeps all pages of all layers, and has each request alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api.speculation import Tree
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_target
from tests.runtime.equality.groups import groups
from tests.runtime.equality.schedules import PLAIN, Disturbance, serve
from tests.runtime.equality.trees import make_config
from tests.runtime.equality.windows import FULL, LIMITS, Ran, Run, generate, make_requests, reference, with_few_tokens
from tests.runtime.lag import lagged
from tests.runtime.ranks import on_ranks
from tests.runtime.served import CountingRunner
from tests.runtime.tiny import WINDOW, save_tiny

MIXED = replace(FULL, window=WINDOW, num_pages=64, num_parts=36)
"""Twice as many pages as parts: requests run out of parts first."""
IN_HOST = replace(MIXED, num_host_pages=80, num_host_parts=60)
LAYERS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]},
    "gpt_oss": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
SPLIT = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
"""Of two pipeline stages, the first has windows in all layers, and the second in none."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "gemma3_text", **LAYERS["gemma3_text"])


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    return reference(model, make_requests())


def num_dropped(ran: Ran) -> int:
    parts = ran.scheduler.sharing.parts
    assert parts is not None
    return parts.num_dropped


@groups
def test_chunks_hits_and_copies_change_no_token(
    model: Path, expected: dict[int, list[int]], pods: list[int], stages: int
) -> None:
    ran = Run().on(model, pods, replace(MIXED, stages=stages), expected)
    assert num_dropped(ran) > 40
    assert ran.scheduler.sharing.hit_tokens > 150, "siblings share their prompt"
    assert ran.scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@pytest.mark.parametrize("first", ["windows", "full"])
def test_stages_of_one_kind_of_layers_change_no_token(tmp_path: Path, first: str) -> None:
    layers = {**SPLIT, "layer_types": SPLIT["layer_types"][:: 1 if first == "windows" else -1]}  # type: ignore[index]
    folder = save_tiny(tmp_path / "model", "gemma3_text", **layers)
    ran = Run().on(folder, [2], replace(MIXED, stages=2), reference(folder, make_requests()))
    assert num_dropped(ran) > 40 and ran.scheduler.sharing.hit_tokens > 150


@groups
def test_preemption_changes_no_token(model: Path, expected: dict[int, list[int]], pods: list[int], stages: int) -> None:
    """All pages without a holder, or all parts, are taken at random steps, so that hits lack pages or parts."""
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=2)
    ran = run.on(model, pods, replace(MIXED, stages=stages), expected)
    assert ran.scheduler.num_preemptions > 0
    assert num_dropped(ran) > 80 and ran.scheduler.sharing.hit_tokens > 0


def test_few_parts_serve_prompts_longer_than_them(model: Path, expected: dict[int, list[int]]) -> None:
    ran = Run(Disturbance(budget=16)).on(model, [1], replace(MIXED, num_parts=12), expected)
    assert ran.scheduler.limits.max_model_len == LIMITS.max_model_len > 12 * 8
    parts = ran.scheduler.sharing.parts
    assert parts is not None and parts.num_dropped > 40 and parts.num_evicted > 40


@pytest.mark.parametrize(
    ("family", "level"), [*product(LAYERS, ["auto"]), ("gemma2", "transformers"), ("gemma3_text", "transformers")]
)
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str, level: Any) -> None:
    folder = save_tiny(tmp_path / "model", family, **LAYERS[family])
    greedy = {handle: request for handle, request in make_requests().items() if handle % 2}
    ran = Run(requests=greedy).on(folder, [1], replace(MIXED, level=level), generate(folder, greedy))
    assert num_dropped(ran) > 20


def test_lost_parts_are_computed_again(model: Path, expected: dict[int, list[int]]) -> None:
    """Between two rounds all parts are evicted; the pages are found, and their tokens computed again into them."""
    request = {5: make_requests()[5]}

    def work(runner: ModelRunner) -> tuple[list[int], int]:
        scheduler = make_scheduler(lagged(replace(LIMITS, max_num_batched_tokens=24)), runner.pool)
        parts, hits = scheduler.sharing.parts, []
        assert parts is not None
        for num_evicted in (0, 0, parts.num_parts, 0):
            parts.evict(num_evicted)
            assert serve(runner, scheduler, request, Disturbance(budget=24)) == {5: expected[5]}
            hits.append(scheduler.sharing.hit_tokens)
        return hits, scheduler.pool.counters.hits

    hits, num_found = on_ranks(model, [1], MIXED, work)
    assert hits == [0, 129, 129, 257] and num_found == 3 * 16


@groups
def test_pages_and_parts_come_back_from_host_memory(
    model: Path, expected: dict[int, list[int]], pods: list[int], stages: int
) -> None:
    """All pages, or all parts, leave the device at random steps; both are copied back, not computed again."""
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=3)
    ran = run.on(model, pods, replace(IN_HOST, stages=stages), expected)
    host, host_parts = ran.scheduler.pool.host.counters, ran.scheduler.pool.host_parts.counters
    assert host.loaded > 10 and host_parts.loaded > 10
    without = run.on(model, pods, replace(MIXED, stages=stages), expected)
    assert ran.scheduler.sharing.hit_tokens > without.scheduler.sharing.hit_tokens


@pytest.mark.slow
@groups
def test_slots_for_both_grow_and_shrink(model: Path, expected: dict[int, list[int]], pods: list[int], stages: int) -> None:
    """One size decides both; pages and parts of removed slots move."""
    run = Run(Disturbance(budget=24, lag=2, thief=5, host_sizes=(60, 35, 80, 45)), rounds=3)
    ran = run.on(model, pods, replace(IN_HOST, stages=stages, min_host_pages=6), expected)
    host, host_parts = ran.scheduler.pool.host.counters, ran.scheduler.pool.host_parts.counters
    assert host.loaded > 5 and host_parts.loaded > 5
    assert host.moved > 0 and host_parts.moved > 0 and host_parts.resized > 10


@pytest.mark.parametrize("first", ["windows", "full"])
def test_host_memory_of_stages_of_one_kind_of_layers(tmp_path: Path, first: str) -> None:
    """A stage has either pages or parts in its host memory."""
    layers = {**SPLIT, "layer_types": SPLIT["layer_types"][:: 1 if first == "windows" else -1]}  # type: ignore[index]
    folder = save_tiny(tmp_path / "model", "gemma3_text", **layers)
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=3)
    ran = run.on(folder, [2], replace(IN_HOST, stages=2), reference(folder, make_requests()))
    assert ran.scheduler.pool.host.counters.loaded > 10 and ran.scheduler.pool.host_parts.counters.loaded > 10


def test_zeroed_part_in_host_memory_changes_tokens(model: Path, expected: dict[int, list[int]]) -> None:
    """The first rounds compute and store the parts that the prompt wants, the fourth loads them, and the last gets zeros."""
    request = {5: make_requests()[5]}

    def work(runner: ModelRunner) -> tuple[list[bool], int]:
        scheduler = make_scheduler(lagged(replace(LIMITS, max_num_batched_tokens=240)), runner.pool)
        answers = []
        for is_zeroed in (False, False, False, False, True):
            pages = scheduler.pool.allocate(scheduler.pool.num_pages)
            assert pages is not None
            scheduler.pool.release(pages)
            spoiling = Zeroing(runner) if is_zeroed else CountingRunner(runner)
            answers.append(serve(spoiling, scheduler, request, Disturbance(budget=240)) == {5: expected[5]})
        return answers, scheduler.pool.host_parts.counters.loaded

    answers, num_loaded = on_ranks(model, [1], IN_HOST, work)
    assert answers == [True, True, True, True, False] and num_loaded == 2 * 3, "a window is three parts, loaded twice"


class Zeroing(CountingRunner):
    """Gives zeros to the parts that a plan loads from host memory."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner)
        self._runner = inner

    def start(self, plan: StepPlan) -> None:
        loaded = [part for is_load, part, _ in plan.part_host_copies if is_load]
        for cache, window in zip(self._runner.caches, self._runner.model.kv.windows, strict=True):
            for tensor in cache.tensors if window is not None else ():
                tensor[loaded] = 0.0
        super().start(msgspec.structs.replace(plan, part_host_copies=[]) if loaded else plan)


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_draft_tokens_change_no_token(model: Path, tree: str) -> None:
    requests = {8: make_requests(60)[8], 5: make_requests(60)[5]}
    requests = {h: with_few_tokens(request) for h, request in requests.items()}
    speculation = SpeculationConfig(method="ngram", num_tokens=6, is_adaptive=False)
    run = Run(Disturbance(budget=30), SchedulerConfig(speculation=speculation), requests=requests)
    if tree == "tree":
        run = replace(run, config=SchedulerConfig(speculation=replace(speculation, tree=Tree([3, 2]))))
    ran = run.on(model, [1], MIXED, reference(model, requests))
    assert ran.counter.num_accepted > 0 and ran.counter.num_accepted < ran.counter.num_proposed
    assert num_dropped(ran) > 20


@pytest.mark.parametrize("method", ["draft", "self_draft"])
@pytest.mark.parametrize("thief", [None, 5], ids=["roomy", "preempted"])
def test_drafts_of_models_change_no_token(tmp_path: Path, method: Any, thief: int | None) -> None:
    """A draft model has pages of its own for all tokens, and a self-draft uses the first layers, which are of both kinds."""
    folder = save_target(tmp_path / "model", family="gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    settings = {"speculative_method": method}
    if method == "draft":
        settings["draft_dir"] = str(save_draft(folder, tmp_path / "draft", noise=0.03))
    build, requests = replace(IN_HOST, speculative=settings), make_requests()
    run = Run(Disturbance(budget=30, lag=2, thief=thief), make_config(method), rounds=2)
    ran = run.on(folder, [1], build, reference(folder, requests))
    assert 0 < ran.counter.num_accepted < ran.counter.num_proposed
    assert num_dropped(ran) > 40 and ran.scheduler.sharing.hit_tokens > 0


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_compressed_pages_change_no_token(model: Path, kv_cache_dtype: Any) -> None:
    requests = make_requests()
    plain = reference(model, requests, replace(FULL, kv_cache_dtype=kv_cache_dtype))
    run = Run(Disturbance(budget=24, lag=2, thief=5))
    ran = run.on(model, [1], replace(MIXED, kv_cache_dtype=kv_cache_dtype), plain)
    assert num_dropped(ran) > 40 and ran.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_device_steps_read_held_pages_and_parts_only(tmp_path: Path) -> None:
    """Decode steps on the device, by Triton's interpreter; pages and parts that no request holds are NaN."""
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = save_tiny(tmp_path / "model", "gemma3_text", **layers)
    requests = {8: make_requests(14)[8]}
    plain = reference(folder, requests)

    def work(runner: ModelRunner) -> tuple[dict[int, list[int]], int, int]:
        scheduler = make_scheduler(lagged(replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=32)), runner.pool)
        spoiling = Spoiling(runner, scheduler)
        answers = serve(spoiling, scheduler, requests, Disturbance(budget=32))
        parts, step = scheduler.sharing.parts, runner.device_step
        assert parts is not None and isinstance(step, DeviceStep)
        return answers, parts.num_dropped, step.graphs.num_replays.total()

    build = replace(MIXED, dtype=torch.float32, num_pages=16, num_parts=12, device_rows=2)
    answers, num_dropped, num_replayed = on_ranks(folder, [1], build, work)
    assert answers == plain
    assert num_dropped > 3 and num_replayed > 10


class Spoiling(CountingRunner):
    """Before each step, fills unheld pages and parts with NaN, or once a page or part that a request reads with zeros."""

    def __init__(self, inner: ModelRunner, scheduler: Scheduler, zeroed: str = "") -> None:
        super().__init__(inner)
        self._runner, self._scheduler, self._zeroed = inner, scheduler, zeroed
        self.num_filled = 0
        self._free: dict[bool, set[int]] = {True: set(), False: set()}

    def start(self, plan: StepPlan) -> None:
        held = {part: {p for r in self._scheduler.requests.values() for p in self._ids(r.pages, part)} for part in (True, False)}
        pool = self._runner.pool
        for is_part, count in ((False, pool.num_pages), (True, pool.num_parts)):
            free = set(range(count)) - held[is_part]
            if not self._zeroed:
                self._fill(self._free[is_part] - free, 0.0, is_part)  # attention multiplies unwritten slots by 0
                self._fill(free, float("nan"), is_part)
                self._free[is_part] = free
        for request in self._scheduler.requests.values():
            if self._zeroed and request.num_output > 3 and not self.num_filled:
                parts = self._scheduler.sharing.parts
                assert parts is not None
                first = request.pages.part_end - 2 if self._zeroed == "part" else 0
                page = request.pages.ids[first]
                self._fill([parts.part_of(page) if self._zeroed == "part" else page], 0.0, self._zeroed == "part")
        super().start(plan)

    def _ids(self, pages: Any, is_part: bool) -> list[int]:
        parts = self._scheduler.sharing.parts
        assert parts is not None
        return [parts.part_of(page) for page in pages.with_parts] if is_part else pages.ids

    def _fill(self, pages: Iterable[int], value: float, is_part: bool) -> None:
        layers = zip(self._runner.caches, self._runner.model.kv.windows, strict=True)
        tensors = [tensor for cache, window in layers if (window is not None) == is_part for tensor in cache.tensors]
        for page in pages:
            self.num_filled += 1
            for tensor in tensors:
                tensor[page] = value


def test_held_pages_and_parts_alone_are_read(model: Path, expected: dict[int, list[int]]) -> None:
    request = {5: make_requests()[5]}

    def work(runner: ModelRunner, zeroed: str) -> tuple[bool, int]:
        config = replace(LIMITS, max_num_batched_tokens=24)
        scheduler = make_scheduler(lagged(config), runner.pool, PLAIN)
        spoiling = Spoiling(runner, scheduler, zeroed)
        answers = serve(spoiling, scheduler, request, Disturbance(budget=24))
        return answers == {5: expected[5]}, spoiling.num_filled

    is_equal, num_filled = on_ranks(model, [1], MIXED, partial(work, zeroed=""))
    assert is_equal and num_filled > 100
    for zeroed in ("page", "part"):
        is_equal, num_filled = on_ranks(model, [1], MIXED, partial(work, zeroed=zeroed))
        assert not is_equal and num_filled == 1
