"""Linears that round their inputs to int8 against exact sums of the same codes, and where they are used."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, interleave
from phalanx_runtime.model.linear.grouped import GroupedProduct, make_grouped_product
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from phalanx_runtime.model.linear.rounded import RoundedBlocks, can_round, make_rounded_blocks
from phalanx_runtime.model.native.library import Library
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from tests.runtime.model.integer_checkpoints import KINDS, save_integers
from tests.runtime.model.targets import Ones, compiled
from tests.runtime.tiny import save_tiny

ROWS = [1, 3, 8, 17, 130]


@pytest.fixture
def kernels() -> Iterator[Library]:
    """The kernels of this processor, if it multiplies bytes."""
    native = compiled("native")
    if not native.has_int8_dot:
        pytest.skip("this processor has no AVX-512 VNNI")
    yield native


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def random_weight(outputs: int, inputs: int) -> IntWeight:
    chance = torch.Generator().manual_seed(outputs + inputs)
    return IntWeight(
        codes=torch.randint(256, (outputs, inputs), generator=chance, dtype=torch.uint8),
        scales=(torch.rand(outputs, 1, generator=chance) / 1000).bfloat16(),
        zeros=None,
        groups=torch.zeros(inputs, dtype=torch.int64),
        bits=8,
        dtype=torch.bfloat16,
        rounds_inputs=True,
    )


def random_groups(outputs: int, inputs: int, group: int, *, has_zeros: bool) -> IntWeight:
    """Returns a weight of 4 bits in groups."""
    chance = torch.Generator().manual_seed(outputs + inputs)
    groups = torch.arange(inputs) // group
    size = (outputs, int(groups[-1]) + 1)
    return IntWeight(
        codes=torch.randint(16, (outputs, inputs), generator=chance, dtype=torch.uint8),
        scales=(torch.rand(size, generator=chance) / 50).bfloat16(),
        zeros=torch.randint(16, size, generator=chance, dtype=torch.uint8) if has_zeros else None,
        groups=groups,
        bits=4,
        dtype=torch.bfloat16,
        rounds_inputs=True,
    )


def reference(weight: IntWeight, x: torch.Tensor) -> torch.Tensor:
    """Returns the product of the weight and of x in int8 with a scale per row, in fp32."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    codes = (wide * (1 / scales)).round()
    assert codes.abs().max() <= 127
    return ((codes.double() * scales) @ weight.dequantize(torch.float64).t()).float()


def blocks_of(linear: object) -> type:
    """Returns the kind of blocks of a linear that a kernel computes."""
    assert isinstance(linear, NativeLinear | NativeGated)
    return type(linear.blocks)


def close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 2**-8) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=relative, atol=relative / 10)


@pytest.mark.parametrize("shape", [(48, 64), (250, 38), (7, 131), (400, 96), (16, 4)], ids=str)
def test_kernel_equals_exact_sums(kernels: Library, shape: tuple[int, int]) -> None:
    weight, bias = random_weight(*shape), noise(shape[0])
    linear = NativeLinear(make_rounded_blocks(kernels, weight, bias))
    for rows in ROWS:
        x, residual = noise(rows, shape[1] + 6)[:, : shape[1]], noise(rows, shape[0])
        expected = reference(weight, x) + bias.float()
        close(linear(x), expected)
        sums = residual.float() + expected
        linear.add_to(residual, x)
        close(residual, sums)
        close(linear(x.float()), expected, 1e-5)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", [(48, 64, 32), (250, 136, 128), (7, 131, 64)], ids=str)
