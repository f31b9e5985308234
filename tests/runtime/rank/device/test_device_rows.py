"""Rows on the device follow the plans as those of `BatchBuilder` do, by one launch per plan."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace

from phalanx_runtime.core.step_plan import LAST_SAMPLED, StepPlan
from phalanx_runtime.rank.device.device_rows import DeviceRows, pack_update, table_block
from phalanx_runtime.rank.device.host_tokens import NUM_SLOTS, HostTokens
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.rank.device.row_plans import MAX_MODEL_LEN, NUM_ROWS, PAGE, Move, Rows, moves, new_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_rows(max_rows: int = NUM_ROWS) -> DeviceRows:
    return DeviceRows(max_rows, MAX_MODEL_LEN, PAGE, DEVICE)


def check_tables(device_rows: DeviceRows, builder: BatchBuilder, rows: Rows) -> None:
    """Compares all rows with the tables of the builder, by a plan that changes nothing."""
    probe = rows.probe()
    batch = builder.tensors(probe)
    segments = batch.segments()
    order = np.lexsort((-np.asarray(probe.starts),))
    for at, (index, length) in enumerate(zip(order.tolist(), segments.lengths.tolist(), strict=True)):
        row = probe.rows[index]
        num_pages = -(-length // PAGE)
        assert device_rows.lengths[row].item() == length
        assert device_rows.tables[row, :num_pages].tolist() == segments.tables[at, :num_pages].tolist()


@settings(max_examples=30)
@given(steps=moves)
def test_rows_equal_those_of_the_batch_builder(steps: list[list[Move]]) -> None:
    rows, device_rows = Rows(), make_rows()
    builder = BatchBuilder(CacheShape(PAGE, 2, 1 << 10), torch.float32, DEVICE)
    addresses = [tensor.data_ptr() for tensor in (device_rows.tables, device_rows.lengths, device_rows.last_tokens)]
    for step in steps:
        plan = rows.plan(step)
        device_rows.update(plan)
        builder.update(plan)
        check_tables(device_rows, builder, rows)
        assert device_rows.batch_rows.tolist() == plan.rows + [-1] * (NUM_ROWS - len(plan.rows))
        for row, state in rows.states.items():
            assert device_rows.tables[row, : len(state.pages)].tolist() == state.pages
            assert device_rows.held[row].item() == len(state.pages)
        sampled = torch.tensor(rows.sample(plan), device=DEVICE)
        device_rows.record(sampled, device_rows.batch_rows[: len(plan.rows)])
        assert {row: device_rows.last_tokens[row].item() for row in rows.states} == {
            row: state.last_token for row, state in rows.states.items()
        }
    assert addresses == [tensor.data_ptr() for tensor in (device_rows.tables, device_rows.lengths, device_rows.last_tokens)]


def plan_of(rows: list[int], tokens: list[int], counts: list[int], pages: list[list[int]]) -> StepPlan:
    return StepPlan(
        step=0,
        admitted=[new_row(row) for row in rows],
        rows=rows,
        starts=[0] * len(rows),
        counts=counts,
        pages=pages,
        tokens=tokens,
        draws=[],
    )


def test_only_given_tokens_of_decodes_are_packed() -> None:
    device_rows = make_rows()
    batch_rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    device_rows.record(torch.tensor([11, 12, 13, 14], device=DEVICE), batch_rows)
    device_rows.update(plan_of([0, 1, 2, 3], [50, LAST_SAMPLED, 60, 61, -1], [1, 1, 2, 1], [[1], [2], [3], [4]]))
    assert device_rows.last_tokens.tolist()[:4] == [50, 12, 13, 0]


def test_an_admitted_row_without_tokens_is_no_batch_row() -> None:
    device_rows = make_rows()
    device_rows.update(plan_of([2], [1], [1], [[5]]))
    plan = StepPlan(
        step=1, admitted=[new_row(2), new_row(3)], rows=[3], starts=[0], counts=[1], pages=[[6]], tokens=[1], draws=[]
    )
    device_rows.update(plan)
    assert device_rows.batch_rows.tolist()[:2] == [3, -1]
    assert device_rows.held.tolist()[2:4] == [0, 1]


def test_padding_records_no_token() -> None:
    device_rows = make_rows()
    batch_rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    device_rows.record(torch.tensor([7, 8, 9], device=DEVICE), batch_rows)
    assert device_rows.last_tokens.tolist() == [9, 0, 0, 7, 0, 0]


def test_an_update_grows_with_its_pages() -> None:
    device_rows = DeviceRows(2, 8192 * PAGE, PAGE, DEVICE)
    pages = list(range(8192, 0, -1))
    for _ in range(3):
        device_rows.update(plan_of([1], [0] * 5, [5], [pages]))
    assert device_rows.tables[1].tolist() == pages
    assert device_rows.tables[0].tolist() == [0] * 8192


@pytest.mark.parametrize(("row", "count"), [(NUM_ROWS, 1), (0, MAX_MODEL_LEN + PAGE)])
def test_a_plan_beyond_the_tables_raises(row: int, count: int) -> None:
    with pytest.raises(ValueError, match="exceeds"):
        make_rows().update(plan_of([row], [0] * count, [count], [[1]]))


def test_an_update_is_a_function_of_its_plan() -> None:
    words = pack_update(plan_of([4], [9], [1], [[7, 8]]))
    assert words.tolist() == [1, 1, 0, 0, 4, 0, 12, 2, 1, 9, 0, 0, 7, 8]


def test_rows_have_the_adapter_of_their_request() -> None:
    device_rows, address = make_rows(), 0
    first = plan_of([3, 1], [1, 2], [1, 1], [[5], [6]])
    adapters = {"admitted": [replace(new, adapter=slot) for new, slot in zip(first.admitted, (2, 1), strict=True)]}
    following = {"admitted": [], "pages": [[], []], "starts": [1, 1]}
    for changes, expected in ((adapters, [0, 1, 0, 2]), (following, [0, 1, 0, 2]), ({}, [0, 0, 0, 0])):
        device_rows.update(replace(first, **changes))
        assert device_rows.adapters.tolist()[:4] == expected
        assert device_rows.adapters.data_ptr() == (address or device_rows.adapters.data_ptr())
        address = device_rows.adapters.data_ptr()


@pytest.mark.parametrize(("max_pages", "expected"), [(1, 16), (16, 16), (17, 32), (500, 512), (8192, 512)])
def test_a_table_is_a_multiple_of_blocks(max_pages: int, expected: int) -> None:
    assert table_block(max_pages) == expected
    width = DeviceRows(1, max_pages, 1, DEVICE).tables.shape[1]
    assert max_pages <= width < max_pages + expected


def test_tokens_of_a_step_are_kept_for_the_host() -> None:
    tokens = HostTokens(NUM_ROWS, DEVICE)
    stored = [tokens.store(torch.arange(step, step + 2, device=DEVICE)) for step in range(NUM_SLOTS)]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert [one.tolist() for one in stored] == [[step, step + 1] for step in range(NUM_SLOTS)]
    assert all(one.device.type == "cpu" for one in stored)
