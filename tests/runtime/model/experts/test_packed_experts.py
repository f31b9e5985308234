"""Experts with packed weights against the reference, on the GPU, or in the interpreter without one; and how they are loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.model.config import parse_config, read_json
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.load import ExpertReader, StoredExpert, stack_experts
from phalanx_runtime.model.experts.sparse import ExpertWeights, Routing, SparseMlp, stack
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.ggml.codes import LAYOUTS
from phalanx_runtime.model.ggml.weight import GgmlPart, GgmlWeight
from phalanx_runtime.model.linear.gpu import PackedTritonLinear
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.packed.pack import pack, pack_codes, pack_ggml, quantize_fp8
from phalanx_runtime.model.linear.packed.weight import Fp8Weight, PackedWeight
from phalanx_runtime.model.linear.registry import Kernels, Weight
from phalanx_runtime.model.partition import Span, partition
from phalanx_runtime.model.weights import Checkpoint
from tests.examples import examples
from tests.runtime.checkpoint.gguf_files import random_blocks, write_gpt_oss
from tests.runtime.model.experts.cases import DEVICE, TOLERANCE, Noise, distinct_logits, stacked, wide_reference
from tests.runtime.model.gpu.launches import launches_of
from tests.runtime.model.reference import prompts, reference
from tests.runtime.model.table_checkpoints import MXFP4, pack_mxfp4, save_tables
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import save_tiny

LAUNCHES = ["route_experts", "sort_pairs", *["multiply_packed_experts"] * 2, "combine_experts"]


def mxfp4(weight: torch.Tensor) -> IntWeight:
    """Rounds to MXFP4. weight: [outputs, inputs]."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 32), value=1.0)
    stored, _ = pack_mxfp4(padded.cpu().float())
    low, high = stored["blocks"] & 15, stored["blocks"] >> 4
    return IntWeight(
        codes=torch.stack((low, high), 3).view(outputs, -1)[:, :inputs].contiguous().to(DEVICE),
        scales=stored["scales"].view(torch.float8_e8m0fnu).to(DEVICE),
        zeros=None,
        groups=(torch.arange(inputs) // 32).to(DEVICE),
        bits=4,
        dtype=weight.dtype,
        table=torch.tensor(E2M1, device=DEVICE),
    )


def packed_mxfp4(weight: torch.Tensor) -> PackedWeight:
    found = pack_codes(mxfp4(weight))
    assert found is not None and found.format == "mxfp4"
    return found


def fp8_blocks(weight: torch.Tensor) -> PackedWeight:
    """e4m3 in groups of 32 inputs."""
    scales = torch.rand((len(weight), -(-weight.shape[1] // 32)), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return pack(
        Fp8Weight(values=quantize_fp8(weight.float() / 4).values, scales=scales / 999, group=32, dtype=torch.float32), "fp8"
    )


def seed_of(weight: torch.Tensor) -> int:
    """Differs by expert."""
    return int(abs(float(weight.double().sum())) * 1e6) % 2**31


def codes(scales: torch.dtype, group: int) -> Callable[[torch.Tensor], PackedWeight]:
    """Any codes with zero points, of the shape of a weight."""

    def packed(weight: torch.Tensor) -> PackedWeight:
        (outputs, inputs), chance = weight.shape, torch.Generator().manual_seed(seed_of(weight))
        shape = (outputs, -(-inputs // group))
        found = pack_codes(
            IntWeight(
                codes=torch.randint(16, (outputs, inputs), dtype=torch.uint8, generator=chance).to(DEVICE),
                scales=(torch.rand(shape, generator=chance) / (3 * inputs**0.5)).to(DEVICE, scales),
                zeros=torch.randint(5, 11, shape, dtype=torch.uint8, generator=chance).to(DEVICE),
                groups=(torch.arange(inputs) // group).to(DEVICE),
                bits=4,
                dtype=torch.float32,
            )
        )
        assert found is not None
        return found

    return packed


def blocks(kind: GGMLQuantizationType) -> Callable[[torch.Tensor], PackedWeight]:
    """Any blocks of a GGUF file, of the shape of a weight."""

    def packed(weight: torch.Tensor) -> PackedWeight:
        raw = torch.from_numpy(random_blocks(kind, (weight.shape[0], weight.shape[1]), seed_of(weight))).to(DEVICE)
        return pack_ggml(GgmlWeight(parts=(GgmlPart(kind, raw),), inputs=weight.shape[1], dtype=weight.dtype))

    return packed


def nvfp4(weight: torch.Tensor) -> PackedWeight:
    """Any codes with scales in e4m3, and factors, of the shape of a weight."""
    chance, size = torch.Generator().manual_seed(seed_of(weight)), (weight.shape[0], -(-weight.shape[1] // 16))
    plain = replace(
        mxfp4(weight),
        scales=(torch.rand(size, generator=chance) + 0.5).to(DEVICE, torch.float8_e4m3fn),
        groups=(torch.arange(weight.shape[1]) // 16).to(DEVICE),
        factors=(torch.rand(size[0], generator=chance) / weight.shape[1] ** 0.5).to(DEVICE),
    )
    found = pack_codes(plain)
    assert found is not None and found.format == "nvfp4"
    assert torch.equal(found.dequantize(torch.float32), plain.dequantize(torch.float32))
    assert found.layout.row_sizes(found.inputs) == (found.words.shape[1], found.scales.shape[1])
    return found


def nf4(weight: torch.Tensor) -> PackedWeight:
    """Any codes with values of their own, of the shape of a weight."""
    groups, chance = (torch.arange(weight.shape[1]) // 64).to(DEVICE), torch.Generator().manual_seed(seed_of(weight))
    scales = torch.rand((weight.shape[0], -(-weight.shape[1] // 64)), generator=chance) / weight.shape[1] ** 0.5
    table = (torch.rand(16, generator=chance) - 0.5).to(DEVICE)
    plain = replace(mxfp4(weight), scales=scales.to(DEVICE), groups=groups, table=table)
    found = pack_codes(plain)
    assert found is not None and found.format == "table4"
    assert torch.equal(found.dequantize(torch.float32), plain.dequantize(torch.float32))
    assert found.layout.row_sizes(found.inputs) == (found.words.shape[1], found.scales.shape[1])
    return found


FORMATS: dict[str, Callable[[torch.Tensor], PackedWeight]] = {
    "mxfp4": packed_mxfp4,
    "nvfp4": nvfp4,
    "nf4": nf4,
    "int4": lambda weight: pack(weight.float(), "int4"),
    "int8": lambda weight: pack(weight.float(), "int8"),
    "fp8": lambda weight: pack(weight.float(), "fp8"),
    "fp8 blocks": fp8_blocks,
    "float16_int4": codes(torch.float16, 128),
    "bfloat16_int4": codes(torch.bfloat16, 32),
}


def pack_all(weights: ExpertWeights, rounded: Callable[[torch.Tensor], PackedWeight]) -> ExpertWeights:
    """Returns the same experts in a format."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    biases = [[None] * len(gate_up) if bias is None else list(bias) for bias in (weights.gate_up_bias, weights.down_bias)]
    parts = zip(gate_up, down, *biases, strict=True)
    experts = (
        ExpertWeights(gate_up=rounded(up), down=rounded(low), gate_up_bias=up_bias, down_bias=low_bias)
        for up, low, up_bias, low_bias in parts
    )
    return stack(experts, len(gate_up))


@settings(max_examples=examples(25), deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from([*FORMATS]),
    count=st.integers(1, 5),
    tokens=st.integers(1, 9),
    hidden=st.sampled_from([16, 48, 160]),
    inner=st.sampled_from([16, 21, 72]),
    dtype=st.sampled_from([*TOLERANCE]),
    has_bias=st.booleans(),
    adds=st.booleans(),
    activation=st.sampled_from(["silu", "swigluoai"]),
    seed=st.integers(0, 99),
)
def test_packed_experts_equal_the_reference(
    data: st.DataObject,
    name: str,
    count: int,
    tokens: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    has_bias: bool,
    adds: bool,
    activation: Activation,
    seed: int,
) -> None:
    noise, start = Noise(seed), data.draw(st.integers(0, count - 1))
    span = Span(start, data.draw(st.integers(start + 1, count)))
    routing = Routing(per_token=data.draw(st.integers(1, count)), norm_topk_prob=data.draw(st.booleans()))
    weights = pack_all(stacked(noise, span.size, hidden, inner, dtype, has_bias=has_bias), FORMATS[name])
    x, logits = noise(tokens, hidden + 16, dtype=dtype)[:, :hidden], distinct_logits(seed, tokens, count, dtype)
    residual = noise(tokens, hidden, dtype=dtype)
    check_experts(weights, x, logits, span=span, routing=routing, activation=activation, residual=residual, adds=adds)


@pytest.mark.parametrize("kind", sorted(LAYOUTS), ids=lambda kind: kind.name)
def test_experts_in_blocks_of_gguf_equal_the_reference(kind: GGMLQuantizationType) -> None:
    noise, routing, hidden = Noise(int(kind)), Routing(per_token=1, norm_topk_prob=True), max(64, GGML_QUANT_SIZES[kind][0])
    weights = pack_all(stacked(noise, 2, hidden, hidden, torch.float32, has_bias=False), blocks(kind))
    x, logits = noise(3, hidden, dtype=torch.float32), distinct_logits(1, 3, 2, torch.float32)
    check_experts(weights, x, logits, span=Span(0, 2), routing=routing, activation="silu", residual=x.clone(), adds=False)


def check_experts(
    weights: ExpertWeights,
    x: torch.Tensor,
    logits: torch.Tensor,
    *,
    span: Span,
    routing: Routing,
    activation: Activation,
    residual: torch.Tensor,
    adds: bool,
) -> None:
    dtype = x.dtype
    expected = wide_reference(weights, span, routing, activation)(x.float(), logits) + (residual.float() if adds else 0)

    experts, results = GroupedExperts(weights, span, routing, activation), [residual]
    work = (lambda: experts.add_to(residual, x, logits)) if adds else (lambda: results.append(experts(x, logits)))
    assert launches_of(work) == [f"phalanx::{kernel}" for kernel in LAUNCHES]
    tolerance = 4 * TOLERANCE[dtype]  # weights are rounded to the dtype of x
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(results[-1].float(), expected, rtol=tolerance, atol=2 * tolerance * largest)


def test_steps_in_float64_use_the_reference() -> None:
    noise, routing = Noise(1), Routing(per_token=2, norm_topk_prob=True)
    weights = pack_all(stacked(noise, 3, 48, 32, torch.float32, has_bias=True), packed_mxfp4)
    x, logits = noise(4, 48, dtype=torch.float64), distinct_logits(0, 4, 3, torch.float64)
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    wide = replace(weights, gate_up_bias=weights.gate_up_bias.double(), down_bias=weights.down_bias.double())
    found = GroupedExperts(wide, Span(0, 3), routing, "silu")(x, logits)
    torch.testing.assert_close(found.float(), wide_reference(weights, Span(0, 3), routing, "silu")(x.float(), logits))


def test_mxfp4_holds_all_values_and_scales() -> None:
    """16 codes by 254 powers of two within fp32; a product with one input has one rounding at most."""
    exponents = torch.arange(2, 250, dtype=torch.uint8)
    weight = IntWeight(
        codes=torch.arange(16, dtype=torch.uint8).repeat(len(exponents), 2).to(DEVICE),
        scales=exponents[:, None].view(torch.float8_e8m0fnu).to(DEVICE),
        zeros=None,
        groups=torch.zeros(32, dtype=torch.int64, device=DEVICE),
        bits=4,
        dtype=torch.float32,
        table=torch.tensor(E2M1, device=DEVICE),
    )
    packed = pack_codes(weight)
    assert packed is not None and packed.layout.group == 32
    assert torch.equal(packed.dequantize(torch.float32), weight.dequantize(torch.float32))
    identity = torch.eye(32, device=DEVICE)
    assert torch.equal(PackedTritonLinear(packed, None)(identity), weight.dequantize(torch.float32).t())
    assert torch.equal(PackedTritonLinear(packed, None)(identity[3:4]), weight.dequantize(torch.float32).t()[3:4])


def test_groups_that_a_rank_cuts_become_smaller() -> None:
    whole = mxfp4(torch.randn((8, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE))

    def cut(start: int, stop: int) -> IntWeight:
        return replace(whole, codes=whole.codes[:, start:stop].contiguous(), groups=whole.groups[start:stop])

    for start, stop, group in [(32, 96, 32), (48, 96, 16), (16, 128, 16)]:
        packed = pack_codes(cut(start, stop))
        assert packed is not None and packed.group == group
        assert torch.equal(packed.dequantize(torch.float32), whole.dequantize(torch.float32)[:, start:stop])
    assert pack_codes(cut(8, 96)) is None
    assert pack_codes(replace(whole, factors=torch.ones(8))) is None, "MXFP4 has no factors"


def load_experts(folder: Path, rank: int, kernels: Kernels) -> ExpertWeights:
    """Returns the experts of the first layer on one of two ranks."""
    config = parse_config(read_json(folder))
    assert config.mixture is not None
    with Checkpoint(folder, torch.float32, DEVICE) as checkpoint:
        reader = ExpertReader(config, config.mixture, partition(config, 2)[rank], checkpoint)
        return reader.read_stack("model.layers.0.", kernels)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_of_gpt_oss_stay_packed(tmp_path: Path, rank: int) -> None:
    """Each rank has 48 of 96 columns, which end within a group."""
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    save_tables(save_tiny(tmp_path / "model", "gpt_oss"), folder, exact, MXFP4, pack_mxfp4)
    found, expected = load_experts(folder, rank, Kernels()), load_experts(exact, rank, Kernels())
    assert found.layouts is not None and expected.layouts is None
    assert (found.layouts.gate_up.group, found.layouts.down.group) == (32, 16 if rank else 32)
    for packed, plain in ((found.gate_up, expected.gate_up), (found.down, expected.down)):
        assert isinstance(packed, PackedWeight) and isinstance(plain, torch.Tensor)
        assert all(torch.equal(packed[i].dequantize(torch.float32), one) for i, one in enumerate(plain))
    assert found.gate_up_bias is not None and expected.gate_up_bias is not None
    assert torch.equal(found.gate_up_bias, expected.gate_up_bias)


def test_experts_of_a_gguf_file_stay_packed(tmp_path: Path) -> None:
    """Its gates and ups are tensors of their own."""
    source, exact = save_tiny(tmp_path / "model", "gpt_oss"), tmp_path / "exact"
    path = write_gpt_oss(source, exact, tmp_path / "tiny.gguf")
    found = load_experts(locate(str(path), cache_dir=tmp_path / "cache").dir, 1, Kernels())
    expected = load_experts(exact, 1, Kernels())
    assert found.layouts is not None and {found.layouts.gate_up.format, found.layouts.down.format} == {"mxfp4"}
    assert isinstance(found.gate_up, PackedWeight) and isinstance(expected.gate_up, torch.Tensor)
    assert torch.equal(found.gate_up[2].dequantize(torch.float32), expected.gate_up[2])


def test_quantisation_at_load_rounds_experts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "mixtral")
    plain = load_experts(folder, 0, Kernels())
    assert isinstance(plain.down, torch.Tensor)
    for precision in ("int8", "fp8", "int4"):
        found = load_experts(folder, 0, Kernels(precision=precision))
        assert isinstance(found.down, PackedWeight) and found.down.format == precision
        expected = pack(plain.down[1].contiguous(), precision)
        assert torch.equal(found.down.words[1], expected.words) and torch.equal(found.down.scales[1], expected.scales)


def test_experts_of_several_layouts_are_dequantised() -> None:
    """One of them has codes that no kernel reads, or groups of another size."""
    chance = torch.Generator().manual_seed(5)
    up, down = (mxfp4(torch.randn(shape, generator=chance).to(DEVICE)) for shape in ((32, 64), (64, 64)))
    others: list[Weight] = [replace(down, factors=torch.ones(64, device=DEVICE)), down.dequantize(torch.float32)]
    others.append(replace(down, groups=torch.arange(64, device=DEVICE) // 48))
    for other in others:
        experts = [StoredExpert(gate_up=up, down=one) for one in (down, other)]
        for order in (experts, experts[::-1]):
            found = stack_experts(iter(order), 2, Kernels(), torch.float32)
            assert isinstance(found.gate_up, torch.Tensor) and isinstance(found.down, torch.Tensor)
            for number, one in enumerate(order):
                assert isinstance(one.down, torch.Tensor | IntWeight)
                dense = one.down if isinstance(one.down, torch.Tensor) else one.down.dequantize(torch.float32)
                assert torch.equal(found.down[number], dense)


def test_decoder_with_packed_experts_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    folder, exact = tmp_path / "packed", tmp_path / "exact"
    source = save_tiny(tmp_path / "model", "gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    save_tables(source, folder, exact, MXFP4, pack_mxfp4)
    config = parse_config(read_json(folder))
    mixture = config.mixture
    assert mixture is not None

    def work(runner: Any) -> tuple[list[list[int]], int]:
        grouped = []
        with Checkpoint(folder, torch.float32, DEVICE) as checkpoint:
            reader = ExpertReader(config, mixture, partition(config, 1)[0], checkpoint)
            for index, layer in enumerate(runner.model.layers):
                assert isinstance(layer.down, SparseMlp)
                weights = reader.read_stack(f"model.layers.{index}.", Kernels())
                grouped.append(GroupedExperts(weights, Span(0, 4), Routing(per_token=2, norm_topk_prob=True), "swigluoai"))
                assert grouped[-1].layouts is not None
                layer.down.experts = grouped[-1]
        requests = [DriverRequest(prompt) for prompt in prompts()[:2]]
        return Driver(runner).generate(requests, 3), sum(experts.num_launched for experts in grouped)

    outputs, num_launched = on_ranks(folder, [1], Build(device=str(DEVICE)), work)
    assert num_launched >= 5 * 3
    expected = [stream.tokens for stream in reference(exact, [*outputs, *([0] for _ in prompts()[2:])])]
    assert outputs == expected[:2]
