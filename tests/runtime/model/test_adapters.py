"""Adapters in one step against weights with the adapter merged, here and in `transformers`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.checkpoint.adapter import CONFIG_FILE, LINEARS, WEIGHTS_FILE, adapter_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.products import NativeProducts, TorchProducts
from phalanx_runtime.model.adapters.slots import Factors, LinearSlots, Place, SlotShape
from phalanx_runtime.model.attention.step_inputs import PIECE, StepAdapters
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import interleave
from phalanx_runtime.model.linear.registry import Kernels, make_gated
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span
from phalanx_runtime.rank.step.adapters import adapter_rows
from tests.runtime.adapters import joined, merge, save_adapter
from tests.runtime.model.equal import Stream, compare
from tests.runtime.model.integer_checkpoints import KINDS, save_integers
from tests.runtime.model.reference import NUM_TOKENS, as_bf16, chosen, prompts
from tests.runtime.model.targets import TARGETS, compiled
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner, on_ranks
from tests.runtime.tiny import save_tiny

PLAIN_BUILD = Build()
GROUPS: dict[str, tuple[list[int], int]] = {
    "one": ([1], 1),
    "tp2": ([2], 1),
    "tp3": ([3], 1),
    "pp2": ([2], 2),
    "pp2 x tp2": ([4], 2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "model", num_key_value_heads=1)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Path]]:
    """Adapters of several ranks, targets and layers."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {},
        {"rank": 8, "use_rslora": True},
        {"rank": 2, "targets": ["q_proj", "v_proj"]},
        {"rank": 3, "targets": LINEARS[4:], "layers": [1]},
    ]

    @cache
    def one(number: int) -> Path:
        return save_adapter(folder / str(number), base, seed=number, **kinds[number % len(kinds)])

    return lambda count: [one(number) for number in range(count)]


def generate(folder: Path, pods: list[int], build: Build, slots: Sequence[int], chunk: int = 1 << 20) -> list[list[int]]:
    """Returns greedy tokens of requests with adapters in these slots, in turn over the prompts."""
    asked = [DriverRequest(prompts()[number % len(prompts())], adapter=slot) for number, slot in enumerate(slots)]
    return on_ranks(folder, pods, build, lambda runner: Driver(runner).generate(asked, NUM_TOKENS, chunk))


def alone(folder: Path, number: int, build: Build = PLAIN_BUILD) -> list[int]:
    """Returns the tokens of request `number` alone, on a model without adapters."""
    prompt = prompts()[number % len(prompts())]
    return on_ranks(folder, [1], build, lambda runner: Driver(runner).generate([DriverRequest(prompt)], NUM_TOKENS))[0]


@pytest.mark.parametrize(("count", "is_compiled"), [(1, True), (8, False), (32, True)])
def test_adapters_in_one_step_equal_merged_weights(
    base: Path, adapters: Callable[[int], list[Path]], tmp_path: Path, count: int, *, is_compiled: bool
) -> None:
    folders = adapters(count)
    slots = [*range(count + 1), count]
    build = Build(num_pages=16 * len(slots), adapters=folders, kernels=Kernels(compiled=is_compiled))
    outputs = generate(base, [1], build, slots)
    merged = [base, *(merge(tmp_path / str(number), base, folder) for number, folder in enumerate(folders))]
    theirs = [chosen(merged[slot], number, outputs[number]) for number, slot in enumerate(slots)]
    ours = [Stream(alone(merged[slot], number), theirs[number].gaps) for number, slot in enumerate(slots)]
    assert compare(ours, outputs).holds
    outcome = compare(theirs, outputs)
    assert outcome.holds, outcome
    plain = [alone(base, number) for number in range(len(slots))]
    assert all((one != other) == (slot > 0) for one, other, slot in zip(outputs, plain, slots, strict=True)), "all change tokens"


@pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())
def test_ranks_and_stages_compute_their_part_of_adapters(
    base: Path, adapters: Callable[[int], list[Path]], pods: list[int], stages: int
) -> None:
    build = Build(dtype=torch.float64, adapters=adapters(4))
    slots = [0, 1, 2, 3, 4, 1]
    expected = generate(base, [1], build, slots)
    assert generate(base, pods, replace(build, stages=stages), slots, chunk=7) == expected


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "olmo2"])
def test_adapters_of_families_equal_merged_weights(tmp_path: Path, family: str) -> None:
    """Head norms, joined linears, norms around and after, another activation."""
    base = save_tiny(tmp_path / "base", family)
    targets = joined() if family == "phi3" else LINEARS
    folders = [save_adapter(tmp_path / f"adapter{seed}", base, seed, targets=targets) for seed in range(2)]
    merged = [base, *(merge(tmp_path / f"merged{seed}", base, folder) for seed, folder in enumerate(folders))]
    slots = [2, 1, 0, 2]
    outputs = generate(base, [2], Build(adapters=folders), slots, chunk=5)
    outcome = compare([chosen(merged[slot], number, outputs[number]) for number, slot in enumerate(slots)], outputs)
    assert outcome.holds, outcome
    assert outputs[0] != alone(base, 0)


def test_attention_of_layers_with_experts_has_adapters(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base, targets=LINEARS[:4])
    outputs = generate(base, [1], Build(adapters=[adapter]), [1, 1])
    merged = merge(tmp_path / "merged", base, adapter)
    outcome = compare([chosen(merged, number, outputs[number]) for number in range(2)], outputs)
    assert outcome.holds, outcome
    assert outputs[0] != alone(base, 0)


@pytest.mark.parametrize("kernels", [Kernels(compiled=True), Kernels(compiled=True, precision="int8"), Kernels(precision="int4")])
def test_adapters_add_to_compiled_and_quantised_linears(tmp_path: Path, kernels: Kernels) -> None:
    """Zero factors change nothing, though the activation is computed apart; others give the tokens of a dense rounded base."""
    if kernels.compiled and library() is None:
        pytest.skip("no compiler here")
    base = as_bf16(save_tiny(tmp_path / "base"))
    zero = save_adapter(tmp_path / "zero", base)
    save_file({name: factor * 0 for name, factor in load_file(zero / WEIGHTS_FILE).items()}, zero / WEIGHTS_FILE)
    other = save_adapter(tmp_path / "other", base, seed=1)
    build = Build(kernels=kernels, adapters=[zero, other])
    outputs = generate(base, [1], build, [1, 2, 0, 2])
    plain = [alone(base, number, Build(kernels=kernels)) for number in range(4)]
    assert (outputs[0], outputs[2]) == (plain[0], plain[2])
    assert outputs[1] != plain[1]
    assert outputs == generate(base, [1], replace(build, kernels=replace(kernels, compiled=False)), [1, 2, 0, 2])


