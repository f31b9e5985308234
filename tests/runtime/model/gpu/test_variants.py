"""What Triton specialises a launch for, and what a variant has of it."""

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.kernels.variant import KernelVariant, Unaligned, launch, observed_launches, variant_of


@triton.jit(do_not_specialize=["count", "words"])  # type: ignore[untyped-decorator]
def scaled(x, out, words, stride, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index * stride, mask=index < count, other=0.0) * factor, mask=index < count)


VALUES = {"x": torch.float32, "out": torch.float32, "words": torch.int32, "stride": 16, "count": 7, "factor": 2.0, "BLOCK": 8}


def changed(**values: object) -> KernelVariant:
    return variant_of(scaled, {**VALUES, **values}, num_warps=1)


@pytest.mark.parametrize(
    "values",
    [
        {"x": torch.zeros(9)},
        {"x": torch.zeros(9)[4:]},
        {"stride": 4096},
        {"stride": 0},
        {"count": 1},
        {"count": 16},
        {"factor": 0.25},
        {"words": torch.zeros(9, dtype=torch.int32)[1:]},
    ],
)
def test_values_of_a_class_share_a_variant(values: dict[str, object]) -> None:
    assert changed(**values) == changed()


@pytest.mark.parametrize(
    "values",
    [
        {"x": torch.bfloat16},
        {"x": torch.zeros(9)[1:]},
        {"stride": 1},
        {"stride": 8},
        {"stride": 1 << 32},
        {"count": 1 << 32},
        {"words": torch.int64},
        {"BLOCK": 16},
    ],
)
def test_other_classes_are_other_variants(values: dict[str, object]) -> None:
    assert changed(**values) != changed()


def test_options_are_part_of_a_variant() -> None:
    assert variant_of(scaled, VALUES, num_warps=2) != changed()


def test_an_unaligned_pointer_is_one_to_triton() -> None:
    assert Unaligned(torch.float32).data_ptr() % 16


def test_launches_are_observed_and_run() -> None:
    x, out = torch.arange(8.0), torch.zeros(8)
    arguments = {"x": x, "out": out, "words": x, "stride": 1, "count": 3, "factor": 2.0, "BLOCK": 8}
    with observed_launches() as found:
        launch(scaled, (1,), arguments, num_warps=1)
    launch(scaled, (1,), {**arguments, "count": 4}, num_warps=1)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, *[0.0] * 4]
    assert [(variant.name, variant.options) for variant in found] == [("scaled", (("num_warps", 1),))]


def test_fake_tensors_are_observed_and_not_launched() -> None:
    with FakeTensorMode(), observed_launches() as found:
        x = torch.empty(8, device="cuda")
        launch(scaled, (1,), {"x": x, "out": x, "words": x, "stride": 1, "count": 3, "factor": 2.0, "BLOCK": 8})
    assert len(found) == 1
