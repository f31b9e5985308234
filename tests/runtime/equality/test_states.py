"""Schedules change no token of models that keep a state per request. In float64; states are float32 where the model's are."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests.architectures.tiny import save_model
from tests.runtime.equality.schedules import Disturbance, compare_runs
from tests.runtime.ranks import Build, on_ranks

Models = Callable[[str], Path]
BUILD = Build(dtype=torch.float64, num_pages=40, level="transformers")
KINDS = pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "olmo_hybrid"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    def save(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        save_model(folder, model_type)
        return folder

    return cache(save)


@KINDS
def test_chunks_change_no_token_and_nothing_is_shared(models: Models, model_type: str) -> None:
    scheduler = on_ranks(models(model_type), [1], BUILD, partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.sharing.hit_tokens == 0 == scheduler.pool.counters.copied


@pytest.mark.parametrize("stages", [1, 2], ids=["one", "pp2"])
@KINDS
def test_preemption_of_states_changes_no_token(models: Models, model_type: str, stages: int) -> None:
    disturbance = Disturbance(budget=24, lag=2, thief=5)
    scheduler = on_ranks(models(model_type), [stages], replace(BUILD, stages=stages), partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0
