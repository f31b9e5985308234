"""Load reports of an engine, field by field."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.cost import attention_work
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.kv.hot_prefixes import HotPrefixes, counted_depths
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.step.draft_paths import DraftedPath, fill_paths
from tests.runtime.fake_runner import FakeRunner, make_request, next_token

LIMITS = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32, max_waiting=4)
PROMPT = [(7 * i * i) % 50 for i in range(40)]


class Engine:
    """A scheduler with pages of 4 tokens and fake ranks; a step takes a second."""

    def __init__(self, num_pages: int = 100, limits: Limits = LIMITS) -> None:
        self.runner = FakeRunner(num_pages, 4)
        self.scheduler = make_scheduler(limits, self.runner.pool, SchedulerConfig(eviction_policy="lru"))
        self.now = 0.0

    def submit(self, handle: int, request: wire.Request) -> Refusal | wire.Finished | None:
        return self.scheduler.submit(handle, request, self.now)

    def step(self, wall_s: float = 1.0) -> wire.Load:
        """Returns the report after a step of `wall_s`."""
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.now += wall_s
        self.scheduler.commit(self.runner.run(plan), wall_s)
        return self.load()

    def load(self) -> wire.Load:
        return self.scheduler.load(self.now)

    def finish(self) -> wire.Load:
        while not self.scheduler.is_idle():
            self.step()
        return self.load()


def test_reports_are_numbered_and_name_the_newest_handle() -> None:
    engine = Engine()
    assert (engine.load().sequence, engine.load().last_handle) == (1, 0)
    engine.submit(3, make_request(4, 2))
    engine.submit(4, make_request(300, 2))
    load = engine.load()
    assert (load.sequence, load.last_handle) == (3, 4), "a refused request counts"
    assert load.max_num_batched_tokens == 32


def test_prompt_tokens_are_counted_without_cached_ones() -> None:
    engine = Engine(limits=replace(LIMITS, max_num_seqs=1))
    engine.submit(1, make_request(PROMPT, 2))
    assert (engine.load().waiting_prompt_tokens, engine.load().waiting_pages) == (40, 10)
    engine.step()
    assert (engine.load().waiting_prompt_tokens, engine.load().running_prompt_tokens) == (0, 8)
    assert engine.load().prompt_attention == attention_work(40, 32)
    engine.submit(2, make_request([*PROMPT, 1, 2, 3, 4], 2))
    load = engine.load()
    assert load.waiting_prompt_tokens == 4, "the other ten pages are in a plan"
    assert load.waiting_pages == 1
    assert load.prompt_attention == attention_work(40, 32) + attention_work(44, 40)
    engine.finish()
    assert engine.load().prompt_attention == 0
    engine.submit(3, make_request([*PROMPT, 1, 2, 3, 4, 5, 6], 2))
    load = engine.load()
    assert (load.waiting_prompt_tokens, load.waiting_pages) == (2, 12), "cached pages without a holder are free"


def test_burst_of_equal_prompts_counts_as_one() -> None:
    engine = Engine(limits=replace(LIMITS, max_waiting=100))
    for handle in range(8):
        engine.submit(handle, make_request(PROMPT, 2, seed=handle))
    load = engine.step()
    assert (load.running, load.waiting) == (2, 6)
    assert load.waiting_prompt_tokens == 6 * 4, "the page with the last token is not shared yet"
    assert load.running_prompt_tokens == (40 - 16) + 4


def test_the_oldest_wait_restarts_after_a_preemption() -> None:
    engine = Engine(num_pages=6, limits=replace(LIMITS, max_num_seqs=2))
    for handle in range(2):
        engine.submit(handle, make_request(6, 10, seed=handle))
    waits = []
    while not engine.scheduler.is_idle():
        load = engine.step()
        waits.append((load.preemptions, load.oldest_wait_s))
    assert load.preemptions > 0
    first = next(wait_s for preemptions, wait_s in waits if preemptions)
    assert first == 1.0, "not since its arrival"
    assert load.oldest_wait_s == 0.0


def test_recomputed_tokens_are_counted() -> None:
    engine = Engine(num_pages=6, limits=replace(LIMITS, max_num_seqs=3))
    requests = {handle: make_request(6, 10, seed=handle) for handle in range(3)}
    for handle, request in requests.items():
        engine.submit(handle, request)
    load = engine.finish()
    computed = sum(sum(plan.counts) for plan in engine.runner.plans)
    needed = sum(6 + 10 - 1 for _ in requests)
    assert load.preemptions > 0
    assert load.recomputed_tokens == computed - needed > 0


def test_refusals_of_a_full_queue_are_counted() -> None:
    engine = Engine()
    for handle in range(6):
        engine.submit(handle, make_request(8, 2, seed=handle))
    engine.submit(7, make_request(300, 2))
    assert engine.load().refusals == 2


def test_longest_step_since_the_last_report_is_reported() -> None:
    engine = Engine()
    engine.submit(1, make_request(40, 30))
    assert [engine.step(wall_s).step_s for wall_s in (1.0, 3.0)] == pytest.approx([1.0, 2.0])
    assert engine.load().prompt_tokens_per_step == pytest.approx(20.0)
    for _ in range(100):
        load = engine.step(0.5) if not engine.scheduler.is_idle() else engine.load()
    assert load.step_s == pytest.approx(0.5, rel=0.5)
    engine.submit(2, make_request(4, 4))
    engine.scheduler.commit(engine.runner.run(engine.scheduler.schedule(engine.now) or pytest.fail()), 9.0)
    engine.scheduler.commit(engine.runner.run(engine.scheduler.schedule(engine.now) or pytest.fail()), 0.1)
    assert engine.load().longest_step_s == 9.0
    assert engine.load().longest_step_s == 0.0


def test_mean_output_follows_finished_requests() -> None:
    engine = Engine()
    for handle, length in enumerate((4, 8)):
        engine.submit(handle, make_request(4, length, seed=handle))
    assert engine.finish().mean_output_tokens == 6.0


def test_steps_to_full_predicts_page_exhaustion() -> None:
    engine = Engine(num_pages=150)
    assert engine.load().steps_to_full is None
    for handle in range(3):
        engine.submit(handle, make_request(8, 240, seed=handle))
    assert (engine.step().steps_to_full or 0) < 50, "new requests are expected to continue"
    for _ in range(150):
        late = engine.step()
    assert late.steps_to_full is not None
    steps = 0
    while engine.scheduler.pool.free_pages:
        engine.step()
        steps += 1
    assert steps <= late.steps_to_full <= steps + 4, "within one page"


def test_pages_do_not_run_out_where_requests_end_before() -> None:
    engine = Engine(num_pages=60)
    engine.submit(1, make_request(8, 220))
    for _ in range(60):
        load = engine.step()
    assert load.steps_to_full is None, "a request alone fits"
    engine.submit(2, make_request(8, 40, seed=2))
    while (load := engine.step()).running > 1:
        if load.context_tokens > 120:
            assert load.steps_to_full is None or load.steps_to_full > 100, "the second request ends before"
    assert engine.scheduler.num_preemptions == 0


def test_exhaustion_is_near_before_the_first_preemption() -> None:
    engine = Engine(num_pages=12, limits=replace(LIMITS, max_num_seqs=3))
    for handle in range(3):
        engine.submit(handle, make_request(6, 40, seed=handle))
    seen_at = None
    for step in range(200):
        if seen_at is None and engine.scheduler.is_preemption_near():
            seen_at = step
        if engine.step().preemptions:
            break
    assert seen_at is not None and 0 < step - seen_at <= 8


def keys_of(prefix: str, pages: int) -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(pages)]


def test_depths_grow_by_a_half_at_most() -> None:
    assert list(counted_depths(16)) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert list(counted_depths(0)) == []


def test_longest_shared_prefix_is_reported_with_its_share() -> None:
    prefixes = HotPrefixes()
    for i in range(400):
        if i % 2:
            prefixes.add([*keys_of("system", 12), *keys_of(f"own{i}-", 4)], 300)
        else:
            prefixes.add(keys_of(f"alone{i}-", 16), 300)
    [first] = [prefix for prefix in prefixes.heaviest() if prefix.token_share > 0.1]
    assert first.key == b"system11"
    assert first.pages == 12
    assert 0.4 < first.token_share <= 0.5


def test_two_branches_of_a_prefix_are_reported() -> None:
    prefixes = HotPrefixes()
    for i in range(100):
        prefixes.add([*keys_of("root", 2), *keys_of(f"branch{i % 2}-", 2), *keys_of(f"own{i}-", 9)], 100)
    reported = {prefix.key: round(prefix.token_share, 1) for prefix in prefixes.heaviest() if prefix.token_share > 0.2}
    assert reported == {b"root1": 1.0, b"branch0-1": 0.5, b"branch1-1": 0.5}


def test_reported_shares_are_lower_bounds_up_to_eight() -> None:
    prefixes = HotPrefixes()
    for i in range(3000):
        prefixes.add(keys_of(f"{i % 700}-", 3), 50)
    reported = prefixes.heaviest()
    assert len(reported) <= 8
    assert all(prefix.token_share <= 1 / 700 + 1e-9 for prefix in reported)


def test_prefix_load_decays() -> None:
    prefixes = HotPrefixes()
    prefixes.decay(0.0)
    for _ in range(10):
        prefixes.add(keys_of("old", 2), 100)
    prefixes.decay(300.0)
    for i in range(10):
        prefixes.add(keys_of("new", 2), 10 + i)
    assert prefixes.heaviest()[0].key == b"new1"
    assert prefixes.heaviest()[0].token_share > 0.9


def test_prefixes_are_reported_by_cache_keys() -> None:
    engine = Engine()
    for handle in range(12):
        engine.submit(handle, make_request([*PROMPT[:16], handle, handle, handle, handle, 9], 1, seed=handle))
        engine.finish()
    [first, *_] = engine.load().prefixes
    found = engine.scheduler.pool.match([*engine.scheduler.pool.keys()])
    assert first.pages == 4 and first.key in engine.scheduler.pool.keys() and found is not None
    assert first.token_share > 0.6


class RightDrafts(FakeRunner):
    """Drafts are always right."""

    def fill_drafts(self, plan: StepPlan) -> StepPlan:
        drafted: list[DraftedPath] = []
        for path in plan.paths:
            row, start = plan.rows[path.request], plan.starts[path.request]
            slots = [self._slots[self._slot(row, position)] for position in range(start)] + [
                plan.tokens[sum(plan.counts[: path.request])]
            ]
            context = [token for token in slots if token is not None]
            for _ in range(path.depth):
                context.append(next_token(context, self._seeds[row]))
            drafted.append(DraftedPath(context[start + 1 :]))
        return fill_paths(plan, drafted)


def test_several_tokens_per_step_exhaust_pages_sooner() -> None:
    """A step gives four tokens and takes 1.5 s: the predicted time to exhaustion is right."""
    engine = Engine(num_pages=150)
    engine.runner = RightDrafts(150, 4)
    speculation = SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=frozenset({"draft"}))
    engine.scheduler = make_scheduler(LIMITS, engine.runner.pool, SchedulerConfig(eviction_policy="lru", speculation=speculation))
    for handle in range(3):
        engine.submit(handle, make_request(8, 240, seed=handle))
    for _ in range(35):
        late, pressure = engine.step(1.5), engine.scheduler.pressure(100.0)
    assert pressure is not None and late.steps_to_full is not None
    assert pressure.step_s == pytest.approx(1.5 / 4), "the time between tokens"
    predicted_s, start_s = pressure.steps_to_full * pressure.step_s, engine.now
    while engine.scheduler.pool.free_pages:
        engine.step(1.5)
    assert engine.now - start_s == pytest.approx(predicted_s, abs=4 * 1.5)
    assert engine.now - start_s < 0.5 * late.steps_to_full * 1.5, "a step is not one token"


def test_speedup_of_tokens_is_reported() -> None:
    engine = Engine(num_pages=100)
    engine.runner = RightDrafts(100, 4)
    speculation = SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=frozenset({"draft"}))
    engine.scheduler = make_scheduler(LIMITS, engine.runner.pool, SchedulerConfig(speculation=speculation))
    for handle in range(6):
        engine.submit(handle, msgspec.structs.replace(make_request(8, 60, seed=handle), speculation=Speculation("none")))
    while engine.scheduler.load(0).running or engine.scheduler.load(0).waiting:
        load = engine.step(1.0)
    assert load.speedup == 1.0, "without draft tokens a step is one token"
    engine.submit(9, make_request(8, 200, seed=9))
    for _ in range(30):
        load = engine.step(2.0)
    assert 1.5 < load.speedup < 2.5, "four tokens in steps of twice the time"


def test_heaviest_prefixes_are_found_once_and_follow_changes() -> None:
    read, rng = HotPrefixes(), random.Random(3)
    changes: list[Callable[[HotPrefixes], None]] = []
    for at in range(60):
        prompt, tokens = keys_of(f"{rng.randrange(9)}-", rng.randrange(1, 9)), rng.randrange(1, 200)
        is_prompt = rng.random() < 0.5
        changes.append(partial(_add_prompt, prompt, tokens) if is_prompt else partial(_decay, at * rng.choice((0.1, 2.0))))
        changes[-1](read)
        unread = HotPrefixes()
        for change in changes:
            change(unread)
        assert read.heaviest() == unread.heaviest()
        assert read.heaviest() is read.heaviest()


def _add_prompt(keys: list[bytes], tokens: int, prefixes: HotPrefixes) -> None:
    prefixes.add(keys, tokens)


def _decay(now: float, prefixes: HotPrefixes) -> None:
    prefixes.decay(now)
