"""Inputs of a decode step on the device equal those of `BatchBuilder`; padding rows are harmless."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx_runtime.core.admission import EXTRA_LOGITS_ROWS
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, StepBatch, write_pages
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.device_rows import DeviceRows
from phalanx_runtime.rank.device.limits import workspace_bytes
from phalanx_runtime.rank.sampling.gpu.sample import make_workspace
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.examples import examples
from tests.runtime.rank.device.row_plans import MAX_MODEL_LEN, NUM_ROWS, PAGE, Move, Rows, decodes, moves, new_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 3
NUM_PAGES = 10_000


class Run:
    """Rows on the device and in a builder, after the same plans."""

    def __init__(self, steps: list[list[Move]], window: int = 0, has_parts: bool = False) -> None:
        self._window, self._has_parts = window, has_parts
        self.rows = Rows()
        self.device_rows = DeviceRows(NUM_ROWS, MAX_MODEL_LEN, PAGE, DEVICE, num_pages_with_parts=NUM_PAGES if has_parts else 0)
        self.inputs = DecodeInputs(self.device_rows, HEADS, window)
        shape = CacheShape(PAGE, HEADS, 1 << 10, PageWindow(window, PAGE) if window else None, has_parts)
        self._builder = BatchBuilder(shape, torch.float32, DEVICE)
        for step in steps:
            self.expected(step)

    def expected(self, step: list[Move]) -> tuple[StepBatch, list[int]]:
        """Applies a step; returns the builder's tensors and their order in the plan. The rows sample tokens afterwards."""
        plan = self.rows.plan(step)
        if self._has_parts:  # the last page gets two parts, as after a preemption
            pages = [page for pages in plan.pages for page in pages]
            plan = msgspec.structs.replace(
                plan, parts=[(page, page + 2) for page in pages[-1:]] + [(p, 3 * p + 1) for p in pages]
            )
        self.device_rows.update(plan)
        batch = self._builder.build(self.rows.known(plan))
        self.inputs.build(NUM_ROWS)
        sampled = torch.tensor(self.rows.sample(plan), device=DEVICE)
        self.device_rows.record(sampled, self.device_rows.batch_rows[: len(sampled)])
        order = np.lexsort((-batch_lengths(plan, 0 if self._has_parts else self._window),))
        return batch, order.tolist()


