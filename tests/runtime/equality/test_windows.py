"""Requests that drop the pages which no layer reads any more give the tokens of requests that keep all pages.

In float64, without near-ties, with windows shorter than the prompts. The reference keeps all pages and has each request alone,
its prompt in one step, nothing shared.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.moves import Arrived, MoveMode
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.speculation import Tree
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.groups import groups
from tests.runtime.equality.schedules import PLAIN, Disturbance, serve
from tests.runtime.equality.windows import FULL, LIMITS, Run, generate, make_requests, reference, with_few_tokens
from tests.runtime.lag import lagged
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import KINDS, MODES, moved_back_and_forth, undisturbed
from tests.runtime.moving_requests import make_request as make_moved
from tests.runtime.ranks import PAGE_SIZE, on_ranks
from tests.runtime.served import CountingRunner
from tests.runtime.tiny import WINDOW, save_tiny

WINDOWED = replace(FULL, window=WINDOW, num_pages=40)
LOCAL_GEMMA3: dict[str, Any] = {"layer_types": ["sliding_attention"] * 3}
"""A Gemma 3 without its layers of full attention: local rotary embeddings, four norms, a window in all layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "mistral")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    return reference(model, make_requests())


@groups
def test_chunks_hits_and_copies_change_no_token(
    model: Path, expected: dict[int, list[int]], pods: list[int], stages: int
) -> None:
    ran = Run().on(model, pods, replace(WINDOWED, stages=stages), expected)
    assert ran.num_dropped > 40
    assert ran.scheduler.sharing.hit_tokens > 150, "siblings share their prompt"
    assert ran.scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@groups
def test_preemption_changes_no_token(model: Path, expected: dict[int, list[int]], pods: list[int], stages: int) -> None:
    """All pages without a holder are taken at random steps, so that hits lack their first pages."""
    run = Run(Disturbance(budget=24, lag=2, thief=5), rounds=2)
    ran = run.on(model, pods, replace(WINDOWED, stages=stages), expected)
    assert ran.scheduler.num_preemptions > 0
    assert ran.num_dropped > 80 and ran.scheduler.sharing.hit_tokens > 0


def test_small_pool_serves_prompts_longer_than_itself(model: Path, expected: dict[int, list[int]]) -> None:
    build = replace(WINDOWED, num_pages=12)
    ran = Run(Disturbance(budget=16)).on(model, [1], build, expected)
    assert ran.scheduler.limits.max_model_len == LIMITS.max_model_len > 12 * 8
    assert ran.num_dropped > 40


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("level", ["auto", "transformers"])
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str, level: Any) -> None:
    changes = LOCAL_GEMMA3 if family == "gemma3_text" else {}
    folder = save_tiny(tmp_path / "model", family, **changes)
    greedy = {handle: request for handle, request in make_requests().items() if handle % 2}
    ran = Run(requests=greedy).on(folder, [1], replace(WINDOWED, level=level), generate(folder, greedy))
    assert ran.num_dropped > 20


