"""Prefix sharing: equal prompts of a burst are computed once; pages with another salt are never shared."""

from dataclasses import replace

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.speculation import Tree
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.reservations import Reservation
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_builder import FirstWrite, StepBuilder
from tests.runtime.core.speculation.speculating import make_engine
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
LRU = SchedulerConfig(eviction_policy="lru")
PROMPT = [(7 * i * i) % 50 for i in range(39)]


class Engine:
    """A scheduler with fake ranks, and their results."""

    def __init__(self, num_pages: int = 100, limits: Limits = LIMITS, config: SchedulerConfig = LRU) -> None:
        self.runner = FakeRunner(num_pages, 4)
        self.scheduler: Scheduler = make_scheduler(limits, self.runner.pool, config)
        self.finished: dict[int, wire.Finished] = {}
        self.outputs: dict[int, list[int]] = {}

    def serve(self, requests: dict[int, wire.Request]) -> None:
        for handle, request in requests.items():
            assert self.scheduler.submit(handle, request) is None
        while not self.scheduler.is_idle():
            self.step()
        assert {handle: self.outputs[handle] for handle in requests} == {h: expected_output(r) for h, r in requests.items()}

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        frame = self.scheduler.commit(self.runner.run(plan))
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            self.outputs.setdefault(handle, []).append(token)
        self.finished |= {end.handle: end for end in frame.finished}
        assert self.scheduler.check() == []

    @property
    def computed(self) -> int:
        return sum(sum(plan.counts) for plan in self.runner.plans)

    @property
    def copies(self) -> int:
        return sum(len(plan.copies) for plan in self.runner.plans)


def siblings(count: int, prompt: list[int] = PROMPT, max_tokens: int = 3) -> dict[int, wire.Request]:
    return {seed: make_request(prompt, max_tokens, seed=seed) for seed in range(count)}


def test_moved_requests_read_no_page_taken_back() -> None:
    engine = Engine()
    scheduler, moved = engine.scheduler, make_request([*PROMPT, 1, 2], 3, seed=1)
    assert scheduler.submit(0, make_request(PROMPT, 3)) is None
    plan = scheduler.schedule()
    assert plan is not None
    reservation = scheduler.reservations.reserve("move", moved, len(moved.prompt) + 3)
    assert isinstance(reservation, Reservation) and reservation.num_held > 0, "it holds pages that the plan writes"
    engine.runner.fail(plan)
    scheduler.take_back()
    scheduler.reservations.set_arrived("move", len(PROMPT))
    assert scheduler.submit(1, moved, move="move") is None
    assert scheduler.requests[1].num_computed == 0
    scheduler.reservations.drop("move")
    engine.outputs = {}
    while not scheduler.is_idle():
        engine.step()
    assert engine.outputs[1] == expected_output(moved)


def test_images_are_sent_again_with_their_tokens() -> None:
    """A row that was sent after its image had been computed here, whose tokens a plan that is taken back was to write."""
    engine, image = (
        Engine(),
        wire.Image(digest=bytes(16), num_tiles=1, height=1, width=1, pixels=b"abc", spans=[(5, 4)], grid=(2, 2)),
    )
    prompts = PROMPT, [*PROMPT, *range(100)]
    first, second = (msgspec.structs.replace(make_request(prompt, 9), images=[image]) for prompt in prompts)
    for handle, request in enumerate((first, second)):
        assert engine.scheduler.submit(handle, request) is None
        engine.step()
    row = engine.runner.rows[1]
    assert (row.images, row.position_shift) == ([], image.shift)
    writer, reader = engine.scheduler.requests[0], engine.scheduler.requests[1]
    lost = StepBuilder(step=9, written_pages={reader.pages.ids[1]: FirstWrite(1, writer.params.order, 1)})
    engine.scheduler.sharing.writes.take_back(reader, lost)
    engine.scheduler.sharing.writes.unmark(lost)
    engine.step()
    row = engine.runner.rows[2]
    assert (row.images, row.position_shift) == ([image], 0)
    while not engine.scheduler.is_idle():
        engine.step()
    assert engine.outputs[1] == expected_output(second)


