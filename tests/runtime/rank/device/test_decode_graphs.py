"""Sizes of captured decode steps, the order and end of their captures, and the size that computes a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.rank.device.decode_graphs import (
    CaptureAccount,
    CaptureBudget,
    CaptureCost,
    DecodeGraphs,
    Shortage,
    bucket_sizes,
    capture_order,
    default_budget,
    left_of,
    shortage,
)

MUCH = CaptureBudget(1 << 30, 100.0)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (16, (1, 2, 4, 8, 16)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_sizes_grow_by_powers_of_two_then_eights(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert bucket_sizes(max_num_seqs) == expected


def test_sizes_are_captured_from_coarse_to_fine() -> None:
    assert capture_order(bucket_sizes(40)) == [40, 32, 16, 8, 4, 2, 1, 24]
    assert capture_order((1,)) == [1]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([], ""),
        ([CaptureCost(5, 1.0)], ""),
        ([CaptureCost(5, 1.0), CaptureCost(5, 0.0)], "memory"),
        ([CaptureCost(1, 1.5), CaptureCost(1, 0.5)], "time"),
        ([CaptureCost(20, 3.0)], "memory"),
    ],
)
def test_captures_end_when_a_budget_is_spent(costs: list[CaptureCost], expected: Shortage) -> None:
    assert shortage(costs, CaptureBudget(10, 2.0)) == expected


def test_steps_with_adapters_share_the_budget_and_account() -> None:
    plain = CaptureAccount(captured=(1, 2), skipped=(), num_bytes=30, seconds=2.0, shortage="")
    assert left_of(CaptureBudget(100, 5.0), plain) == CaptureBudget(70, 3.0)
    assert left_of(CaptureBudget(20, 1.0), plain) == CaptureBudget(0, 0.0)
    adapted = CaptureAccount(captured=(2,), skipped=(1,), num_bytes=5, seconds=1.0, shortage="memory")
    assert plain.with_adapted(adapted) == replace(plain, num_bytes=35, seconds=3.0, shortage="memory")


def test_the_budget_is_a_small_share_of_the_memory() -> None:
    assert default_budget(10 << 30).num_bytes == int(0.03 * (10 << 30))
    assert default_budget(140 << 30).num_bytes == 1 << 30


Phase = Literal["warm-up", "recording"]


class WorkGraph:
    """Runs the function when it is warmed up, recorded and replayed."""

    def __init__(self, device: "Device") -> None:
        self._device = device

    def warm_up(self, work: Callable[[], None]) -> None:
        self._device.phase = "warm-up"
        work()

    def capture(self, work: Callable[[], None]) -> None:
        self._work = work
        self._device.phase = "recording"
        work()

    def replay(self) -> None:
        self._work()


class Device:
    """Counts what a function takes in the `costly` phase of its capture."""

    def __init__(
        self,
        seconds: float = 1.0,
        memory: int = 1 << 20,
        error: type[RuntimeError] = torch.OutOfMemoryError,
        costly: Phase = "recording",
    ) -> None:
        self.runs: list[int] = []
        self.now = 0.0
        self.used = 0
        self.phase: Phase | None = None
        self._seconds, self._memory, self._error, self._costly = seconds, memory, error, costly

    def compute(self, size: int) -> None:
        self.runs.append(size)
        if self.phase == self._costly:
            self.now += self._seconds
            self.used += 10
            if self.used > self._memory:
                raise self._error

    def make_graph(self) -> "WorkGraph":
        return WorkGraph(self)

    def graphs(self, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> DecodeGraphs:
        return DecodeGraphs(sizes, self.compute, self.make_graph)

    def clock(self) -> float:
        return self.now

    def used_bytes(self) -> int:
        return self.used


def test_all_sizes_run_before_the_first_capture() -> None:
    device = Device()
    account = device.graphs().capture(MUCH, device.clock, device.used_bytes)
    assert device.runs == [16, 8, 4, 2, 1, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1]
    assert (account.captured, account.skipped) == ((1, 2, 4, 8, 16), ())
    assert (account.num_bytes, account.seconds, account.shortage) == (50, 5.0, "")


@pytest.mark.parametrize(
    ("make_device", "budget", "expected", "reason"),
    [
        (Device, CaptureBudget(1 << 30, 2.0), (8, 16), "time"),
        (Device, CaptureBudget(25, 100.0), (4, 8, 16), "memory"),
        (lambda: Device(memory=15), MUCH, (16,), "memory"),
        (lambda: Device(memory=15, error=RuntimeError), MUCH, (16,), "failure"),
        (lambda: Device(memory=15, costly="warm-up"), MUCH, (16,), "memory"),
        (lambda: Device(memory=15, error=RuntimeError, costly="warm-up"), MUCH, (16,), "failure"),
        (Device, CaptureBudget(1 << 30, 0.0), (), "time"),
    ],
    ids=["time", "memory", "out of memory", "failed capture", "no memory to warm up", "failed warm-up", "no time"],
)
def test_a_capture_that_ends_early_leaves_the_coarse_sizes(
    make_device: Callable[[], Device], budget: CaptureBudget, expected: tuple[int, ...], reason: Shortage
) -> None:
    device = make_device()
    graphs = device.graphs()
    account = graphs.capture(budget, device.clock, device.used_bytes)
    assert account.captured == expected
    assert sorted(account.captured + account.skipped) == [1, 2, 4, 8, 16]
    assert account.shortage == reason
    assert graphs.size_for(1) == (expected[0] if expected else None)


class Peers:
    """Other ranks that lack nothing."""

    def __init__(self) -> None:
        self.lacks: list[Shortage] = []

    def agree(self, lack: Shortage) -> Shortage:
        self.lacks.append(lack)
        return lack


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_peers_agree_on_a_capture_that_fails(error: type[RuntimeError]) -> None:
    device, peers = Device(memory=15, error=error), Peers()
    account = device.graphs().capture(MUCH, device.clock, device.used_bytes, peers.agree)
    assert peers.lacks == ["", "", "", account.shortage]
    assert account.captured == (16,) and account.shortage == ("memory" if error is torch.OutOfMemoryError else "failure")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_failed_warm_up_among_peers_is_raised(error: type[RuntimeError]) -> None:
    """Its collectives run, so that this rank and its peers no longer call the same ones."""
    device, peers = Device(memory=15, error=error, costly="warm-up"), Peers()
    with pytest.raises(error):
        device.graphs().capture(MUCH, device.clock, device.used_bytes, peers.agree)
    assert peers.lacks == ["", "", ""]
    assert device.runs[-1] == 8 and device.phase == "warm-up"


@given(max_num_seqs=st.integers(1, 300), data=st.data())
def test_a_step_runs_in_the_smallest_size(max_num_seqs: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, max_num_seqs))
    device = Device(seconds=0.0)
    sizes = bucket_sizes(max_num_seqs)
    graphs = device.graphs(sizes)
    graphs.capture(MUCH, device.clock)
    assert graphs.run(num_rows) == min(size for size in sizes if size >= num_rows)
    assert device.runs[-1] == graphs.size_for(num_rows)
    assert dict(graphs.num_replays) == {device.runs[-1]: 1}
    assert device.runs[-1] - num_rows < 8


def test_more_rows_than_any_size_run_nothing() -> None:
    device = Device()
    graphs = device.graphs((1, 2))
    graphs.capture(MUCH, device.clock)
    device.runs.clear()
    assert graphs.run(3) is None
    assert device.runs == [] and not graphs.num_replays
