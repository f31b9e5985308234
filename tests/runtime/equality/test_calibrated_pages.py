"""Calibrated pages give the same tokens under every schedule: codes depend on the token alone.

In float64, without near-ties, as in `test_compressed_pages`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api import moves
from phalanx_api.engine_config import KvCacheDtype
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.commands import CalibrationSpec
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.fitting.calibrate import calibrate
from phalanx_runtime.model.attention.calibration import write_calibration
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.equality.schedules import Disturbance, compare_runs
from tests.runtime.equality.trees import LIMITS, make_config
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import KINDS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")


def calibrated(folder: Path) -> Path:
    """Calibrates the model on text of its own; returns its folder, which has the file `pages.kv`."""
    spec = CalibrationSpec(model_dir=str(folder), out="", tokens=300, dtype="float64")
    write_calibration(folder / "pages.kv", *calibrate(spec, CPU, lambda: 0.0))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama"))


def build(kv_cache_dtype: KvCacheDtype, **more: Any) -> Build:
    fields = {"dtype": torch.float64, "num_pages": 40, "kv_cache_dtype": kv_cache_dtype, "calibration": "pages.kv"}
    return Build(**{**fields, **more})


@pytest.mark.parametrize(("kv_cache_dtype", "ranks", "stages"), [("int4", 1, 1), ("fp8", 2, 1), ("int8", 2, 2)], ids=str)
def test_chunks_prefixes_and_copies_on_write_change_no_token(
    model: Path, kv_cache_dtype: KvCacheDtype, ranks: int, stages: int
) -> None:
    scheduler = on_ranks(model, [ranks], build(kv_cache_dtype, stages=stages), partial(compare_runs, Disturbance(budget=7)))
    assert scheduler.sharing.hit_tokens > 3 * 28
    assert scheduler.pool.counters.copied > 0, "a shared page was copied before a write"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_preemptions_change_no_token(tmp_path: Path, family: Any) -> None:
    """With sliding windows, and with softcaps or sinks, where not everything is shifted."""
    folder = calibrated(save_tiny(tmp_path / "model", family))
    scheduler = on_ranks(folder, [1], build("int4"), partial(compare_runs, Disturbance(budget=24, lag=2, thief=5)))
    assert scheduler.num_preemptions > 0
    assert scheduler.sharing.hit_tokens > 0


def answers(folder: Path, setup: Build, config: SchedulerConfig, pods: list[int]) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), ROOMY, config, runner.fitting), counter

    return on_ranks(folder, pods, setup, work)


def test_two_ranks_give_the_tokens_of_one(model: Path) -> None:
    one, two = (answers(model, build("int4", num_pages=200), SchedulerConfig(), [ranks])[0] for ranks in (1, 2))
    assert_equal(two, one)
    plain = answers(model, build("int4", num_pages=200, calibration=None), SchedulerConfig(), [1])[0]
    assert [each.details for each in plain] != [each.details for each in one], "the calibration was used"


def test_draft_trees_give_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    folder = calibrated(save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=2))
    draft = save_draft(folder, tmp_path / "draft", noise=0.03)
    bounds, num_pages = LIMITS["preempted"]
    plain, _ = answers(folder, build("int4", num_pages=200), SchedulerConfig(), [1])
    settings = {"speculative_method": "draft", "draft_dir": str(draft)}

    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, requests(), bounds, make_config("draft"), runner.fitting), counter

    served, counter = on_ranks(folder, [1], build("int4", num_pages=num_pages, speculative=settings), work)
    assert_equal(served, plain)
    assert counter.num_branched > 0, "accepted branches were relocated"
    assert len(counter.admitted) > len(served), "requests were preempted"


def test_moved_requests_continue_with_equal_tokens(model: Path) -> None:
    with running_groups(model, [[2], [2]], build("int4", num_pages=120)) as field:
        submitted = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
        plain = undisturbed(field.mover, submitted)
        assert moved_back_and_forth(field.mover, submitted, plain) > 0


def test_loaded_pages_change_no_token(model: Path) -> None:
    """From host memory, as they leave the device between three rounds."""
    setup = build("int4", num_pages=20, num_host_pages=30)
    scheduler = on_ranks(model, [1], setup, partial(compare_runs, Disturbance(budget=24, lag=3), num_rounds=3))
    assert scheduler.pool.host.counters.loaded > 0


def test_pulled_pages_change_no_token(model: Path) -> None:
    with running_groups(model, [[1], [1]], build("int4", num_pages=120)) as field:
        request = make_request("greedy", prompt=75)
        (plain,) = undisturbed(field.mover, [request])
        keys = PrefixKeys(root_key("tiny", "", request.tenant, request.cache_salt), PAGE_SIZE).extend(request.prompt)
        stream, arrived = field.mover.pull(request, keys, 0, 1)
        assert isinstance(arrived, moves.Arrived) and arrived.num_computed == 75 // PAGE_SIZE * PAGE_SIZE
        field.mover.until(lambda: stream.finish is not None)
        assert (stream.tokens, stream.finish) == (plain.tokens, plain.finish)
        field.mover.settle()