@pytest.mark.parametrize(
    "length", [39, 37, 36, 3, 1], ids=["tail of 3", "no tail", "last page full", "less than a page", "one token"]
)
@pytest.mark.parametrize("budget", [64, 13, 8], ids=["one step", "three steps", "five steps"])
def test_equal_prompts_of_one_burst_are_computed_once(length: int, budget: int) -> None:
    engine = Engine(limits=replace(LIMITS, max_num_batched_tokens=budget))
    engine.serve(siblings(4, PROMPT[:length]))
    decodes = 4 * 2
    assert engine.computed - decodes == length + 3, "the prompt once, and its last token for each other request"
    assert engine.scheduler.sharing.hit_tokens == 3 * (length - 1)
    assert sum(end.cached_tokens for end in engine.finished.values()) == 3 * (length - 1)


def test_burst_with_a_shared_prefix_computes_it_once() -> None:
    engine = Engine()
    engine.serve({i: make_request([*PROMPT[:32], 40 + i, 41 + i], 3, seed=i) for i in range(4)})
    assert engine.computed - 4 * 2 == 32 + 4 * 2


def test_sharers_in_the_writers_step_need_no_wait() -> None:
    engine = Engine()
    engine.serve({i: make_request([*PROMPT[:32], 40 + i], 1, seed=i) for i in range(4)})
    assert [len(plan.rows) for plan in engine.runner.plans] == [4]


def test_finished_prompt_is_found_with_its_length() -> None:
    engine = Engine()
    engine.serve({1: make_request(PROMPT, 6)})
    computed = engine.computed
    engine.serve({2: make_request([*PROMPT, *engine.outputs[1], 5], 4)})
    assert engine.finished[2].cached_tokens == 44, "11 full pages of prompt and output"
    assert engine.computed - computed == 46 - 44 + 3
    assert engine.scheduler.load().prefix_hit_tokens == 44
    assert engine.scheduler.load().pages_reused == 11


def test_prompt_that_diverges_inside_a_page_copies_it() -> None:
    engine = Engine()
    engine.serve({1: make_request(PROMPT, 6)})
    engine.serve({2: make_request([*PROMPT[:34], 1, 2, 3], 2)})
    assert engine.finished[2].cached_tokens == 34
    assert engine.copies == 1


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({}, {}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"tenant": "a", "cache_salt": "b"}, {"tenant": "a", "cache_salt": "b"}, True),
        ({"tenant": "ab"}, {"tenant": "a", "cache_salt": "b"}, False),
    ],
    ids=["no salt", "other tenant", "other salt", "same salt", "salt and tenant are separate"],
)
@pytest.mark.parametrize("length", [39, 3], ids=["pages", "a tail alone"])
def test_pages_are_shared_within_equal_salt_only(
    first: dict[str, str], second: dict[str, str], shared: bool, length: int
) -> None:
    engine = Engine()
    requests = [make_request(PROMPT[:length], 3, seed=seed) for seed in range(2)]
    salted = [msgspec.structs.replace(request, **salt) for request, salt in zip(requests, (first, second), strict=True)]
    engine.serve(dict(enumerate(salted)))
    assert engine.finished[1].cached_tokens == (length - 1 if shared else 0)


def test_request_for_prompt_logprobs_computes_all_others_share() -> None:
    engine = Engine()
    engine.serve({1: make_request(PROMPT, 2)})
    request = make_request(PROMPT, 2)
    request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
    computed = engine.computed
    engine.serve({2: request})
    assert engine.computed - computed == 39 + 1
    assert engine.finished[2].cached_tokens == 0
    assert engine.scheduler.submit(3, msgspec.structs.replace(request, delivered=engine.outputs[2][:1])) is None
    while not engine.scheduler.is_idle():
        engine.step()
    assert engine.finished[3].cached_tokens >= 36, "a request with output has its prompt logprobs"


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = Engine(config=SchedulerConfig(prefix_caching=False))
    engine.serve(siblings(3))
    assert (engine.scheduler.sharing.hit_tokens, engine.copies) == (0, 0)
    assert engine.computed == 3 * (39 + 2)


def test_recomputed_tokens_are_no_cache_hit() -> None:
    engine = Engine(num_pages=12, limits=replace(LIMITS, max_num_seqs=3))
    engine.serve({i: make_request([i, *PROMPT[:10]], 20, seed=i) for i in range(3)})
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.sharing.hit_tokens == 0
    assert [end.cached_tokens for end in engine.finished.values()] == [0, 0, 0]


