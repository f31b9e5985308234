"""The tensors of a step follow from its plan."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.step_plan import LAST_SAMPLED, NewRow, StepPlan
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.page_format import INT8_MAX, ScaledFormat
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, PagedAttention, StepBatch
from phalanx_runtime.rank.step.batch import BatchBuilder, band_sizes
from phalanx_runtime.rank.step.page_tables import CacheShape

PAGE = 4
HEADS = 2


@settings(deadline=None)
@given(pages=st.lists(st.integers(1, 50), min_size=1, max_size=30), padding=st.integers(0, 60))
def test_bands_have_all_requests_and_bounded_padding(pages: list[int], padding: int) -> None:
    descending = sorted(pages, reverse=True)
    sizes = band_sizes(descending, padding)
    assert sum(sizes) == len(descending) and all(sizes)
    start = 0
    for size in sizes:
        band = descending[start : start + size]
        assert sum(band[0] - count for count in band) <= padding
        start += size


@pytest.mark.parametrize(
    ("pages", "padding", "sizes"),
    [([9, 9, 9], 0, [3]), ([9, 5, 1], 100, [3]), ([9, 5, 1], 4, [2, 1]), ([9, 5, 4, 1], 0, [1, 1, 1, 1]), ([], 5, [])],
    ids=["equal", "all in one", "two", "each alone", "empty"],
)
def test_bands_of_descending_page_counts(pages: list[int], padding: int, sizes: list[int]) -> None:
    assert band_sizes(pages, padding) == sizes


def row(number: int) -> NewRow:
    return NewRow(number, wire.Sampling(max_tokens=1, seed=0, temperature=0.0))


def builder() -> BatchBuilder:
    return BatchBuilder(CacheShape(PAGE, HEADS, 1 << 10), torch.float32, torch.device("cpu"))


def visible(mask: torch.Tensor | None) -> list[list[int]]:
    assert mask is not None
    return [torch.isfinite(line).nonzero().flatten().tolist() for line in mask.flatten(0, -2)]


def mixed() -> tuple[BatchBuilder, StepBatch]:
    """Rows 0 and 1 decode after 5 and 9 tokens; row 3 starts with 3 tokens; row 20 computes 2 after 4."""
    made = builder()
    made.build(
        StepPlan(
            step=0,
            admitted=[row(0), row(1)],
            rows=[0, 1],
            starts=[0, 0],
            counts=[5, 9],
            pages=[[7, 2], [1, 3, 5]],
            tokens=[0] * 14,
            draws=[],
        )
    )
    made.build(StepPlan(step=1, admitted=[row(20)], rows=[20], starts=[0], counts=[4], pages=[[8]], tokens=[0] * 4, draws=[]))
    plan = StepPlan(
        step=2,
        admitted=[row(3)],
        rows=[0, 3, 20, 1],
        starts=[5, 0, 4, 9],
        counts=[1, 3, 2, 1],
        pages=[[], [9], [6], []],
        tokens=[50, 30, 31, 32, 40, 41, 10],
        draws=[(0, 0), (1, 0), (3, 2)],
    )
    return made, made.build(plan)


def test_decoding_requests_come_first_and_longest_first() -> None:
    _, batch = mixed()
    assert batch.tokens.tolist() == [10, 50, 40, 41, 30, 31, 32]
    assert batch.positions.tolist() == [9, 5, 4, 5, 0, 1, 2]
    assert batch.logits_indices.tolist() == [1, 6, 0]
    assert [(band.start, band.size, band.lengths) for band in batch.bands] == [(0, 2, [10, 6])]
    assert [(chunk.start, chunk.size, chunk.length) for chunk in batch.chunks] == [(2, 2, 6), (4, 3, 3)]


def test_slots_follow_the_page_table() -> None:
    _, batch = mixed()
    pages = [(5, 1), (2, 1), (6, 0), (6, 1), (9, 0), (9, 1), (9, 2)]
    assert batch.slots.tolist() == [(page * HEADS + head) * PAGE + at for page, at in pages for head in range(HEADS)]


def test_padding_repeats_the_rows_own_first_page() -> None:
    _, batch = mixed()
    assert batch.bands[0].tables.tolist() == [[1, 3, 5], [7, 2, 7]]
    assert batch.bands[0].cache_rows.tolist() == [
        page * HEADS + h for pages in ([1, 3, 5], [7, 2, 7]) for h in (0, 1) for page in pages
    ]


def test_masks_show_the_past_within_the_window() -> None:
    _, batch = mixed()
    band, (part, whole) = batch.bands[0], batch.chunks
    assert visible(band.masks[None]) == [list(range(10)), list(range(6))]
    assert visible(band.masks[3]) == [[7, 8, 9], [3, 4, 5]]
    assert whole.cache_rows is None and whole.masks == {}
    assert part.cache_rows is not None
    assert visible(part.masks[None]) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert visible(part.masks[3]) == [[2, 3, 4], [3, 4, 5]]


def test_restarted_row_forgets_its_pages() -> None:
    made, _ = mixed()
    batch = made.build(
        StepPlan(step=3, admitted=[row(0)], rows=[0], starts=[0], counts=[2], pages=[[11]], tokens=[1, 2], draws=[(0, 0)])
    )
    assert batch.slots.tolist()[:2] == [11 * HEADS * PAGE, (11 * HEADS + 1) * PAGE]
    assert batch.chunks[0].table.tolist() == [11]


SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.0])
FORMS = [AttentionParams(), AttentionParams(3), AttentionParams(slopes=SLOPES), AttentionParams(block=4)]


@pytest.mark.parametrize("form", FORMS, ids=["all", "window", "slopes", "blocks"])
@pytest.mark.parametrize("gather_bytes", [1, 300, 1 << 20], ids=["one by one", "two", "all"])
def test_attention_is_equal_for_any_gather_size(gather_bytes: int, form: AttentionParams) -> None:
    _, batch = mixed()
    assert [band.size for band in batch.bands] == [2]
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(7, heads, 8, generator=rng) for heads in (2 * HEADS, HEADS, HEADS))
    cache = LayerCache(*(torch.randn(10, HEADS, PAGE, 8, generator=rng) for _ in range(2)))
    paged = PagedAttention(gather_bytes)(q, k, v, cache, batch, form)
    torch.testing.assert_close(paged, DenseAttention()(q, k, v, cache, batch, form), rtol=0, atol=2e-6)


@dataclass(frozen=True, slots=True)
class RecordingFormat(ScaledFormat):
    """int8 that records how many numbers it decodes at a time."""

    name: str = "int8"
    number: torch.dtype = torch.int8
    maximum: float = INT8_MAX
    decoded: list[int] = field(default_factory=list, compare=False)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.decoded.append(codes.numel())
        return ScaledFormat.decode(self, codes, scales, dtype)


@pytest.mark.parametrize(("gather_bytes", "together"), [(2 * 192 * (8 + 9) - 1, 1), (2 * 192 * (8 + 9), 2)])
def test_gathers_include_the_scratch_of_codes(gather_bytes: int, together: int) -> None:
    """A request gathers 192 keys' numbers: float32 keys and values, and 9 bytes while codes are expanded."""
    _, batch = mixed()
    rng, format = torch.Generator().manual_seed(1), RecordingFormat()
    q, k, v = (torch.randn(7, heads, 8, generator=rng) for heads in (2 * HEADS, HEADS, HEADS))
    parts = [
        torch.zeros(10, HEADS, PAGE, size, dtype=part) for size, part in ((8, torch.int8), (1, torch.bfloat16)) for _ in "kv"
    ]
    PagedAttention(gather_bytes)(q, k, v, LayerCache(*parts, format=format), batch, AttentionParams())
    assert max(format.decoded) == 192 * together


def test_tokens_that_only_the_device_knows_are_filled() -> None:
    """Rows 0 and 1 continue with their last tokens, row 1 before a draft token and a missing one."""
    made, _ = mixed()
    plan = StepPlan(
        step=3,
        admitted=[],
        rows=[1, 0, 3],
        starts=[10, 6, 3],
        counts=[3, 1, 1],
        pages=[[12], [], []],
        tokens=[LAST_SAMPLED, 61, -1, LAST_SAMPLED, 62],
        draws=[(0, 3), (1, 1), (2, 0)],
    )
    with pytest.raises(ValueError, match="last_tokens"):
        made.build(plan)
    made.last_tokens = torch.tensor([70, 71, 72, 73], dtype=torch.int32)
    assert made.tensors(plan).tokens.tolist() == [70, 62, 71, 61, 0]
