"""Pipeline stages give the tokens of one rank, with a plan in flight per stage. In float64, without near-ties."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from phalanx_api import wire
from phalanx_runtime.collective.library import join_gloo
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.collective.shared import FRAGMENT_BYTES
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import RankReady
from tests.runtime.equality.requests import FIELDS, NUM_TOKENS, ROOMY, SHAPES, assert_equal, requests
from tests.runtime.lag import lagged
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import as_bf16, generate, reference
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import PAGE_SIZE, Build, make_model_runner, on_ranks, with_group
from tests.runtime.served import CountingRunner, ScriptedChannel, Served, serve
from tests.runtime.tiny import FAMILIES, VOCAB_SIZE, Family, save_tiny
from tests.slow_cases import some

GROUPS: dict[str, tuple[list[int], int]] = {
    "pp2": ([2], 2),
    "pp2 over two pods": ([1, 1], 2),
    "pp2 x tp2": ([4], 2),
    "pp2 x tp2 over two pods": ([2, 2], 2),
    "pp3": ([3], 3),
}
KEPT = [GROUPS["pp2 x tp2 over two pods"], GROUPS["pp3"]]
groups = pytest.mark.parametrize(("pods", "stages"), some(GROUPS.values(), *KEPT), ids=GROUPS.keys())
LAYERS = 4
"""Three stages have 2, 1 and 1 layers."""

Models = Callable[[Family], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pipeline") / "model", "qwen2", num_hidden_layers=LAYERS)


def wide(stages: int, num_pages: int = 200) -> Build:
    return Build(torch.float64, num_pages=num_pages, stages=stages)


def alone(folder: Path, one: wire.Request) -> Served:
    """Returns the answer on one rank."""
    return on_ranks(folder, [1], wide(1), lambda runner: serve(runner, [one], ROOMY))[0]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """Answers of each request alone, on one rank."""
    return [alone(folder, one) for one in requests()]


@pytest.mark.parametrize("ranks", [2, 4], ids=["pp2", "pp2 x tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers_on_two_stages(models: Models, family: Family, ranks: int) -> None:
    outputs = generate(models(family), [ranks], Build(stages=2), chunk=7)
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("tied", [False, True])
@groups
def test_stages_and_their_ranks_give_the_tokens_of_transformers(tmp_path: Path, pods: list[int], stages: int, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    outputs = generate(folder, pods, Build(stages=stages))
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_compiled_kernels_give_the_tokens_of_transformers(tmp_path: Path, tied: bool) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    folder = as_bf16(save_tiny(tmp_path / "model", tie_word_embeddings=tied))
    outputs = generate(folder, [2], Build(kernels=Kernels(compiled=True), stages=2))
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("limits", SHAPES.values(), ids=SHAPES.keys())
@groups
def test_plans_in_flight_sample_equal_tokens(
    folder: Path, plain: list[Served], pods: list[int], stages: int, limits: Limits
) -> None:
    def work(runner: ModelRunner) -> tuple[list[Served], int]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), limits), counter.most_in_flight

    served, most_in_flight = on_ranks(folder, pods, wide(stages), work)
    assert most_in_flight == (stages if limits.max_num_seqs > 1 else 1)
    assert_equal(served, plain)


@groups
def test_preempted_requests_sample_equal_tokens(folder: Path, plain: list[Served], pods: list[int], stages: int) -> None:
    def work(runner: ModelRunner) -> tuple[list[Served], int, int]:
        counter = CountingRunner(runner)
        return (
            serve(counter, requests(), Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64)),
            len(counter.admitted),
            counter.most_in_flight,
        )

    served, num_admitted, most_in_flight = on_ranks(folder, pods, wide(stages, num_pages=11), work)
    assert num_admitted > len(FIELDS), "requests were preempted"
    assert most_in_flight == stages
    assert_equal(served, plain)


@groups
def test_requests_with_a_common_prefix_share_its_pages(folder: Path, pods: list[int], stages: int) -> None:
    """A later plan reads pages that an earlier one writes, while both are in flight."""
    common = requests()[-1].prompt
    submitted = [
        wire.Request(
            id=str(i),
            epoch=1,
            prompt=common + [i] * (1 + i),
            delivered=[],
            sampling=wire.Sampling(max_tokens=NUM_TOKENS, seed=i, temperature=1.0),
        )
        for i in range(6)
    ]

    def work(runner: ModelRunner) -> tuple[list[Served], int, int]:
        counter = CountingRunner(runner)
        return (
            serve(counter, submitted, Limits(max_model_len=120, max_num_seqs=6, max_num_batched_tokens=20)),
            counter.num_computed,
            counter.most_in_flight,
        )

    served, num_computed, most_in_flight = on_ranks(folder, pods, wide(stages), work)
    assert [one.tokens for one in served] == [alone(folder, one).tokens for one in submitted]
    assert most_in_flight == stages
    whole = sum(len(one.prompt) + NUM_TOKENS - 1 for one in submitted)
    assert num_computed <= whole - 5 * (len(common) // PAGE_SIZE) * PAGE_SIZE


def test_details_of_prompts_come_from_the_last_stage(folder: Path) -> None:
    submitted = requests(prompt_logprobs=1)

    def answers(pods: list[int], stages: int) -> list[Served]:
        return on_ranks(folder, pods, wide(stages), lambda runner: serve(runner, submitted, SHAPES["chunks of 7"]))

    for one, pipelined, same in zip(submitted, answers([4], 2), answers([1], 1), strict=True):
        assert sorted(pipelined.prompt_details) == list(range(1, len(one.prompt)))
        for position, detail in pipelined.prompt_details.items():
            assert detail.logprob == pytest.approx(same.prompt_details[position].logprob, abs=1e-9)


@pytest.mark.parametrize(("pods", "stages"), [([2], 2), ([1, 1], 2), ([3], 3)], ids=["pp2", "pp2 over two pods", "pp3"])
def test_large_hidden_states_cause_no_deadlock(tmp_path: Path, pods: list[int], stages: int) -> None:
    folder = save_tiny(tmp_path / "model", hidden_size=512, max_position_embeddings=1024)
    rng = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB_SIZE, (700,), generator=rng).tolist() for _ in range(5)]
    submitted = [
        wire.Request(id=str(i), epoch=1, prompt=p, delivered=[], sampling=wire.Sampling(max_tokens=3, seed=i, prompt_logprobs=20))
        for i, p in enumerate(prompts)
    ]
    limits = Limits(max_model_len=1000, max_num_seqs=5, max_num_batched_tokens=700)
    assert 700 * 512 * 8 > 2 * FRAGMENT_BYTES

    def work(runner: ModelRunner) -> tuple[list[Served], int]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits), counter.most_in_flight

    plain, _ = on_ranks(folder, [1], wide(1, num_pages=450), work)
    served, most_in_flight = on_ranks(folder, pods, wide(stages, num_pages=450), work)
    assert most_in_flight == stages
    assert [one.tokens for one in served] == [one.tokens for one in plain]


@groups
def test_requests_that_are_aborted_in_flight_harm_no_other(
    folder: Path, plain: list[Served], pods: list[int], stages: int
) -> None:
    class Aborting(CountingRunner):
        """Aborts a request at each start with plans in flight, until only the odd ones are left."""

        to_abort = list(range(0, len(FIELDS), 2))

        def start(self, plan: StepPlan) -> None:
            super().start(plan)
            if self.num_in_flight == stages and len(plan.tokens) < 20:
                channel.abort(self.to_abort[:1])
                del self.to_abort[:1]

    channel = ScriptedChannel(requests())

    def work(runner: ModelRunner) -> tuple[int, list[str]]:
        counter = Aborting(runner)
        loop = EngineLoop(counter, lagged(ROOMY), channel)
        while not all(answer.is_over for answer in channel.answers[1::2]) or not loop.scheduler.is_idle():
            assert loop.turn()
        return len(counter.to_abort), loop.scheduler.check()

    assert on_ranks(folder, pods, wide(stages), work) == (0, [])
    assert_equal(channel.answers[1::2], plain[1::2], list(FIELDS)[1::2])
    assert any(0 < len(answer.tokens) < NUM_TOKENS for answer in channel.answers[::2])


def test_stages_over_gloo_sample_equal_tokens(folder: Path, plain: list[Served]) -> None:
    def rank(own: Collective) -> list[list[Served]]:
        runner = make_model_runner(folder, join_gloo(own, "127.0.0.1"), wide(2))
        if own.rank:
            runner.follow()
            return []
        try:
            return [serve(runner, requests(), ROOMY)]
        finally:
            runner.dismiss()

    assert_equal(with_group([4], rank)[0][0], plain)


@pytest.mark.parametrize("tied", [False, True])
def test_each_layer_is_held_and_cached_once(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)

    def held(pods: list[int], stages: int) -> tuple[list[int], int]:
        runners = with_group(pods, lambda group: make_model_runner(folder, group, Build(stages=stages)))
        return [len(runner.model.kv.head_dims) for runner in runners], sum(runner.model.num_bytes for runner in runners)

    table = 320 * 64 * 4
    whole = held([1], 1)[1]
    assert held([2], 2) == ([2, 2], whole + tied * table)
    assert held([3], 3) == ([2, 1, 1], whole + tied * table)
    layers, total = held([4], 2)
    assert layers == [2, 2, 2, 2] and whole <= total <= 1.02 * whole + tied * table


def test_more_stages_than_layers_are_refused(models: Models) -> None:
    load = partial(make_model_runner, models("llama"), build=Build(stages=4))
    with pytest.raises(ModelError, match="pipeline-parallel size 4 is more than the model's 3 layers"):
        with_group([4], load)


def test_stages_measure_their_memory_and_agree_on_pages(folder: Path) -> None:
    """Stages of 2, 1 and 1 layers: pages of the first are twice as large, so its pool has the fewest."""

    def load(group: Collective) -> RankReady:
        spec = with_settings(
            make_spec(folder, group.rank, 3), max_model_len=128, kv_cache_memory_bytes=1 << 20, pipeline_parallel_size=3
        )
        return load_rank(spec, group, torch.device("cpu"), System())[1]

    ready = with_group([3], load)
    layer_bytes = 2 * 2 * 16 * 4
    assert {one.num_pages for one in ready} == {(1 << 20) // (2 * 16 * layer_bytes)}
    accounts = [one.memory for one in ready if one.memory is not None]
    assert [account.kv_bytes_per_token for account in accounts] == [2 * layer_bytes, layer_bytes, layer_bytes]
    assert [account.logits_sampler_bytes > 0 for account in accounts] == [False, False, True]
    assert all(account.weights_bytes > 0 for account in accounts)