def test_next_request_computes_what_an_aborted_writer_left() -> None:
    engine = Engine(limits=replace(LIMITS, max_num_batched_tokens=8))
    for handle, request in siblings(3).items():
        engine.scheduler.submit(handle, request)
    engine.step()
    engine.scheduler.abort(0)
    while not engine.scheduler.is_idle():
        engine.step()
    assert {h: engine.outputs[h] for h in (1, 2)} == {h: expected_output(r) for h, r in siblings(3).items() if h}
    assert engine.computed == 39 + 1 + 2 * 2, "only the last token of the prompt is computed twice"


def test_page_events_replay_to_the_cache_content() -> None:
    engine = Engine(num_pages=14)
    for seed in range(4):
        engine.serve({seed: make_request([seed, *PROMPT], 3, seed=seed)})
    keys: set[bytes] = set()
    for is_added, key in engine.scheduler.pool.take_changes().changes:
        (keys.add if is_added else keys.remove)(key)
    assert keys == set(engine.scheduler.pool.keys())
    assert engine.scheduler.load().pages_evicted > 0


def test_partial_page_passes_to_a_copier_after_its_writer() -> None:
    engine = Engine()
    for handle in (1, 2):
        assert engine.scheduler.submit(handle, make_request(PROMPT, 20, seed=handle)) is None
        engine.step()
    engine.step()
    assert engine.scheduler.sharing.hit_tokens == len(PROMPT) - 1
    engine.scheduler.abort(1)
    engine.serve({3: make_request(PROMPT, 3, seed=3)})
    assert engine.scheduler.sharing.hit_tokens == 2 * (len(PROMPT) - 1)
    assert engine.copies == 2


def test_move_holds_no_page_before_its_writer_reaches_it() -> None:
    engine = Engine(limits=replace(LIMITS, max_num_batched_tokens=8))
    assert engine.scheduler.submit(1, make_request(PROMPT, 3)) is None
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.counts == [8]
    reservation = engine.scheduler.reservations.reserve("m", make_request(PROMPT, 3, seed=2), len(PROMPT))
    assert isinstance(reservation, Reservation)
    assert reservation.num_held == 2, "of 9 pages that the first request published"


def test_no_pages_are_reserved_for_an_embedding() -> None:
    request = msgspec.structs.replace(make_request(PROMPT, 0), pooling="mean")
    refusal = Engine().scheduler.reservations.reserve("m", request, len(PROMPT))
    assert isinstance(refusal, Refusal) and (refusal.status, refusal.code) == (409, "incompatible")


def test_partial_page_copy_harms_no_sharer() -> None:
    """Two prompts that end with a page and differ in the last token have one tail and two keys. A third finds the second's page
    before it is written."""
    engine, prefix = Engine(), PROMPT[:35]
    first = make_request([*prefix, 1], 12, seed=1)
    others = {2: make_request([*prefix, 2], 3, seed=2), 3: make_request([*prefix, 2, 7, 7, 7], 3, seed=3)}
    assert engine.scheduler.submit(1, first) is None
    engine.step()
    for handle, request in others.items():
        assert engine.scheduler.submit(handle, request) is None
    engine.step()
    [(_, target)] = engine.runner.plans[-1].copies
    holders = [handle for handle, request in engine.scheduler.requests.items() if request.pages.ids[8] == target]
    assert holders == [2, 3]
    while not engine.scheduler.is_idle():
        engine.step()
    assert engine.outputs == {handle: expected_output(request) for handle, request in {1: first, **others}.items()}


@pytest.mark.parametrize("lost", [6, 8, 10])
def test_equal_outputs_survive_a_tree_taken_back(lost: int) -> None:
    """Pages of equal outputs have a key once: a request without them computes accepted tokens again, which are out of place."""
    tree = SpeculationConfig(
        method="self_draft", num_tokens=7, is_adaptive=False, draft_methods=frozenset({"self_draft"}), tree=Tree([3, 2])
    )
    runner = FakeRunner(64, 4, has_pages=False)
    scheduler, request, outputs = make_engine(runner, tree), make_request(6, 30, seed=3), dict[int, list[int]]()
    for handle in range(3):
        assert scheduler.submit(handle, request) is None
    while (plan := scheduler.schedule()) is not None:
        if plan.step == lost:
            assert [len(positions) for _, positions in plan.relocations] == [1, 1, 1]
            runner.fail(plan)
            scheduler.take_back()
            assert scheduler.preempt_newest() == 2
            continue
        runner.start(plan)
        frame = scheduler.commit(runner.finish())
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            outputs.setdefault(handle, []).append(token)
    assert outputs == dict.fromkeys(range(3), expected_output(request))
    assert scheduler.check() == []