def test_groups_of_4_bits_equal_exact_sums(kernels: Library, shape: tuple[int, int, int], *, has_zeros: bool) -> None:
    (outputs, inputs, _), weight = shape, random_groups(*shape, has_zeros=has_zeros)
    linear = NativeLinear(make_grouped_product(kernels, weight, None))
    for rows in ROWS:
        x, residual = noise(rows, inputs + 6)[:, :inputs], noise(rows, outputs)
        expected = reference(weight, x)
        close(linear(x.float()), expected, 1e-5)
        sums = residual.float() + expected
        linear.add_to(residual, x)
        close(residual, sums)
        if outputs % 2 == 0:
            gates, ups = expected.chunk(2, 1)
            gated = NativeGated(make_grouped_product(kernels, weight.by_outputs(interleave), None), outputs // 2)
            close(gated(x), silu(gates) * ups, 2**-7)


@pytest.mark.parametrize("inner", [48, 33])
def test_gated_kernel_equals_exact_sums(kernels: Library, inner: int) -> None:
    weight = random_weight(2 * inner, 72)
    for rows in ROWS:
        x = noise(rows, 72)
        gates, ups = reference(weight, x).chunk(2, 1)
        gated = NativeGated(make_rounded_blocks(kernels, weight.by_outputs(interleave), None), inner)
        close(gated(x), silu(gates) * ups, 2**-7)
        close(gated.with_addition(x, Ones()), silu(gates + 1) * (ups + 1), 2**-4)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 70])
def test_numbers_that_are_not_finite_stay_visible(kernels: Library, number: float, place: int) -> None:
    x = noise(2, 71)
    x[1, place] = number
    groups = random_groups(16, 71, 64, has_zeros=False)
    for blocks in (make_rounded_blocks(kernels, random_weight(16, 71), None), make_grouped_product(kernels, groups, None)):
        y = NativeLinear(blocks)(x)
        assert bool(y[0].isfinite().all()) and bool(y[1].isnan().all())


def test_zero_rows_give_zero(kernels: Library) -> None:
    linear = NativeLinear(make_rounded_blocks(kernels, random_weight(16, 64), None))
    y = linear(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert bool((y == 0).all())


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_checkpoints_in_w4a8_round_inputs_in_bf16(kernels: Library, tmp_path: Path, dtype: torch.dtype, *, rounds: bool) -> None:
    kind = replace(KINDS["w4 groups"], rounds_inputs=True)
    save_integers(save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "integers", tmp_path / "exact", kind)
    options = LoadOptions(dtype=dtype, device=torch.device("cpu"), kernels=Kernels(compiled=True), positions=64)
    model = open_model(tmp_path / "integers").load(SoloCollective(), options)
    assert isinstance(model, Decoder)
    for part in (model.layers[0].qkv, model.layers[0].o, model.layers[0].down, model.layers[0].gate_up):
        assert isinstance(part, NativeLinear | NativeGated) and isinstance(part.blocks, GroupedProduct)
        assert part.blocks.rounds_inputs == rounds


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_checkpoints_in_w8a8_round_inputs_in_bf16(kernels: Library, tmp_path: Path, dtype: torch.dtype, *, rounds: bool) -> None:
    save_integers(save_tiny(tmp_path / "model"), tmp_path / "integers", tmp_path / "exact", KINDS["int8 channel"])
    options = LoadOptions(dtype=dtype, device=torch.device("cpu"), kernels=Kernels(compiled=True), positions=64)
    model = open_model(tmp_path / "integers").load(SoloCollective(), options)
    assert isinstance(model, Decoder)
    for layer in model.layers:
        assert {blocks_of(part) for part in (layer.qkv, layer.o, layer.down, layer.gate_up)} == {
            RoundedBlocks if rounds else GroupedProduct
        }


def test_weights_alone_do_not_round_inputs(kernels: Library) -> None:
    weight = random_weight(32, 64)
    plain = IntWeight(codes=weight.codes, scales=weight.scales, zeros=None, groups=weight.groups, bits=8, dtype=torch.bfloat16)
    zeros = IntWeight(
        codes=weight.codes,
        scales=weight.scales,
        zeros=torch.full((32, 1), 7, dtype=torch.uint8),
        groups=weight.groups,
        bits=8,
        dtype=torch.bfloat16,
        rounds_inputs=True,
    )
    assert can_round(weight) and not can_round(plain) and not can_round(zeros)
    assert blocks_of(make_linear(plain, None, Kernels(compiled=True))) is GroupedProduct
    assert blocks_of(make_gated(zeros, None, "silu", Kernels(compiled=True))) is GroupedProduct
    assert kernels.has_int8_dot
