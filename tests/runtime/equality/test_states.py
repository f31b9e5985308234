"""Schedules change no token of models that keep a state per request. In float64; states are float32 where the model's are."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.snapshots.sharing import SnapshotSharing
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.states.mixers import states_of
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.runner import ModelRunner
from tests.architectures.tiny import save_model
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.requests import requests
from tests.runtime.equality.schedules import LIMITS, Disturbance, compare_runs, make_requests, serve
from tests.runtime.equality.trees import make_config
from tests.runtime.moving_engines import RULES, running_groups
from tests.runtime.moving_requests import KINDS as SAMPLING
from tests.runtime.moving_requests import make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import NUM_STATE_ROWS, Build, on_ranks
from tests.runtime.served import CountingRunner, Served
from tests.runtime.served import serve as serve_all

Models = Callable[[str], Path]
BUILD = Build(dtype=torch.float64, num_pages=40, level="transformers", num_snapshots=12)
HYBRIDS = ["bamba", "falcon_h1", "jamba", "kimi_linear"]
"""Further hybrids, with the same mechanisms in other classes."""
CASES = pytest.mark.parametrize(
    ("model_type", "ranks", "stages"),
    [
        pytest.param("lfm2", 1, 1, id="lfm2"),
        pytest.param("mamba2", 1, 1, id="mamba2"),
        pytest.param("mamba2", 2, 2, id="mamba2 pp2"),
        pytest.param("olmo_hybrid", 2, 1, id="olmo_hybrid tp2"),
        pytest.param("qwen3_next", 1, 1, id="qwen3_next"),
        pytest.param("qwen3_next", 2, 2, id="qwen3_next pp2", marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", 1, 1, id="qwen4_exp"),
        pytest.param("qwen4_exp_text", 2, 1, id="qwen4_exp tp2", marks=pytest.mark.slow),
        *(pytest.param(name, 1, 1, id=name, marks=pytest.mark.slow) for name in HYBRIDS),
    ],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda model_type: save_model(tmp_path_factory.mktemp(model_type), model_type))


@CASES
def test_chunks_and_snapshots_change_no_token(models: Models, model_type: str, ranks: int, stages: int) -> None:
    """Siblings that arrive later skip their prompt; each request comes twice."""
    disturbance, build = Disturbance(budget=24, lag=4), replace(BUILD, stages=stages)
    scheduler = on_ranks(models(model_type), [ranks], build, partial(compare_runs, disturbance, num_rounds=2))
    assert isinstance(scheduler.sharing, SnapshotSharing) and scheduler.sharing.snapshots.num_saved > 12, "slots are replaced"
    assert scheduler.sharing.hit_tokens > 3 * 24, "siblings skip their prompt"
    assert scheduler.pool.counters.copied == 0


def test_without_snapshots_nothing_is_shared(models: Models) -> None:
    build = replace(BUILD, num_snapshots=0)
    scheduler = on_ranks(models("lfm2"), [1], build, partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.sharing.hit_tokens == 0 == scheduler.pool.counters.copied


@CASES
def test_preemption_of_states_changes_no_token(models: Models, model_type: str, ranks: int, stages: int) -> None:
    disturbance = Disturbance(budget=24, lag=2, thief=5)
    scheduler = on_ranks(models(model_type), [ranks], replace(BUILD, stages=stages), partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0


@pytest.mark.parametrize(
    ("model_type", "pods", "stages"),
    [
        pytest.param("lfm2", [1], 1, id="lfm2"),
        pytest.param("mamba2", [1, 1], 2, id="mamba2 pp2"),
        pytest.param("qwen3_next", [2], 1, id="qwen3_next tp2"),
        pytest.param("qwen4_exp_text", [2], 1, id="qwen4_exp tp2"),
        *(pytest.param(name, [2], 2, id=f"{name} pp2", marks=pytest.mark.slow) for name in HYBRIDS),
    ],
)
def test_states_move_with_their_requests(models: Models, model_type: str, pods: list[int], stages: int) -> None:
    build = replace(BUILD, num_pages=120, stages=stages)
    with running_groups(models(model_type), [pods, pods], build) as field:
        requests = [make_request(kind, **SAMPLING[kind]) for kind in ("greedy", "seeded")]
        plain = undisturbed(field.mover, requests)
        assert moved_back_and_forth(field.mover, requests, plain) > 0


def test_the_target_uses_the_states_that_arrived(models: Models) -> None:
    with running_groups(models("mamba2"), [[1], [1]], replace(BUILD, num_pages=120)) as field:
        router = field.mover
        (plain,) = undisturbed(router, [make_request("zeroed")])
        stream = router.submit(make_request("zeroed"))
        router.until(lambda: len(stream.tokens) >= 8)
        move = router.prepare(stream, 1)
        router.move_out(stream, move, "stop")
        router.wait_for_pages(move)
        states = states_of(field.groups[1].runners[0].model)
        assert states is not None
        for row in range(NUM_STATE_ROWS):
            states.zero(row)
        router.commit(stream, move, 1)
        router.until(lambda: stream.finish is not None)
        assert stream.tokens[:8] == plain.tokens[:8]
        assert stream.tokens != plain.tokens


def test_a_request_is_recomputed_if_its_state_is_ahead(models: Models) -> None:
    """The target gets fewer tokens than the source had computed, and a state takes no token back."""
    with running_groups(models("lfm2"), [[1], [1]], replace(BUILD, num_pages=120)) as field:
        router = field.mover
        (plain,) = undisturbed(router, [make_request("ahead")])
        stream = router.submit(make_request("ahead"))
        router.until(lambda: len(stream.tokens) >= 8)
        move = router.prepare(stream, 1)
        router.until(lambda: len(stream.tokens) >= 14)  # the reservation knows none of those that are dropped
        router.move_out(stream, move, "stop")
        router.wait_for_pages(move)
        del stream.tokens[-2:]
        router.commit(stream, move, 1)
        router.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        router.settle()


class LosingRunner(CountingRunner):
    """Loses the state of a row before one plan."""

    def __init__(self, inner: ModelRunner, row: int, step: int) -> None:
        super().__init__(inner)
        self._states, self._row, self._step = states_of(inner.model), row, step

    def start(self, plan: StepPlan) -> None:
        if plan.step == self._step:
            assert self._states is not None
            self._states.keep()
            self._states.assume(self._row, 1)
        super().start(plan)


@pytest.mark.parametrize(("model_type", "ranks"), [("lfm2", 1), ("qwen3_next", 2)], ids=["lfm2", "qwen3_next tp2"])
def test_a_lost_state_changes_no_other_request(models: Models, model_type: str, ranks: int) -> None:
    """The plan is taken back after the ranks prepared it, and computed without the request. Only rank 0 has lost the state."""

    def work(runner: ModelRunner) -> list[Served]:
        requests = list(make_requests().values())[:3]
        whole, found = (serve_all(one, requests, LIMITS) for one in (runner, LosingRunner(runner, row=1, step=9)))
        assert [one.tokens for one in found[::2]] == [one.tokens for one in whole[::2]]
        lost, plain = found[1], whole[1]
        assert lost.refused is not None and lost.refused.code == "state_lost"
        assert 0 < len(lost.tokens) < len(plain.tokens) and lost.tokens == plain.tokens[: len(lost.tokens)]
        return found

    on_ranks(models(model_type), [ranks], BUILD, work)


def test_a_hit_uses_the_state_of_its_snapshot(models: Models) -> None:
    def work(runner: ModelRunner) -> list[list[int]]:
        scheduler, states, outputs = make_scheduler(LIMITS, runner.pool), states_of(runner.model), list[list[int]]()
        assert states is not None
        for spoils in (False, False, True):
            if spoils:
                states.keep()
                for slot in range(BUILD.num_snapshots):
                    states.zero(states.num_rows + slot)
            outputs.append(serve(runner, scheduler, {len(outputs): make_requests()[1]}, Disturbance())[len(outputs)])
        assert scheduler.sharing.hit_tokens == 2 * 24
        return outputs

    first, second, spoiled = on_ranks(models("mamba2"), [1], BUILD, work)
    assert first == second != spoiled


REPEATING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "few tokens": {"temperature": 0.5, "allowed_token_ids": [5, 6, 7]},
    "biased": {"temperature": 0.7, "logit_bias": {7: 14.0, 8: 14.0}},
}
"""Sampling fields with outputs that n-gram lookups find at times."""
IN_HOST_MEMORY = replace(BUILD, num_pages=20, num_snapshots=2, num_host_pages=60, num_host_snapshots=20)
"""The device keeps few pages and snapshots."""


@pytest.mark.parametrize(
    ("model_type", "ranks", "stages"),
    [("lfm2", 1, 1), pytest.param("mamba2", 4, 2, marks=pytest.mark.slow)],
    ids=["lfm2", "mamba2 pp2 x tp2"],
)
def test_states_return_from_host_memory_with_their_pages(models: Models, model_type: str, ranks: int, stages: int) -> None:
    """Each request comes three times; the device has neither its pages nor its snapshot any more."""
    build, disturbance = replace(IN_HOST_MEMORY, stages=stages), Disturbance(budget=24, lag=3)
    scheduler = on_ranks(models(model_type), [ranks], build, partial(compare_runs, disturbance, num_rounds=3))
    assert isinstance(scheduler.sharing, SnapshotSharing)
    assert scheduler.pool.host.counters.loaded > 0 and scheduler.sharing.snapshots.num_loaded > 0


def test_a_hit_in_host_memory_uses_its_state(models: Models) -> None:
    def work(runner: ModelRunner) -> list[dict[int, list[int]]]:
        counter, scheduler, states = CountingRunner(runner), make_scheduler(LIMITS, runner.pool), states_of(runner.model)
        assert states is not None and isinstance(scheduler.sharing, SnapshotSharing)
        answers, loaded = [], []
        for spoils in (False, False, True):
            for slot in range(runner.pool.num_snapshots, runner.pool.num_snapshots + runner.pool.num_host_snapshots):
                if spoils:
                    states.zero(states.num_rows + slot)
            answers.append(serve(counter, scheduler, make_requests(), Disturbance(lag=3)))
            loaded.append((counter.num_loaded, scheduler.sharing.snapshots.num_loaded))
        assert loaded[0] < loaded[1] < loaded[2]
        return answers

    first, second, spoiled = on_ranks(models("mamba2"), [1], IN_HOST_MEMORY, work)
    assert first == second != spoiled


@pytest.mark.parametrize(
    ("model_type", "ranks", "stages", "num_pages"),
    [("lfm2", 1, 1, 11), ("mamba2", 2, 2, 200), ("qwen3_next", 2, 1, 200)],
    ids=["lfm2 preempted", "mamba2 pp2", "qwen3_next tp2"],
)
def test_states_return_to_the_accepted_draft_tokens(
    models: Models, model_type: str, ranks: int, stages: int, num_pages: int
) -> None:
    """By an oracle that is wrong at times. Each request comes twice."""
    submitted = [one for one in requests() if one.sampling.grammar is None]

    def run(config: SchedulerConfig, proposer: Proposer) -> tuple[list[list[int]], CountingRunner]:
        def work(runner: ModelRunner) -> tuple[list[list[int]], CountingRunner]:
            counter = CountingRunner(runner)
            return [one.tokens for one in serve_all(counter, [*submitted, *submitted], limits, config)], counter

        build = replace(BUILD, num_pages=num_pages, stages=stages, proposer=proposer)
        return on_ranks(models(model_type), [ranks], build, work)

    limits = Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64)
    plain, _ = run(SchedulerConfig(), NO_PROPOSER)
    oracle = Oracle({one.sampling.seed: tokens for one, tokens in zip(submitted, plain, strict=False)})
    served, counter = run(make_config("draft", most=5), oracle)
    assert served == plain
    assert counter.num_proposed > 20 and 0.2 <= counter.num_accepted / counter.num_proposed <= 0.9
    assert num_pages > 11 or len(counter.admitted) > 2 * len(submitted), "requests were preempted"


def test_states_of_accepted_tokens_move(models: Models) -> None:
    """Between steps a row also has the state after draft tokens that were rejected."""
    rules = replace(RULES, speculation=SpeculationConfig(method="ngram", num_tokens=3, is_adaptive=False))
    with running_groups(models("lfm2"), [[1], [1]], replace(BUILD, num_pages=120), rules=rules) as field:
        requests = [
            msgspec.structs.replace(make_request(name, **fields), prompt=[5, 6, 7, 8] * 9) for name, fields in REPEATING.items()
        ]
        plain = undisturbed(field.mover, [msgspec.structs.replace(one, speculation=Speculation("none")) for one in requests])
        assert moved_back_and_forth(field.mover, requests, plain) > 0
        counts = [group.loop.speculation for group in field.groups if group.loop is not None]
    accepted, proposed = (
        sum(sum(part) for part in parts) for parts in ([one.accepted for one in counts], [one.drafted for one in counts])
    )
    assert 0.1 < accepted / proposed < 0.9 and accepted > 10, (accepted, proposed)
