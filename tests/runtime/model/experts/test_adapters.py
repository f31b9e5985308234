"""Adapters of experts against weights with the adapter merged, in `transformers`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.checkpoint.adapter import EXPERT_LINEARS, EXPERT_PARAMETERS, LINEARS, WEIGHTS_FILE
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.experts import ExpertDeltas, ExpertMemory, ExpertProducts
from phalanx_runtime.model.adapters.load import ModelAdapters
from phalanx_runtime.model.attention.step_inputs import PIECE, AdaptedRows, Piece, StepAdapters
from phalanx_runtime.model.config import parse_config, read_json
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.experts.sparse import ExpertFactors
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span, partition
from phalanx_runtime.model.protocol import LoadOptions
from tests.runtime.adapters import merge, save_adapter, save_joined
from tests.runtime.model.equal import compare
from tests.runtime.model.integer_checkpoints import KINDS, save_integers
from tests.runtime.model.reference import NUM_TOKENS, chosen, prompts
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner, on_ranks
from tests.runtime.tiny import save_tiny

EXPERTS = [*EXPERT_LINEARS]


def assert_merged(base: Path, adapters: Sequence[Path], merged: Sequence[Path], pods: list[int], **build: Any) -> None:
    """Compares requests with each adapter and without one, in the same steps, with `transformers`."""
    slots = [*range(len(adapters) + 1), len(adapters)]
    asked = [DriverRequest(prompts()[number % len(prompts())], adapter=slot) for number, slot in enumerate(slots)]
    setup = Build(num_pages=16 * len(slots), adapters=adapters, **build)
    outputs = on_ranks(base, pods, setup, lambda runner: Driver(runner).generate(asked, NUM_TOKENS, 7))
    folders = [base, *merged]
    theirs = [chosen(folders[slot], number, outputs[number]) for number, slot in enumerate(slots)]
    outcome = compare(theirs, outputs)
    assert outcome.holds, outcome
    plain = [chosen(base, number, outputs[number]).tokens for number in range(len(slots))]
    assert [one != stream.tokens for one, stream in zip(plain, theirs, strict=True)] == [slot > 0 for slot in slots]


@pytest.mark.parametrize(
    ("family", "count", "pods", "build"),
    [
        ("qwen3_moe", 1, [1], {}),
        ("mixtral", 8, [1], {"kernels": Kernels(compiled=library() is not None)}),
        ("qwen3_moe", 8, [2], {}),
        ("mixtral", 2, [2], {"has_parallel_experts": True}),
    ],
    ids=["one", "eight", "eight, tp2", "whole experts per rank"],
)
def test_adapters_of_experts_equal_merged_weights(
    tmp_path: Path, family: str, count: int, pods: list[int], build: dict[str, Any]
) -> None:
    """Adapters of experts alone, of some of their linears, and of attention too."""
    base = save_tiny(tmp_path / "base", family)
    targets: list[list[str]] = [EXPERTS, [*LINEARS[:4], *EXPERTS], ["w2", "down_proj"], [*LINEARS[:2]]]
    adapters = [save_adapter(tmp_path / f"{n}", base, seed=n, rank=2 + n % 4, targets=targets[n % 4]) for n in range(count)]
    merged = [merge(tmp_path / f"merged{n}", base, adapter) for n, adapter in enumerate(adapters)]
    assert_merged(base, adapters, merged, pods, **build)


@pytest.mark.parametrize(
    ("family", "is_swapped", "targets", "pods"),
    [
        ("qwen3_moe", False, EXPERT_PARAMETERS, [1]),
        ("qwen3_moe", True, EXPERT_PARAMETERS, [2]),
        ("mixtral", False, ["down_proj"], [1]),
        ("gpt_oss", False, EXPERT_PARAMETERS, [2]),
    ],
    ids=["now", "before PEFT 0.19", "one parameter", "interleaved"],
)
def test_adapters_of_parameters_equal_merged_weights(
    tmp_path: Path, family: str, is_swapped: bool, targets: Sequence[str], pods: list[int]
) -> None:
    """In qwen3_moe here gates and ups have as many outputs as inputs: only the down products say which layout is theirs."""
    base = save_tiny(tmp_path / "base", family)
    merged = tmp_path / "merged"
    adapter = save_joined(tmp_path / "adapter", base, merged, is_swapped=is_swapped, targets=targets)
    assert_merged(base, [adapter], [merged], pods)


def test_adapters_of_experts_add_to_codes(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    base, folder, exact = save_tiny(tmp_path / "base", "qwen3_moe"), tmp_path / "integers", tmp_path / "exact"
    save_integers(base, folder, exact, KINDS["gptq order"])
    adapter = save_adapter(tmp_path / "adapter", base, targets=EXPERTS)
    merged = merge(tmp_path / "merged", exact, adapter)
    outputs = on_ranks(
        folder,
        [1],
        Build(kernels=Kernels(compiled=True), adapters=[adapter]),
        lambda runner: Driver(runner).generate([DriverRequest(prompts()[3], adapter=1)], NUM_TOKENS),
    )
    assert compare([chosen(merged, 3, outputs[0])], outputs).holds
    assert not compare([chosen(exact, 3, outputs[0])], outputs).holds


def test_pairs_are_grouped_by_expert_and_adapter() -> None:
    """Tokens 0 and 3 have the adapter of slot 4, 1 that of slot 1, 2 none."""
    seen: list[list[Piece]] = []

    class Recorder:
        def add(self, y: torch.Tensor, x: torch.Tensor, step: AdaptedRows, *, alternates: bool) -> None:
            seen.append(list(step.pieces))
            assert step.table.tolist() == [list(piece) for piece in step.pieces] and len(step.rows) >= len(x)

    pieces = [(1, 0, 1), (4, 1, 3)]
    slots = torch.tensor([4, 1, -1, 4])
    step = StepAdapters(rows=torch.tensor([1, 0, 3]), pieces=pieces, table=torch.tensor(pieces), slots=slots)
    unused = ExpertFactors(*(torch.empty(0) for _ in range(3)))
    products = [ExpertProducts(Recorder(), Recorder())] * 4
    deltas = ExpertDeltas(ExpertMemory(first=2, gate_up=unused, down=unused, products=products), step)
    keys = deltas.keys(torch.tensor([[5, 0], [5, 2], [5, 2], [2, 5]]))
    pairs = keys.argsort(stable=True)
    assert pairs.tolist() == [1, 5, 3, 6, 4, 2, 0, 7]
    added = deltas.of_experts(keys[pairs[1:]])
    assert added.keys() == {2, 5}
    for number in (2, 5):
        added[number].gate_up.add(torch.empty(4, 1), torch.empty(4, 1))
    assert seen == [[(1, 1, 2), (4, 2, 3)], [(1, 1, 2), (4, 2, 4)]]
    many = deltas.of_experts(torch.full((PIECE + 1,), 3 * 6 + 2))
    many[3].down.add(torch.empty(1, 1), torch.empty(1, 1))
    assert seen[2] == [(1, 0, PIECE), (1, PIECE, PIECE + 1)]


def test_slots_have_memory_for_experts(tmp_path: Path) -> None:
    """Counted with the weights: of one slot of rank 8, A and B of three linears of each of four experts in two layers, fp32."""
    base = save_tiny(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base, targets=LINEARS[:4])

    def slots_bytes(**changes: Any) -> int:
        model = make_model_runner(save_tiny(tmp_path / str(changes), "qwen3_moe", **changes), SoloCollective(), build).model
        plain = make_model_runner(tmp_path / str(changes), SoloCollective(), Build()).model
        assert isinstance(model, Decoder) and model.adapters is not None
        assert model.num_bytes - plain.num_bytes == model.adapters.num_bytes
        table, zero = torch.tensor([[0, 0, 1]]), torch.tensor([0])
        step = StepAdapters(rows=zero, pieces=[(0, 0, 1)], table=table, slots=zero)
        assert [one.experts for one in model.adapters.of_step(step)] == [None] * 3, "this adapter changes none"
        return model.adapters.num_bytes

    build = Build(adapters=[adapter])
    dense = 3 * 8 * (64 + 96) * 4
    assert slots_bytes() - slots_bytes(mlp_only_layers=[0, 1, 2]) == 2 * 4 * 3 * 8 * (64 + 32) * 4 - 2 * dense


STEM = "base_model.model.model.layers.0.{}.lora_{}.weight"
REFUSED: dict[str, tuple[str, str, list[tuple[int, int]], str]] = {
    "router": (
        "qwen3_moe",
        "mlp.gate",
        [(4, 64), (4, 4)],
        "tensor base_model.model.model.layers.0.mlp.gate.lora_A.weight is not",
    ),
    "no expert": ("qwen3_moe", "mlp.experts.4.up_proj", [(4, 64), (32, 4)], "is not in the base model of 4 experts"),
    "no experts": ("llama", "mlp.experts.1.up_proj", [(4, 64), (96, 4)], "whose layer has no experts"),
    "no dense layer": ("qwen3_moe", "mlp.up_proj", [(4, 64), (32, 4)], "is no linear of the base model, whose layer has experts"),
    "shape": ("mixtral", "mlp.experts", [(16, 64), (90, 16)], "fit neither gate_up_proj nor down_proj"),
    "rank": ("mixtral", "mlp.experts", [(8, 64), (192, 8)], "experts with r 4"),
    "two layouts": ("qwen3_moe", "mlp.experts", [(16, 64), (64, 16)], "fit two layouts of PEFT"),
    "twice": ("mixtral", "block_sparse_moe.experts.1.w1", [(4, 64), (96, 4)], "several tensors adapt 1.gate_proj of layer 0"),
}


@pytest.mark.parametrize(("family", "module", "shapes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_adapters_of_experts_are_refused(
    tmp_path: Path, family: str, module: str, shapes: list[tuple[int, int]], reason: str
) -> None:
    base = save_tiny(tmp_path / "base", family)
    adapter = save_adapter(tmp_path / "adapter", base, targets=["o_proj"])
    modules = [module, "mlp.experts.1.gate_proj"] if "several" in reason else [module]
    factors = {STEM.format(one, factor): torch.ones(shape) for one in modules for factor, shape in zip("AB", shapes, strict=True)}
    save_file({**load_file(adapter / WEIGHTS_FILE), **factors}, adapter / WEIGHTS_FILE)
    with pytest.raises(ModelError) as refused:
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))
    assert reason in str(refused.value)


def test_adapters_of_other_parameters_are_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "mixtral")
    adapter = save_adapter(tmp_path / "adapter", base, targets=["o_proj"], target_parameters=["mlp.gate.weight"])
    with pytest.raises(ModelError, match=r"target_parameters 'mlp\.gate\.weight' is not supported"):
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slots_without_memory_for_experts_refuse_them(tmp_path: Path, device: str) -> None:
    base = save_tiny(tmp_path / "base", "mixtral")
    adapter = save_adapter(tmp_path / "adapter", base, targets=EXPERTS)
    config = parse_config(read_json(base))
    options = LoadOptions(
        dtype=torch.bfloat16,
        device=torch.device(device),
        kernels=Kernels(),
        positions=256,
        max_loras=1,
        max_lora_rank=8,
    )
    with FakeTensorMode():
        whole, attention = (
            ModelAdapters(config, partition(config, 1)[0], Span(0, config.num_layers), replace(options, has_lora_experts=one))
            for one in (True, False)
        )
        assert attention.num_bytes == 3 * 8 * (2 * (64 + 64) + 2 * (64 + 32)) * 2
        assert whole.num_bytes - attention.num_bytes == 3 * 8 * 4 * 3 * (64 + 96) * 2, "of three linears of four experts"
        assert (whole.has_experts, attention.has_experts) == (True, False)
        with pytest.raises(ModelError, match="it adapts experts; --no-lora-experts leaves slots no memory"):
            attention.load(1, adapter)