@pytest.mark.parametrize("name", ["gptq order", "awq", "w8 channel"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_add_to_codes_of_checkpoints(tmp_path: Path, name: str, ranks: int) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    base, folder, exact = save_tiny(tmp_path / "base", "qwen3"), tmp_path / "integers", tmp_path / "exact"
    save_integers(base, folder, exact, KINDS[name])
    adapter = save_adapter(tmp_path / "adapter", base)
    outputs = generate(folder, [ranks], Build(kernels=Kernels(compiled=True), adapters=[adapter]), [1, 0, 1])
    models = [exact, merge(tmp_path / "merged", exact, adapter)]
    outcome = compare([chosen(models[slot], number, outputs[number]) for number, slot in enumerate([1, 0, 1])], outputs)
    assert outcome.holds, outcome
    assert outputs[0] != alone(exact, 0)


def test_steps_without_adapters_have_none(base: Path, adapters: Callable[[int], list[Path]]) -> None:
    seen: list[StepAdapters] = []
    runner = make_model_runner(base, SoloCollective(), Build(adapters=adapters(2)))
    model = runner.model
    assert isinstance(model, Decoder) and model.adapters is not None
    of_step = model.adapters.of_step
    model.adapters.of_step = lambda step: seen.append(step) or of_step(step)  # type: ignore[method-assign,func-returns-value]
    Driver(runner).generate([DriverRequest(prompts()[2])], 4)
    assert seen == []
    Driver(runner).generate([DriverRequest(prompts()[2], adapter=2)], 4)
    assert [list(step.pieces) for step in seen[1:]] == [[(1, 0, 1)]] * 3


def rows_of(slots: Sequence[int], counts: Sequence[int]) -> StepAdapters | None:
    return adapter_rows(slots, counts, lambda arrays: [torch.from_numpy(array) for array in arrays])


def test_tokens_are_sorted_by_their_adapters() -> None:
    assert rows_of([0, 0], [3, 1]) is None
    step = rows_of([3, 0, 1, 3], [1, 1, 2, 2])
    assert step is not None and step.rows.tolist() == [2, 3, 0, 4, 5] and step.slots.tolist() == [2, -1, 0, 0, 2, 2]
    assert list(step.pieces) == [(0, 0, 2), (2, 2, 5)]
    long = rows_of([2, 1], [PIECE + 1, 1])
    assert long is not None and list(long.pieces) == [(0, 0, 1), (1, 1, PIECE + 1), (1, PIECE + 1, PIECE + 2)]
    assert long.table.tolist() == [list(piece) for piece in long.pieces]


STEPS = {
    "decodes": ([1, 200, 0, 3, 1, 1, 2, 1], [1] * 8),
    "one": ([0, 5, 0], [2, 1, 1]),
    "chunks": ([2, 0, 3, 2], [70, 5, 3, 66]),
}
MODULES = {"one": (37, [23], [0]), "q, k and v": (64, [48, 16, 16], [0, 48, 64]), "gate and up": (96, [40, 40], [0, 40])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_grouped_products_equal_their_reference(
    target: str, module: tuple[int, list[int], list[int]], dtype: torch.dtype
) -> None:
    """Several ranks in one step, an adapter without these linears, tokens without one; strided, and with alternating blocks."""
    (inputs, sizes, firsts), chance = module, torch.Generator().manual_seed(0)
    linears = []
    for outputs, first in zip(sizes, firsts, strict=True):
        shape = SlotShape(num_slots=200, rank=19, dtype=dtype, device=torch.device("cpu"))
        place = Place(inputs, outputs, Span(0, inputs), Span(0, outputs))
        slots = LinearSlots(shape.new_factors(place, Span(first, first + outputs)))
        for slot, rank in ((0, 16), (1, 5), (2, 19), (4, 8)):
            a, b = (torch.randn(rank, size, generator=chance) for size in (inputs, outputs))
            slots.write(slot, Factors(a, b))
        linears.append(slots.factors)
    exact = [replace(one, a=one.a.double(), b=one.b.double()) for one in linears]
    kernel, reference = NativeProducts(compiled(target), linears), TorchProducts(exact)
    padded = sum(-(-outputs // 16) * 16 for outputs in sizes)
    for slots_of, counts in STEPS.values():
        step, tokens = rows_of(slots_of, counts), sum(counts)
        assert step is not None
        x = torch.randn(tokens, inputs + 6, generator=chance).to(dtype)[:, :inputs]
        y = torch.randn(tokens, padded, generator=chance).to(dtype)
        for alternates in (False, True) if len(set(sizes)) == 1 else (False,):
            expected, actual = y.double(), y.clone()
            reference.add(expected, x.double(), step, alternates=alternates)
            kernel.add(actual, x, step, alternates=alternates)
            tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=20 * tolerance)
            plain = [at for at in range(tokens) if at not in step.rows.tolist()]
            assert torch.equal(actual[plain], y[plain])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_with_an_addition_equal_torch(dtype: torch.dtype) -> None:
    """Halves that end within a block; the addition has the outputs of the weight in blocks that alternate."""
    weight, x, added = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for shape in ((2 * 24, 32), (5, 32), (2 * 24, 32))
    )
    kernels = Kernels(compiled=compiled("native") is not None)
    gated = make_gated(weight.bfloat16().to(dtype), None, "silu", kernels)
    plain = make_gated(weight.bfloat16().to(dtype), None, "silu", Kernels())

    class Addition:
        def add(self, y: torch.Tensor, x: torch.Tensor, *, alternates: bool = False) -> None:
            y += x @ (interleave(added) if alternates else added).t()

    torch.testing.assert_close(
        gated.with_addition(x, Addition()),
        plain.with_addition(x, Addition()),
        atol=0.1 if dtype == torch.bfloat16 else 1e-4,
        rtol=2e-2,
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 9, "lora_alpha": 9}, "r 9 exceeds --max-lora-rank 8"),
    "modules to save": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is not supported"),
    "DoRA": ({"use_dora": True}, "use_dora is not supported: DoRA"),
    "bias": ({"bias": "all"}, "bias 'all' is not supported"),
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules 'embed_tokens' is not supported"),
    "head": ({"target_modules": ["lm_head"]}, "target_modules 'lm_head' is not supported"),
    "kind": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported: expected LORA"),
    "ranks by module": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not supported"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq' is not supported"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "init_lora_weights 'lora_ga' is not supported"),
    "start of no kind": ({"init_lora_weights": 1.5}, "init_lora_weights 1.5 is not supported"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is not supported"),
    "Arrow": ({"arrow_config": {"top_k": 3}}, "arrow_config is not supported"),
    "long alpha": ({"lora_alpha": 10**400}, "must be a number"),
    "long rank": ({"r": 10**400}, "must be a number"),
    "no number": ({"lora_alpha": None}, "lora_alpha None must be a number"),
    "rank in parts": ({"r": 1e-300}, "r 1e-300 must be a whole number"),
    "half of a pair": ({"r": 5, "base_model_name_or_path": "\ud800"}, r"another base model (\ud800)"),
    "shape": ({"r": 5}, "the base model and r imply [5, 96]: the adapter is for another base model (tiny)"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_adapters_are_refused_by_name(base: Path, tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, **fields)
    with pytest.raises(ModelError) as refused:
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))
    assert reason in str(refused.value) and str(refused.value).encode()


def test_tensors_of_adapters_are_checked(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    factors = load_file(adapter / WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"

    def reason(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, adapter / WEIGHTS_FILE)
        with pytest.raises(ModelError) as refused:
            make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))
        return str(refused.value)

    assert "tensor base_model.model.lm_head.lora_A.weight is not supported" in reason(
        {**factors, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}
    )
    assert f"tensor {name.format('B')} is missing" in reason(
        {key: one for key, one in factors.items() if key != name.format("B")}
    )
    high = name.replace("layers.1", "layers.7")
    more = {high.format("A"): factors[name.format("A")].clone(), high.format("B"): factors[name.format("B")].clone()}
    assert "layer 7 is not in the base model: the adapter is for another base model (tiny)" in reason({**factors, **more})
    far = name.replace("layers.1", f"layers.{'1' * 5000}").format("A")
    assert "is not supported: expected factors of" in reason({**factors, far: torch.zeros(4, 64)})
    for dtype, stored in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.complex64, "C64"), (torch.int32, "I32")):
        retyped = {**factors, name.format("B"): factors[name.format("B")].to(dtype)}
        assert f"tensor {name.format('B')} has type {stored}: expected F64, F32, F16, BF16" in reason(retyped)
    broken = factors[name.format("B")].clone()
    broken[3, 2] = float("nan")
    assert "factors of o_proj of layer 1 are not finite" in reason({**factors, name.format("B"): broken})
    assert "has no tensors" in reason({})
    (adapter / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="adapter_model"):
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match="does not exist"):
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))
    (adapter / CONFIG_FILE).unlink()
    with pytest.raises(ModelError, match="expected an adapter folder"):
        make_model_runner(base, SoloCollective(), Build(adapters=[adapter]))