def test_hits_without_their_first_pages_change_no_token(model: Path, expected: dict[int, list[int]]) -> None:
    """Between two rounds the pages that a prompt dropped first are evicted; later requests start after the window."""
    request = {5: make_requests()[5]}

    def work(runner: ModelRunner) -> int:
        scheduler = make_scheduler(lagged(replace(LIMITS, max_num_batched_tokens=24)), runner.pool)
        assert serve(runner, scheduler, request, Disturbance(budget=24)) == {5: expected[5]}
        keys = scheduler.sharing.make_keys(request[5]).extend(request[5].prompt)
        while scheduler.pool.find(keys[0]) is not None:
            page = scheduler.pool.allocate(scheduler.pool.free_pages - scheduler.pool.cached_pages + 1)
            scheduler.pool.release(page or [])
        before = scheduler.sharing.hit_tokens
        assert serve(runner, scheduler, request, Disturbance(budget=24)) == {5: expected[5]}
        assert scheduler.pool.find(keys[0]) is None, "it computed no page before the window"
        return scheduler.sharing.hit_tokens - before

    assert on_ranks(model, [1], replace(WINDOWED, num_pages=24), work) == 129


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_draft_tokens_change_no_token(model: Path, tree: str) -> None:
    requests = {8: make_requests(60)[8], 5: make_requests(60)[5]}
    requests = {h: with_few_tokens(request) for h, request in requests.items()}
    speculation = SpeculationConfig(method="ngram", num_tokens=6, is_adaptive=False)
    run = Run(Disturbance(budget=30), SchedulerConfig(speculation=speculation), requests=requests)
    if tree == "tree":
        run = replace(run, config=SchedulerConfig(speculation=replace(speculation, tree=Tree([3, 2]))))
    ran = run.on(model, [1], WINDOWED, reference(model, requests))
    assert ran.counter.num_accepted > 0 and ran.counter.num_accepted < ran.counter.num_proposed
    assert ran.num_dropped > 20


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_compressed_pages_change_no_token(model: Path, kv_cache_dtype: Any) -> None:
    requests = make_requests()
    plain = reference(model, requests, replace(FULL, kv_cache_dtype=kv_cache_dtype))
    run = Run(Disturbance(budget=24, lag=2, thief=5))
    ran = run.on(model, [1], replace(WINDOWED, kv_cache_dtype=kv_cache_dtype), plain)
    assert ran.num_dropped > 40 and ran.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)], ids=["one", "pp2"])
def test_pages_from_host_memory_change_no_token(model: Path, expected: dict[int, list[int]], ranks: int, stages: int) -> None:
    build = replace(WINDOWED, num_pages=24, num_host_pages=30, stages=stages)
    ran = Run(Disturbance(budget=24, lag=3), rounds=3).on(model, [ranks], build, expected)
    counters = ran.scheduler.pool.host.counters
    assert counters.loaded > 0 and counters.stored > 0 and ran.num_dropped > 80


class Spoiling(CountingRunner):
    """Before each step, fills pages that no request holds with NaN, or once the first page that a request reads with zeros."""

    def __init__(self, inner: ModelRunner, scheduler: Scheduler, zeroes: bool) -> None:
        super().__init__(inner)
        self._runner, self._scheduler, self._zeroes = inner, scheduler, zeroes
        self.num_filled = 0
        self._free: set[int] = set()

    def start(self, plan: StepPlan) -> None:
        if self._zeroes:
            self._fill(self._zeroed(), 0.0)
        else:
            free = set(self._scheduler.pool.state().free)
            self._fill(self._free - free, 0.0)  # attention multiplies slots that are not written yet by 0
            self._fill(free, float("nan"))
            self._free = free
        super().start(plan)

    def _fill(self, pages: Iterable[int], value: float) -> None:
        for page in pages:
            self.num_filled += 1
            for tensor in (tensor for cache in self._runner.caches for tensor in cache.tensors):
                tensor[page] = value

    def _zeroed(self) -> list[int]:
        windowed = self._scheduler.sharing.windowed
        assert windowed is not None
        requests = [request for request in self._scheduler.requests.values() if request.num_output > 3 and not self.num_filled]
        return [request.pages.ids[windowed.window.first_page(request.num_computed - 1)] for request in requests]


def test_pages_of_the_window_alone_are_read(model: Path, expected: dict[int, list[int]]) -> None:
    request = {5: make_requests()[5]}

    def work(runner: ModelRunner, zeroes: bool) -> tuple[bool, int]:
        config = replace(LIMITS, max_num_batched_tokens=24)
        scheduler = make_scheduler(lagged(config), runner.pool, PLAIN)
        spoiling = Spoiling(runner, scheduler, zeroes)
        answers = serve(spoiling, scheduler, request, Disturbance(budget=24))
        return answers == {5: expected[5]}, spoiling.num_filled

    is_equal, num_filled = on_ranks(model, [1], WINDOWED, partial(work, zeroes=False))
    assert is_equal and num_filled > 100
    is_equal, num_filled = on_ranks(model, [1], WINDOWED, partial(work, zeroes=True))
    assert not is_equal and num_filled == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 1), ([1, 1], 2)], ids=["one", "tp2", "pp2"])