def batch_lengths(plan: StepPlan, window: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the tokens that attention of each request starts from, by which the builder sorts."""
    starts, counts = np.asarray(plan.starts), np.asarray(plan.counts)
    skipped = np.maximum(0, starts - window + 1) // PAGE * PAGE if window else 0
    lengths: np.ndarray[Any, np.dtype[np.int64]] = starts + counts - skipped
    return lengths


def runs_with_decodes() -> st.SearchStrategy[tuple[list[list[Move]], list[Move]]]:
    return st.tuples(moves, decodes.filter(bool))


@settings(max_examples=examples(30))
@given(case=runs_with_decodes(), window=st.sampled_from([0, 2, 5, 9]))
def test_inputs_equal_those_of_the_batch_builder(case: tuple[list[list[Move]], list[Move]], window: int) -> None:
    """With a window both start at the first page that the token reads."""
    steps, step = case
    run = Run(steps, window)
    expected, order = run.expected(step)
    made = run.inputs.batch(NUM_ROWS)
    size = len(step)
    assert made.tokens[order].tolist() == expected.tokens.tolist()
    assert made.positions[order].tolist() == expected.positions.tolist()
    assert made.slots.view(-1, HEADS)[order].flatten().tolist() == expected.slots.tolist()
    segments, wanted = made.segments(), expected.segments()
    assert segments.lengths[order].tolist() == wanted.lengths.tolist()
    for at, (index, length) in enumerate(zip(order, wanted.lengths.tolist(), strict=True)):
        num_pages = -(-length // PAGE)
        assert segments.tables[index, :num_pages].tolist() == wanted.tables[at, :num_pages].tolist()
    padding = range(size, NUM_ROWS)
    assert (
        made.tokens[size:].tolist() == made.positions[size:].tolist() == segments.lengths[size:].tolist() == [0 for _ in padding]
    )
    assert made.slots.view(-1, HEADS)[size:].tolist() == [[-1] * HEADS] * (NUM_ROWS - size)


@pytest.mark.slow
@settings(max_examples=30)
@given(case=runs_with_decodes(), window=st.sampled_from([2, 5, 9]))
def test_inputs_with_parts_equal_those_of_the_builder(case: tuple[list[list[Move]], list[Move]], window: int) -> None:
    steps, step = case
    run = Run(steps, window, has_parts=True)
    expected, order = run.expected(step)
    made = run.inputs.batch(NUM_ROWS)
    assert made.windowed is not None and expected.windowed is not None
    for own, wanted in ((made, expected), (made.windowed, expected.windowed)):
        assert own.slots.view(-1, HEADS)[order].flatten().tolist() == wanted.slots.tolist()
        assert own.slots.view(-1, HEADS)[len(step) :].tolist() == [[-1] * HEADS] * (NUM_ROWS - len(step))
        lengths = wanted.segments().lengths.tolist()
        assert own.segments().lengths[order].tolist() == lengths
        for at, (index, length) in enumerate(zip(order, lengths, strict=True)):
            num_pages = -(-length // PAGE)
            assert own.segments().tables[index, :num_pages].tolist() == wanted.segments().tables[at, :num_pages].tolist()
    starts = expected.positions.tolist()
    assert expected.windowed.segments().lengths.tolist() == [at + 1 - max(0, at - window + 1) // PAGE * PAGE for at in starts]


def test_sizes_share_tensors_at_constant_addresses() -> None:
    run = Run([[(0, "admit", 5), (1, "admit", 9)]])
    small, large = run.inputs.batch(2), run.inputs.batch(NUM_ROWS)
    assert run.inputs.batch(2) is run.inputs.build(2) is small
    assert small.segments() is small.segments()
    for name in ("tokens", "positions", "slots", "logits_indices"):
        assert getattr(small, name).data_ptr() == getattr(large, name).data_ptr()
    assert small.segments().tables.data_ptr() == large.segments().tables.data_ptr()
    assert [part.tolist() for part in small.segments().blocks(1)] == [[0, 1], [0, 0]]
    assert small.segments().starts.tolist() == [0, 1, 2]


def test_rows_with_an_adapter_have_a_piece() -> None:
    rows = DeviceRows(NUM_ROWS, MAX_MODEL_LEN, PAGE, DEVICE)
    inputs = DecodeInputs(rows, HEADS)
    admitted = [msgspec.structs.replace(new_row(row), adapter=slot) for row, slot in ((2, 2), (0, 0), (1, 5))]
    plan = {"rows": [2, 0, 1], "starts": [0] * 3, "counts": [1] * 3, "pages": [[1], [2], [3]], "tokens": [7] * 3}
    rows.update(StepPlan(step=0, admitted=admitted, draws=[], **plan))  # type: ignore[arg-type]
    before = inputs.batch(4, has_adapters=True).adapters
    adapters = inputs.build(4, has_adapters=True).adapters
    assert inputs.batch(4).adapters is None
    assert adapters is not None and adapters is before
    assert adapters.table.tolist() == [[1, 0, 1], [0, 1, 1], [4, 2, 3], [0, 3, 3]]
    assert adapters.rows.tolist() == [0, 1, 2, 3] and adapters.slots.tolist() == [1, -1, 4, -1]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [[], [0], [3, 0]], ids=["no row", "one", "two"])
def test_attention_over_padding_rows_is_zero(rows: list[int], window: int | None) -> None:
    """Their keys and values are never read."""
    dim, num_pages = 16, 30
    run = Run([[(row, "admit", 7 + row) for row in (0, 3)]])
    run.device_rows.update(run.rows.plan([(row, "decode", 1) for row in rows]))
    batch = run.inputs.build(NUM_ROWS)
    chance = torch.Generator().manual_seed(0)
    q = torch.randn(NUM_ROWS, 2 * HEADS, dim, generator=chance).to(DEVICE)
    k, v = (torch.randn(NUM_ROWS, HEADS, dim, generator=chance).to(DEVICE) for _ in range(2))
    cache = LayerCache(*(torch.randn(num_pages, HEADS, PAGE, dim, generator=chance).to(DEVICE) for _ in range(2)))
    kernels, size = TritonAttention(), len(rows)
    write_pages(k[:size], v[:size], cache, batch.slots[: size * HEADS])
    k[size:], v[size:] = torch.nan, torch.nan
    out = kernels(q, k, v, cache=cache, batch=batch, params=AttentionParams(window=window), is_written=True)
    assert kernels.num_computed == NUM_ROWS
    assert bool(torch.isfinite(out).all()) and not bool(out[len(rows) :].any())
    assert bool((out[: len(rows)] != 0).all())


class CountedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes += result.nbytes
        return result


@pytest.mark.parametrize(
    ("num_rows", "length", "vocab_size"),
    [(8, 100, 400), (256, 131_072, 152_064), (1024, 131_072, 152_064), (1024, 1 << 20, 262_144), (4096, 32_768, 450_000)],
)
def test_reserved_workspace_holds_tables_and_sampling(num_rows: int, length: int, vocab_size: int) -> None:
    """Memory that is not reserved is taken from what other processes of the device have."""
    device = torch.device("meta")
    with CountedBytes() as counted:  # type: ignore[no-untyped-call]
        rows = DeviceRows(num_rows, length, 16, device, num_pages_with_parts=10)
        DecodeInputs(rows, 8, window=1024)
        make_workspace(vocab_size, num_rows + EXTRA_LOGITS_ROWS, device)
    reserved = workspace_bytes(num_rows, -(-length // 16))
    assert counted.num_bytes <= reserved <= 1.1 * counted.num_bytes + (4 << 20)