def test_models_of_transformers_refuse_slots_for_adapters(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    with pytest.raises(ModelError, match="adapters are for models of the fused decoder only"):
        make_model_runner(base, SoloCollective(), Build(level="transformers", adapters=[adapter]))


def test_slots_are_reused_by_smaller_adapters(base: Path, adapters: Callable[[int], list[Path]]) -> None:
    wide, narrow = adapters(2)[1], adapters(3)[2]
    expected = generate(base, [1], Build(adapters=[narrow]), [1, 0])
    runner = make_model_runner(base, SoloCollective(), Build(adapters=[wide]))
    model = runner.model
    assert isinstance(model, Decoder) and model.adapters is not None
    requests = [DriverRequest(prompts()[0], adapter=1), DriverRequest(prompts()[1])]
    assert Driver(runner).generate(requests, NUM_TOKENS)[0] != expected[0]
    model.adapters.load(1, narrow)
    assert Driver(runner).generate(requests, NUM_TOKENS) == expected


def test_the_hash_of_an_adapter_covers_both_files(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    before = adapter_hash(adapter)
    assert before == adapter_hash(save_adapter(tmp_path / "same", base))
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": 1}))
    assert adapter_hash(adapter) != before
    assert adapter_hash(save_adapter(tmp_path / "other", base, seed=1)) != before
