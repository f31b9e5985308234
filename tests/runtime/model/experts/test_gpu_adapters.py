"""Adapters of grouped experts against the reference, on the GPU, or in the interpreter without one; and in whole steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.checkpoint.adapter import EXPERT_LINEARS, EXPERT_PARAMETERS
from phalanx_runtime.model.adapters.slots import Factors, LayerPlaces, LayerSlots, Place, SlotShape
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.load import ExpertReader
from phalanx_runtime.model.experts.sparse import AdaptedMlp, ExpertAdditions, ExpertList, ExpertWeights, Routing, SparseMlp, stack
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.linear.linear import DenseLinear, Gate
from phalanx_runtime.model.linear.packed.pack import pack
from phalanx_runtime.model.linear.packed.weight import Format
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Span
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.step.adapters import adapter_rows
from tests.examples import examples
from tests.runtime.adapters import merge, save_adapter, save_joined
from tests.runtime.model.equal import compare
from tests.runtime.model.experts.cases import DEVICE, TOLERANCE, Noise, distinct_logits, stacked, wide_reference
from tests.runtime.model.gpu.launches import launches_of
from tests.runtime.model.reference import chosen, prompts
from tests.runtime.model.table_checkpoints import MXFP4, pack_mxfp4, save_tables
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import Family, save_tiny

NUM_SLOTS, MAX_RANK, NUM_TOKENS = 3, 19, 3
ADDED = ["phalanx::shrink_experts", "phalanx::expand_experts"]
ROUTED, COMBINED = ["phalanx::route_experts", "phalanx::sort_pairs"], "phalanx::combine_experts"
LAUNCHES = [*ROUTED, "phalanx::multiply_experts", *ADDED, "phalanx::multiply_experts", *ADDED, COMBINED]


def step_of(slots: Sequence[int]) -> StepAdapters:
    """`slots`: of each token, from 1; 0: none."""
    step = adapter_rows(slots, [1] * len(slots), lambda arrays: [torch.from_numpy(array).to(DEVICE) for array in arrays])
    assert step is not None
    return step


class Adapters:
    """Slots with adapters of some linears of some experts, in a dtype and in fp32."""

    def __init__(self, noise: Noise, span: Span, hidden: int, inner: int, dtype: torch.dtype) -> None:
        into = Place(hidden, inner, Span(0, hidden), Span(0, inner))
        expert = {"gate_proj": into, "up_proj": into, "down_proj": Place(inner, hidden, Span(0, inner), Span(0, hidden))}
        places = LayerPlaces(linears={}, expert=expert, experts=span)
        shape = SlotShape(num_slots=NUM_SLOTS, rank=MAX_RANK, dtype=dtype, device=DEVICE)
        self.slots = LayerSlots(places, shape, Kernels())
        self._wide = LayerSlots(places, replace(shape, dtype=torch.float32), Kernels())
        for index, (name, linear) in enumerate(self.slots.linears.items()):
            place = expert[name.partition(".")[2]]
            for slot, rank in ((0, 5), (1, MAX_RANK), (2, 16)):
                if (index + slot) % 4:
                    sizes = (place.inputs, place.outputs)
                    a, b = (noise(rank, size, dtype=dtype) * place.inputs**-0.25 * 0.4 for size in sizes)
                    linear.write(slot, Factors(a, b))
                    self._wide.linears[name].write(slot, Factors(a.float(), b.float()))

    def of_step(self, step: StepAdapters) -> tuple[ExpertAdditions, ExpertAdditions]:
        """Returns what is added in the dtype, and in fp32."""
        own, wide = (slots.of_step(step, has_experts=True).experts for slots in (self.slots, self._wide))
        assert own is not None and wide is not None
        return own, wide


@settings(max_examples=examples(12), deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 5),
    slots=st.lists(st.integers(0, NUM_SLOTS), min_size=1, max_size=24).filter(any),
    hidden=st.sampled_from([16, 48, 144]),
    inner=st.sampled_from([16, 21, 72]),
    dtype=st.sampled_from([*TOLERANCE]),
    has_bias=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh", "swigluoai"]),
    seed=st.integers(0, 99),
)
def test_grouped_experts_add_what_the_reference_adds(
    data: st.DataObject,
    count: int,
    slots: list[int],
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    has_bias: bool,
    activation: Activation,
    seed: int,
) -> None:
    """Of several adapters in one step, some of fewer linears or experts; tokens without one; a rank with some of the experts."""
    noise, start = Noise(seed), data.draw(st.integers(0, count - 1))
    span = Span(start, data.draw(st.integers(start + 1, count)))
    routing = Routing(per_token=data.draw(st.integers(1, count)), norm_topk_prob=True)
    weights = stacked(noise, span.size, hidden, inner, dtype, has_bias=has_bias)
    own, wide = Adapters(noise, span, hidden, inner, dtype).of_step(step_of(slots))
    tokens = len(slots)
    x, logits = noise(tokens, hidden + 16, dtype=dtype)[:, :hidden], distinct_logits(seed, tokens, count, dtype)
    expected = wide_reference(weights, span, routing, activation).with_additions(x.float(), logits, wide)
    experts, results = GroupedExperts(weights, span, routing, activation), list[torch.Tensor]()
    assert launches_of(lambda: results.append(experts.with_additions(x, logits, own))) == LAUNCHES
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(results[0].float(), expected, rtol=tolerance, atol=tolerance * float(1 + expected.abs().max()))


@pytest.mark.parametrize("dtype", [*TOLERANCE], ids=str)
def test_large_tiles_have_rows_of_several_adapters(dtype: torch.dtype) -> None:
    """In fp16 a tile has 64 rows: two of them have all pairs of one expert, a third one those of the other."""
    noise, span, routing = Noise(0), Span(0, 2), Routing(per_token=1, norm_topk_prob=True)
    slots = [number % (NUM_SLOTS + 1) for number in range(80)]
    weights = stacked(noise, 2, 32, 48, dtype, has_bias=False)
    own, wide = Adapters(noise, span, 32, 48, dtype).of_step(step_of(slots))
    x, logits = noise(80, 32, dtype=dtype), noise(80, 2, dtype=dtype)
    logits[:70, 0] = 9
    expected = wide_reference(weights, span, routing, "silu").with_additions(x.float(), logits, wide)
    mlp = SparseMlp(DenseLinear(torch.eye(2, dtype=dtype, device=DEVICE), None), GroupedExperts(weights, span, routing, "silu"))
    plain = mlp.experts(x, logits)
    result = mlp.experts.with_additions(x, logits, own)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance * float(1 + expected.abs().max()))
    is_adapted = torch.tensor([slot > 0 for slot in slots], device=DEVICE)
    torch.testing.assert_close(result[~is_adapted], plain[~is_adapted], rtol=tolerance, atol=tolerance)
    assert bool(((result - plain)[is_adapted].abs() > 0.1).any(1).all())


@pytest.mark.parametrize("kind", get_args(Format))
def test_packed_experts_add_what_the_reference_adds(kind: Format) -> None:
    """The residual is that of a layer."""
    noise, span, routing = Noise(1), Span(0, 3), Routing(per_token=2, norm_topk_prob=True)
    dense = stacked(noise, 3, 64, 48, torch.float32, has_bias=True)

    def packed(number: int) -> ExpertWeights:
        one = dense.expert(number)
        assert isinstance(one.gate_up, torch.Tensor) and isinstance(one.down, torch.Tensor)
        return replace(one, gate_up=pack(one.gate_up, kind), down=pack(one.down, kind))

    weights = stack((packed(number) for number in range(3)), 3)
    own, wide = Adapters(noise, span, 64, 48, torch.float32).of_step(step_of([1, 0, 3, 3, 2, 1, 0]))
    router = DenseLinear(noise(3, 64, dtype=torch.float32), None)
    x, residual = noise(7, 64, dtype=torch.float32), noise(7, 64, dtype=torch.float32)
    expected = residual + wide_reference(weights, span, routing, "swigluoai").with_additions(x, router(x), wide)
    mlp = AdaptedMlp(SparseMlp(router, GroupedExperts(weights, span, routing, "swigluoai")), own)
    launched = launches_of(lambda: mlp.add_to(residual, x))
    assert launched[1:-1] == [name.replace("multiply_", "multiply_packed_") for name in LAUNCHES]
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


def test_steps_in_float64_use_the_reference() -> None:
    noise, span, routing = Noise(2), Span(0, 3), Routing(per_token=2, norm_topk_prob=True)
    weights = stacked(noise, 3, 16, 24, torch.float64, has_bias=True)
    own, wide = Adapters(noise, span, 16, 24, torch.float64).of_step(step_of([1, 0, 2, 3]))
    x, logits = noise(4, 16, dtype=torch.float64), distinct_logits(2, 4, 3, torch.float64)
    experts = GroupedExperts(weights, span, routing, "silu")
    expected = wide_reference(weights, span, routing, "silu").with_additions(x.float(), logits, wide)
    torch.testing.assert_close(experts.with_additions(x, logits, own).float(), expected, rtol=1e-4, atol=1e-4)
    assert experts.num_launched == 0


LAYER_TYPES = ["sliding_attention", "full_attention"]
SEVERAL_RANKS = pytest.mark.skipif(DEVICE.type == "cuda", reason="each rank needs a GPU of its own")
CASES = [
    pytest.param("qwen3_moe", [1], {"mlp_only_layers": []}, False, id="qwen3_moe"),
    pytest.param("mixtral", [2], {}, True, id="whole experts per rank", marks=[pytest.mark.slow, SEVERAL_RANKS]),
    pytest.param("gpt_oss", [2], {"layer_types": LAYER_TYPES}, False, id="mxfp4, tp2", marks=[pytest.mark.slow, SEVERAL_RANKS]),
]


@pytest.mark.parametrize(("family", "pods", "changes", "is_parallel"), CASES)
def test_steps_and_graphs_add_adapters_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, pods: list[int], changes: dict[str, Any], is_parallel: bool
) -> None:
    """The tokens of merged weights; all ranks have grouped experts, in gpt-oss packed, and replay decode steps from graphs."""
    base = exact = save_tiny(tmp_path / "base", family, num_hidden_layers=2, **changes)
    if family == "gpt_oss":
        base, exact = tmp_path / "packed", tmp_path / "exact"
        save_tables(tmp_path / "base", base, exact, MXFP4, pack_mxfp4)
    merged = [tmp_path / "merged1", tmp_path / "merged2"]
    if family == "mixtral":
        adapters = [save_adapter(tmp_path / f"{n}", exact, seed=n, rank=2 + n, targets=[*EXPERT_LINEARS]) for n in (1, 2)]
        merged = [merge(path, exact, adapter) for path, adapter in zip(merged, adapters, strict=True)]
    else:
        adapters = [
            save_joined(tmp_path / f"{n}", exact, path, seed=n, rank=2 + n, targets=EXPERT_PARAMETERS[n - 1 :])
            for n, path in enumerate(merged, 1)
        ]
    grouped = group_experts(monkeypatch, family, is_parallel)
    slots = (1, 0, 2)
    asked = [DriverRequest(prompt, adapter=slot) for prompt, slot in zip(prompts()[:3], slots, strict=True)]
    build = Build(
        device_rows=3,
        adapters=adapters,
        kernels=Kernels(triton=True),
        has_parallel_experts=is_parallel,
        device=str(DEVICE),
    )

    def work(runner: ModelRunner) -> tuple[list[list[int]], int]:
        outputs, step = Driver(runner).generate(asked, NUM_TOKENS), runner.device_step
        assert isinstance(step, DeviceStep)
        return outputs, step.adapted_graphs.num_replays.total()

    outputs, num_replays = on_ranks(base, pods, build, work)
    assert num_replays == NUM_TOKENS - 1
    captured = 3 * (5 + len(LAUNCHES))  # three sizes, without adapters and with them
    launched = [one.num_launched for one in grouped]
    if DEVICE.type == "cpu":
        assert launched == [captured + len(LAUNCHES) * NUM_TOKENS] * len(grouped)
    else:  # a device replays graphs without our calls
        assert min(launched) >= captured
    assert len(grouped) == 2 * sum(pods) and all((one.layouts is not None) == (family == "gpt_oss") for one in grouped)
    theirs = [chosen([exact, *merged][slot], number, outputs[number]) for number, slot in enumerate(slots)]
    outcome = compare(theirs, outputs)
    assert outcome.holds, outcome
    plain = [chosen(exact, number, outputs[number]).tokens for number in range(3)]
    assert [one != stream.tokens for one, stream in zip(plain, theirs, strict=True)] == [True, False, True]


def group_experts(monkeypatch: pytest.MonkeyPatch, family: Family, is_parallel: bool) -> list[GroupedExperts]:
    """Has models load the experts of a GPU here too; returns them as they are loaded."""
    read, found = ExpertReader.read, list[GroupedExperts]()
    activation: Activation = "swigluoai" if family == "gpt_oss" else "silu"

    def read_grouped(self: ExpertReader, layer: str, kernels: Kernels, gate: Gate) -> SparseMlp:
        mlp = read(self, layer, Kernels(), gate)
        assert isinstance(mlp.experts, ExpertList)
        weights, routing = self.read_stack(layer, Kernels()), Routing(per_token=2, norm_topk_prob=True)
        found.append(GroupedExperts(weights, mlp.experts.span, routing, activation))
        return SparseMlp(mlp.router, found[-1])

    monkeypatch.setattr(ExpertReader, "read", read_grouped)
    return found