def test_moves_send_what_can_be_read(model: Path, mode: MoveMode, pods: list[int], stages: int) -> None:
    """A request of 100 tokens moves with the pages of its window."""
    requests = [make_moved(f"{kind} {mode}", prompt=100, **KINDS[kind]) for kind in ("greedy", "seeded")]
    num_bytes = []
    for build in (replace(FULL, num_pages=120, stages=stages), replace(WINDOWED, num_pages=120, stages=stages)):
        with running_groups(model, [pods, pods], build) as field:
            plain = undisturbed(field.mover, requests)
            tokens = [stream.tokens for stream in plain]
            num_bytes.append(moved_back_and_forth(field.mover, with_salt(requests), plain, [mode]))
    assert tokens == [stream.tokens for stream in plain]
    assert 0 < num_bytes[1] < num_bytes[0] / 2


def test_pulls_send_what_can_be_read(model: Path) -> None:
    requests = with_salt([make_moved(kind, prompt=100, **KINDS[kind]) for kind in ("greedy", "seeded")])
    num_bytes = []
    for build in (replace(FULL, num_pages=120), replace(WINDOWED, num_pages=120)):
        with running_groups(model, [[1], [1]], build) as field:
            plain = undisturbed(field.mover, requests)
            for request, expected in zip(requests, plain, strict=True):
                keys = PrefixKeys(root_key("tiny", "", request.tenant, request.cache_salt), PAGE_SIZE).extend(request.prompt)
                stream, arrived = field.mover.pull(request, keys, 0, 1)
                assert isinstance(arrived, Arrived) and arrived.num_computed == 96
                num_bytes.append(arrived.num_bytes)
                field.mover.until(lambda stream=stream: stream.finish is not None)  # type: ignore[misc]
                assert stream.tokens == expected.tokens
            field.mover.settle()
    assert 0 < sum(num_bytes[2:]) < sum(num_bytes[:2]) / 2


def test_pulls_send_the_window_from_host_memory(model: Path) -> None:
    request, *others = with_salt([make_moved(f"{number}", prompt=100) for number in range(5)])
    with running_groups(model, [[1], [1]], replace(WINDOWED, num_pages=40, num_host_pages=80)) as field:
        (plain,) = undisturbed(field.mover, [request])
        undisturbed(field.mover, others)
        holder = field.groups[0].loop
        assert holder is not None
        pool = holder.scheduler.pool
        keys = PrefixKeys(root_key("tiny", "", request.tenant, request.cache_salt), PAGE_SIZE).extend(request.prompt)
        assert pool.find(keys[-1]) is None and keys[-1] in pool.host
        stream, arrived = field.mover.pull(request, keys, 0, 1, len(keys) * PAGE_SIZE)
        assert isinstance(arrived, Arrived) and arrived.num_computed == 96
        field.mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens and pool.host.counters.sent > 0
        field.mover.settle()


def with_salt(requests: list[wire.Request]) -> list[wire.Request]:
    """Lets the requests share no page with others."""
    return [msgspec.structs.replace(request, cache_salt=f"{request.id} {id(requests)}") for request in requests]


@pytest.mark.slow
def test_device_steps_read_held_pages_only(tmp_path: Path) -> None:
    """Decode steps on the device, by Triton's interpreter; pages that no request holds are NaN."""
    folder = save_tiny(tmp_path / "model", "mistral", num_hidden_layers=1)
    requests = {8: make_requests(14)[8]}
    plain = reference(folder, requests)

    def work(runner: ModelRunner) -> tuple[dict[int, list[int]], int, int]:
        scheduler = make_scheduler(lagged(replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=32)), runner.pool)
        spoiling = Spoiling(runner, scheduler, zeroes=False)
        answers = serve(spoiling, scheduler, requests, Disturbance(budget=32))
        windowed, step = scheduler.sharing.windowed, runner.device_step
        assert windowed is not None and isinstance(step, DeviceStep)
        return answers, windowed.num_dropped, step.graphs.num_replays.total()

    build = replace(WINDOWED, dtype=torch.float32, num_pages=16, device_rows=2)
    answers, num_dropped, num_replayed = on_ranks(folder, [1], build, work)
    assert answers == plain
    assert num_dropped > 3 and num_replayed > 10
