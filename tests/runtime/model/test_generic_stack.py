"""Stacked experts, read one by one, against stacking, concatenating and cutting whole tensors."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from phalanx_runtime.checkpoint.folder import INDEX
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.load import read_stack, stacked_experts
from phalanx_runtime.model.generic.split import Cut, intersect_spans
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import Checkpoint

CPU = torch.device("cpu")
EXPERTS, HEIGHT, WIDTH = 3, 4, 6
KINDS = [[f"{kind}.{expert}" for expert in range(EXPERTS)] for kind in ("gate", "up")]
SHAPE = (EXPERTS, 2 * HEIGHT, WIDTH)


def tensors() -> dict[str, Tensor]:
    return {name: torch.randn(HEIGHT, WIDTH, dtype=torch.float64) for kind in KINDS for name in kind}


def stored(folder: Path, kept: dict[str, Tensor]) -> Checkpoint:
    """A checkpoint with one file per tensor."""
    for name, tensor in kept.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in kept}}))
    return Checkpoint(folder, torch.float64, CPU)


def whole(kept: dict[str, Tensor]) -> Tensor:
    return torch.cat([torch.stack([kept[name] for name in kind]) for kind in KINDS], 1)


CUTS: dict[str, Cut | None] = {
    "whole": None,
    "rows of each kind": Cut(1, (Span(1, 3), Span(HEIGHT + 1, HEIGHT + 3))),
    "rows across the kinds": Cut(-2, (Span(2, HEIGHT + 1),)),
    "columns": Cut(-1, (Span(2, 5),)),
    "no columns": Cut(2, (Span(6, 6),)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_stack_equals_its_concatenated_parts(tmp_path: Path, cut: Cut | None) -> None:
    kept = tensors()
    with stored(tmp_path, kept) as checkpoint:
        read = read_stack(KINDS, checkpoint, SHAPE, torch.float64, cut)
        halved = read_stack(KINDS, checkpoint, SHAPE, torch.float32, cut)
    expected = whole(kept) if cut is None else cut.apply(whole(kept))
    assert read is not None and torch.equal(read, expected)
    assert halved is not None and torch.equal(halved, expected.float())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=8).map(sorted), st.lists(st.integers(0, 40), min_size=2, max_size=6))
def test_indices_of_all_parts_cover_the_kept_rows(ends: list[int], tops: list[int]) -> None:
    spans = [Span(low, high) for low, high in zip(ends[::2], ends[1::2], strict=False)]
    tops = sorted({0, 41, *tops})
    kept: list[int | None] = [None] * sum(span.size for span in spans)
    for start, stop in pairwise(tops):
        for part, at in intersect_spans(spans, start, stop):
            for offset in range(part.size):
                assert kept[at + offset] is None
                kept[at + offset] = start + part.start + offset
    assert kept == [index for span in spans for index in range(span.start, span.stop)]


def test_unsupported_tensors_are_no_stack(tmp_path: Path) -> None:
    with stored(tmp_path, tensors()) as checkpoint:

        def read(shape: tuple[int, ...], cut: Cut | None = None) -> Tensor | None:
            return read_stack(KINDS, checkpoint, shape, torch.float64, cut)

        assert read((EXPERTS + 1, 2 * HEIGHT, WIDTH)) is None, "an expert is missing"
        assert read((EXPERTS, HEIGHT, WIDTH)) is None, "too many rows"
        assert read((2 * HEIGHT, WIDTH)) is None, "no stack"
        assert read(SHAPE, Cut(0, (Span(0, 1),))) is None, "whole experts"


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    kept = tensors() | {"up.1": torch.zeros(1, WIDTH, dtype=torch.float64)}
    with stored(tmp_path, kept) as checkpoint, pytest.raises(ModelError, match=r"up\.1"):
        read_stack(KINDS, checkpoint, SHAPE, torch.float64, None)


def test_only_conversions_that_stack_are_taken() -> None:
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

    def kinds(patterns: list[str], *operations: Any) -> Any:
        converter = WeightConverter(patterns, "all", list(operations))
        found = [(f"{expert}.{pattern}", pattern) for expert in range(2) for pattern in converter.source_patterns]
        return stacked_experts(converter, found)

    assert kinds(["w1", "w3"], MergeModulelist(0), Concatenate(1)) == [["0.w1", "1.w1"], ["0.w3", "1.w3"]]
    assert kinds(["w2"], MergeModulelist(0)) == [["0.w2", "1.w2"]]
    assert kinds(["w1", "w3"], Concatenate(0)) is None
    assert kinds(["w1", "w3"], MergeModulelist(0), Concatenate(2)) is None
    assert kinds(["w1", "w3"], MergeModulelist(0), Concatenate(1), Chunk(0)) is None
