"""A whole model with quantised weights, by the kernels on the GPU, or in the interpreter without one: tokens equal those of its
dequantised reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from phalanx_runtime.checkpoint.gguf.convert import convert
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.model.linear.gpu import ArrangedLinear, PackedRows, PackedTritonLinear
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.linear import QuantizedLinear
from phalanx_runtime.model.linear.packed.pack import pack_codes
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import Format
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from tests.runtime.checkpoint.gguf_files import write_model
from tests.runtime.model.fp8_checkpoints import save_fp8
from tests.runtime.model.gpu.launches import launches_of
from tests.runtime.model.integer_checkpoints import KINDS, save_integers
from tests.runtime.model.table_checkpoints import KINDS as TABLES
from tests.runtime.model.table_checkpoints import save_tables
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, save_tiny
from tests.slow_cases import some

Kind = GGMLQuantizationType
NUM_TOKENS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = [1, pytest.param(2, marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="each rank needs a GPU of its own"))]


def generate(folder: Path, kernels: Kernels, ranks: int = 1) -> tuple[list[list[int]], list[str]]:
    """Returns tokens and launches of rank 0. The steps have 10 rows and 2."""
    chance = torch.Generator().manual_seed(7)
    requests = [DriverRequest(torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist()) for size in (1, 9)]
    outputs: list[Any] = []

    def work(runner: Any) -> list[str]:
        return launches_of(lambda: outputs.append(Driver(runner).generate(requests, NUM_TOKENS)))

    launches = on_ranks(folder, [1] * ranks, Build(kernels=kernels, device=str(DEVICE)), work)
    return outputs[0], launches


@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int4", "fp8"))])
def test_tokens_equal_those_of_dequantised_weights(tmp_path: Path, kind: Format) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=1)
    tokens, launches = generate(folder, Kernels(precision=kind, triton=True))
    expected, reference_launches = generate(folder, Kernels(precision=kind))
    assert tokens == expected
    assert "phalanx::multiply_packed" in launches and "phalanx::multiply_packed" not in reference_launches
    assert not {"aten::mm", "aten::addmm", "aten::addmm_"} & set(launches), "every linear is quantised"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_fp8_blocks_of_a_checkpoint_are_multiplied_packed(tmp_path: Path, ranks: int) -> None:
    folder, exact = tmp_path / "fp8", tmp_path / "exact"
    save_fp8(save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=1), folder, exact, "block")
    tokens, launches = generate(folder, Kernels(triton=True), ranks)
    assert tokens == generate(exact, Kernels())[0]
    assert "phalanx::multiply_packed" in launches


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        ("int8 channel", True),
        ("awq", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("w4 channel", "w8 channel", "gptq order")),
    ],
)
def test_codes_of_checkpoints_are_multiplied_as_they_are(tmp_path: Path, name: str, is_packed: bool) -> None:
    folder, exact = tmp_path / "integers", tmp_path / "exact"
    save_integers(save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=1), folder, exact, KINDS[name])
    tokens, launches = generate(folder, Kernels(triton=True))
    assert tokens == generate(exact, Kernels())[0]
    assert ("phalanx::multiply_packed" in launches) is is_packed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_gguf_blocks_are_multiplied_as_they_are(tmp_path: Path, ranks: int) -> None:
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q3_K, "ffn_up": Kind.Q5_1, "token_embd": Kind.Q5_K}
    path = write_model(tmp_path / "model.gguf", kinds, Kind.Q4_K)
    convert(path, tmp_path / "exact")
    tokens, launches = generate(locate(str(path), cache_dir=tmp_path / "cache").dir, Kernels(triton=True), ranks)
    assert tokens == generate(tmp_path / "exact", Kernels())[0]
    assert {"phalanx::multiply_packed", "phalanx::read_packed"} <= set(launches)
    assert not {"aten::mm", "aten::addmm", "aten::addmm_"} & set(launches), "every linear is packed"


@pytest.mark.parametrize("name", some(["nf4 nested", "nvfp4"], "nf4 nested"))
def test_floats_of_4_bits_are_multiplied_as_they_are(tmp_path: Path, name: str) -> None:
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    save_tables(save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=1), folder, exact, *TABLES[name])
    tokens, launches = generate(folder, Kernels(triton=True))
    assert tokens == generate(exact, Kernels())[0]
    assert "phalanx::multiply_packed" in launches


@pytest.mark.parametrize(("is_nested", "most"), [(False, 1.063), (True, 1.152)])
def test_nf4_takes_little_more_than_its_file(is_nested: bool, most: float) -> None:
    """Of 2,048 inputs: 4 bits, and a scale of 4 bytes, or nested of 1 byte, for 64 of them."""
    packed = pack_codes(random_codes(4, 64, 2048, torch.float32, table=torch.rand(16)))
    file_bytes = 5 * (1024 + 32 * (1 + 4 / 256 if is_nested else 4))
    assert packed is not None and packed.num_bytes <= most * file_bytes


def random_codes(bits: int, group: int, inputs: int, scales: torch.dtype, **more: Any) -> IntWeight:
    groups, chance = torch.arange(inputs) // group, torch.Generator().manual_seed(1)
    shape = (5, int(groups[-1]) + 1)
    placed: dict[str, Any] = {name: part.to(DEVICE) if isinstance(part, torch.Tensor) else part for name, part in more.items()}
    return IntWeight(
        codes=torch.randint(2**bits, (5, inputs), dtype=torch.uint8, generator=chance).to(DEVICE),
        scales=torch.rand(shape, generator=chance).to(DEVICE, scales),
        zeros=None,
        groups=groups.to(DEVICE),
        bits=bits,
        dtype=torch.float32,
        **placed,
    )


HALF, BF16 = torch.float16, torch.bfloat16
ZEROS: dict[str, Any] = {
    "zeros": torch.randint(17, (5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).to(DEVICE)
}
EXACT = {
    "8 bits": random_codes(8, 300, 300, HALF),
    "8 bits, scales in float32": random_codes(8, 70, 70, torch.float32),
    "8 bits in groups": random_codes(8, 128, 300, BF16),
    "8 bits in groups of 48": random_codes(8, 48, 100, HALF),
    "4 bits in groups": random_codes(4, 128, 300, BF16),
    "4 bits in large groups": random_codes(4, 256, 600, BF16),
    "4 bits": random_codes(4, 100, 100, BF16),
    "smaller groups": random_codes(4, 64, 300, BF16),
    "scales in float16": random_codes(4, 128, 300, HALF),
    "zero points, scales in float16": replace(random_codes(4, 128, 300, HALF), **ZEROS),
    "zero points, scales in bfloat16": replace(random_codes(4, 112, 300, BF16), **ZEROS),
    "a table": random_codes(4, 64, 300, torch.float32, table=torch.rand(16)),
    "a table, groups of a span": random_codes(4, 128, 300, BF16, table=torch.rand(16)),
    "a table, a scale per output": random_codes(4, 100, 100, torch.float32, table=torch.rand(16)),
    "nvfp4": random_codes(4, 16, 300, torch.float8_e4m3fn, table=torch.tensor(E2M1), factors=torch.arange(1.0, 6.0) / 7),
}
OTHERS = {
    "scales in float32": random_codes(4, 128, 300, torch.float32),
    "groups of 24": random_codes(4, 24, 300, BF16),
    "zero points of 8 bits": replace(
        random_codes(8, 40, 40, BF16), zeros=torch.full((5, 1), 3, dtype=torch.uint8, device=DEVICE)
    ),
    "another order": replace(EXACT["4 bits in groups"], groups=EXACT["4 bits in groups"].groups.flip(0)),
    "e4m3": random_codes(8, 64, 64, BF16, is_e4m3=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_packed_codes_have_exactly_their_values(name: str) -> None:
    packed = pack_codes(EXACT[name])
    assert packed is not None
    assert torch.equal(packed.dequantize(torch.float32), EXACT[name].dequantize(torch.float32))
    if packed.scales.shape[1] > 1:  # of groups
        index = torch.tensor([3, 0], device=DEVICE)
        found = PackedRows(packed, torch.float32).index_select(0, index)
        torch.testing.assert_close(found, packed.dequantize(torch.float32)[index], rtol=1e-6, atol=1e-5)
    for rows in (1, 6):  # without tensor cores, and in tiles
        x = torch.randn(rows, packed.inputs, device=DEVICE)
        expected = x @ packed.dequantize(torch.float32).T
        torch.testing.assert_close(
            PackedTritonLinear(packed, None)(x), expected, rtol=1e-4, atol=1e-2 if packed.bits == 8 else 1e-4
        )


def test_codes_in_an_activation_order_are_packed() -> None:
    whole = EXACT["zero points, scales in float16"]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    weight = replace(whole, codes=whole.codes[:, order], groups=whole.groups[order])
    bias = torch.ones(5, device=DEVICE)
    linear = make_linear(weight, bias, Kernels(triton=True))
    assert isinstance(linear, ArrangedLinear)
    assert linear.num_bytes > make_linear(whole, bias, Kernels(triton=True)).num_bytes
    x, residual = torch.randn(6, 300, device=DEVICE), torch.randn(6, 5, device=DEVICE)
    expected = x @ weight.dequantize(torch.float32).T + 1
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-3)
    linear.add_to(before := residual.clone(), x)
    torch.testing.assert_close(before, residual + expected, rtol=1e-4, atol=1e-3)
    assert linear.variants(torch.float32, add=True)


def test_columns_of_a_rank_may_begin_within_a_group() -> None:
    whole = EXACT["zero points, scales in float16"]
    part = replace(whole, codes=whole.codes[:, 64:240].contiguous(), groups=whole.groups[64:240])
    packed = pack_codes(part)
    assert packed is not None and packed.group == 64
    assert torch.equal(packed.dequantize(torch.float32), whole.dequantize(torch.float32)[:, 64:240])


@pytest.mark.parametrize("name", OTHERS)
def test_other_codes_are_not_packed(name: str) -> None:
    assert pack_codes(OTHERS[name]) is None


def test_a_format_has_one_linear_on_each_device() -> None:
    weight = torch.randn(16, 32)
    assert isinstance(make_linear(weight, None, Kernels(precision="int4")), DequantizedLinear)
    assert isinstance(make_linear(weight, None, Kernels(precision="int8")), QuantizedLinear)
    for kind in ("int8", "int4", "fp8"):
        assert isinstance(make_linear(weight, None, Kernels(precision=kind, triton=True)), PackedTritonLinear)


def test_the_reference_adds_to_a_residual() -> None:
    linear, x, residual = (
        make_linear(torch.randn(8, 40), torch.ones(8), Kernels(precision="int4")),
        torch.randn(3, 40),
        torch.ones(3, 8),
    )
    linear.add_to(residual, x)
    torch.testing.assert_close(residual, linear(x) + 1)
