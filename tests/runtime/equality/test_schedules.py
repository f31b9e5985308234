"""Chunks, prefix sharing, preemption and batching change no token of a tiny model.

In float64, without near-ties. The plain run has each request alone, its prompt in one step, nothing shared.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx_api.engine_config import SCHEDULING_POLICIES, SchedulingPolicy
from tests.runtime.equality.schedules import Disturbance, compare_runs
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.tiny import FAMILIES, MIXTURES, save_tiny
from tests.slow_cases import some

BUILD = Build(dtype=torch.float64, num_pages=40)
groups = pytest.mark.parametrize(
    ("ranks", "stages"),
    some([(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)], (1, 1), (2, 1), (4, 2)),
    ids=["one", "tp2", "pp2", "pp2 x tp2", "pp3"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama")


@groups
def test_chunks_and_shared_prefixes_change_no_token(model: Path, ranks: int, stages: int) -> None:
    scheduler = on_ranks(model, [ranks], replace(BUILD, stages=stages), partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.sharing.hit_tokens > 3 * 28, "siblings share their prompt, others a part of it"
    assert scheduler.pool.counters.copied > 0


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_preemption_at_random_steps_changes_no_token(model: Path, policy: SchedulingPolicy) -> None:
    disturbance = Disturbance(budget=24, lag=2, thief=5, policy=policy)
    scheduler = on_ranks(model, [1], BUILD, partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0


@groups
def test_preemption_with_plans_in_flight_changes_no_token(model: Path, ranks: int, stages: int) -> None:
    disturbance = Disturbance(budget=24, lag=2, thief=5)
    scheduler = on_ranks(model, [ranks], replace(BUILD, stages=stages), partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0


def test_late_requests_join_the_batch_and_change_no_token(model: Path) -> None:
    scheduler = on_ranks(model, [1], BUILD, partial(compare_runs, Disturbance(lag=3)))
    assert scheduler.sharing.hit_tokens > 0


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_every_family_keeps_its_tokens_under_all_schedules(tmp_path: Path, family: str) -> None:
    """Windows, softcaps, layers without positions and experts."""
    folder = save_tiny(tmp_path / "model", family)
    scheduler = on_ranks(folder, [1], BUILD, partial(compare_runs, Disturbance(budget=7, lag=2, thief=5)))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0 and scheduler.pool.counters.copied > 0
