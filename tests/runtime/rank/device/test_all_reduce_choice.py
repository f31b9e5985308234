"""Sums over ranks by one kernel: chosen by measured time, with the tokens of the collective's sums."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx_runtime.collective.peer_buffers import PeerBuffers
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.decoder.one_shot import one_shot_rows
from phalanx_runtime.rank.device.all_reduce_choice import ROWS, can_share_memory, choose_sums
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget, DecodeGraphs
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.model.gpu.fake_buffers import SharedBuffers, ThreadBuffers
from tests.runtime.ranks import Build, Driver, DriverRequest, KeptGraph, make_model_runner, on_ranks, with_group
from tests.runtime.tiny import save_tiny

MAX_BYTES = 1 << 20
NUM_TOKENS = 5
PROMPTS = [[5, 9, 2, 7, 1, 3], [8, 4]]


@pytest.mark.parametrize(
    ("all_reduce", "one_shot", "expected"),
    [
        ({1: 20, 8: 20, 32: 30}, {1: 8, 8: 9, 32: 25}, 32),
        ({1: 20, 8: 20, 32: 30}, {1: 8, 8: 9, 32: 30}, 8),
        ({1: 20, 8: 20, 32: 90}, {1: 8, 8: 21, 32: 25}, 1),
        ({1: 7}, {1: 8}, 0),
        ({}, {}, 0),
    ],
)
def test_one_shot_is_chosen_up_to_its_first_loss(
    all_reduce: Mapping[int, int], one_shot: Mapping[int, int], expected: int
) -> None:
    assert one_shot_rows(all_reduce, one_shot) == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6))
def test_one_shot_wins_at_every_chosen_size(times: list[tuple[int, int]]) -> None:
    all_reduce, one_shot = (dict(enumerate(part, 1)) for part in ([a for a, _ in times], [b for _, b in times]))
    chosen = one_shot_rows(all_reduce, one_shot)
    assert all(one_shot[rows] < all_reduce[rows] for rows in range(1, chosen + 1))


@pytest.mark.parametrize(
    ("world_size", "num_local", "expected"),
    [
        (2, 3, False),
        (2, 2, True),
        (2, 4, True),
        (4, 2, False),
        (8, 8, True),
        (16, 16, False),
        (1, 1, False),
    ],
)
def test_groups_within_one_pod_share_memory(world_size: int, num_local: int, expected: bool) -> None:
    assert can_share_memory(world_size, num_local) is expected


class TimedSums:
    """A `SumDevice` of a thread whose work takes the given times, in order."""

    device = torch.device("cpu")

    def __init__(self, buffers: PeerBuffers | None, times: list[int]) -> None:
        self._buffers = buffers
        self._times = iter(times)

    def open_buffers(self, max_bytes: int) -> PeerBuffers:
        if self._buffers is None:
            raise RuntimeError("no peer access")
        return self._buffers

    def measure_us(self, work: Callable[[], object]) -> int:
        work()
        return next(self._times)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sums") / "model", "qwen3")


class ShortGraph(KeptGraph):
    """A `StepGraph` whose capture lacks memory after `num_exchanges` exchanges."""

    def __init__(self, buffers: ThreadBuffers, num_exchanges: int) -> None:
        self._buffers = buffers
        self._num_exchanges = num_exchanges

    def capture(self, work: Callable[[], None]) -> None:
        self._buffers.recordable = self._num_exchanges
        try:
            work()
        finally:
            self._buffers.recordable = None


def fail_capture(runner: ModelRunner, buffers: ThreadBuffers) -> None:
    """Captures one size, which lacks memory after another number of exchanges on each rank."""
    step = runner.device_step
    assert isinstance(step, DeviceStep)
    graphs = DecodeGraphs((1,), step.graphs.compute, lambda: ShortGraph(buffers, 1 + buffers.rank))
    with torch.inference_mode():
        assert graphs.capture(CaptureBudget(1, 1.0), lambda: 0.0).shortage == "memory"


def answers(
    folder: Path,
    shared: SharedBuffers,
    times: Callable[[int], list[int]],
    can_open: Callable[[int], bool],
    prepare: Callable[[ModelRunner, ThreadBuffers], None] | None = None,
    ops: TritonOps | None = None,
) -> list[int]:
    """Returns the limit of rows by rank, -1 without one-shot sums. With them the tokens are those of one rank."""
    requests = [DriverRequest(prompt) for prompt in PROMPTS]
    expected = on_ranks(folder, [1], Build(), lambda runner: Driver(runner).generate(requests, NUM_TOKENS))

    def rank(collective: Collective) -> int:
        runner = make_model_runner(folder, collective, Build(device_rows=2))
        model = runner.model
        assert isinstance(model, Decoder) and isinstance(model.ops, TritonOps)
        buffers = shared.of(collective.rank) if can_open(collective.rank) else None
        choose_sums(model, ops or model.ops, collective, TimedSums(buffers, times(collective.rank)), torch.float32)
        if model.one_shot is None:
            return -1
        if prepare is not None and buffers is not None:
            prepare(runner, buffers)
        before = model.one_shot.num_computed
        if collective.rank:
            runner.follow()
        else:
            assert Driver(runner).generate(requests, NUM_TOKENS) == expected
            runner.dismiss()
        assert model.one_shot.num_computed - before == 2 * model.config.num_layers * NUM_TOKENS
        return model.one_shot.max_rows

    return with_group([2], rank)


@pytest.mark.slow
def test_the_slowest_rank_decides_for_all(folder: Path) -> None:
    """The second rank measures one shot as slower from 32 rows on."""
    fast, slow = [9] * len(ROWS) + [3] * len(ROWS), [9] * len(ROWS) + [3, 3, 10, 3, 3]
    assert answers(folder, SharedBuffers(2, MAX_BYTES), lambda rank: slow if rank else fast, lambda rank: True) == [8, 8]


@pytest.mark.slow
def test_ranks_sum_after_captures_that_fail_apart(folder: Path) -> None:
    """Each rank's capture ends after another number of exchanges; in the next steps all ranks meet in the same buffers."""
    shared, times = SharedBuffers(2, MAX_BYTES), [9] * len(ROWS) + [3] * len(ROWS)
    assert answers(folder, shared, lambda rank: times, lambda rank: True, fail_capture) == [max(ROWS)] * 2


@pytest.mark.parametrize("gain", [-1, 1], ids=["slower", "not open on one rank"])
def test_without_an_advantage_the_collective_sums(folder: Path, gain: int) -> None:
    times = [9] * len(ROWS) + [9 - gain] * len(ROWS)
    limits = answers(folder, SharedBuffers(2, MAX_BYTES), lambda rank: times, lambda rank: gain < 0 or rank == 0)
    assert limits == [-1, -1]


class OpsWithoutParts(TritonOps):
    """Has no kernel for these rows."""

    def can_add_parts(self, x: Tensor, after: Tensor | None, before: Tensor | None) -> bool:
        return False


def test_rows_without_a_kernel_are_not_measured(folder: Path) -> None:
    """Its times are never read."""
    shared = SharedBuffers(2, MAX_BYTES)
    assert answers(folder, shared, lambda rank: [], lambda rank: True, ops=OpsWithoutParts()) == [-1, -1]
