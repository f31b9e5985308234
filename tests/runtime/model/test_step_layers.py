"""All layers of a step in one call equal their single operations, bit for bit; other steps keep these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api.engine_config import KvCacheDtype
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.model.attention.cpu import can_attend
from phalanx_runtime.model.attention.feedback import KvRounding, make_feedback
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.decoder.cpu import NativeLayers, open_step_layers
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.profile_run import PROFILE_SAMPLING
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.model.compressed import same_pages
from tests.runtime.model.integer_checkpoints import KINDS, save_integers
from tests.runtime.model.targets import compiled
from tests.runtime.tiny import save_tiny

CPU, PAGE, LAYERS = torch.device("cpu"), 16, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its pages."""

    family: str = "llama"
    precision: Any = "bf16"
    kind: str = ""
    """Of an integer checkpoint."""
    rounds_inputs: bool = False
    pages: KvCacheDtype = "auto"
    is_batch_invariant: bool = False
    dtype: torch.dtype = torch.bfloat16


SUPPORTED = {
    "bf16": Case(),
    "biases": Case(family="qwen2", precision="int8"),
    "int4": Case(family="smollm3", precision="int4"),
    "fp8": Case(precision="fp8"),
    "w4a16": Case(kind="w4 zeros"),
    "w4a8": Case(kind="w4 groups", rounds_inputs=True),
    "w8a16": Case(kind="w8 groups", pages="fp8"),
    "w8a8": Case(kind="int8 channel", pages="int8"),
    "window": Case(family="mistral", pages="int4"),
    "norms of heads": Case(family="qwen3"),
    "batch invariant": Case(is_batch_invariant=True),
    "fp32": Case(family="qwen3", dtype=torch.float32, precision="int8", pages="int8"),
}
OTHERS = {
    "norms after": Case(family="olmo2"),
    "gelu": Case(family="gemma"),
    "order of inputs": Case(kind="w4 order"),
    "experts": Case(family="mixtral"),
    "sinks": Case(family="gpt_oss"),
}


def decoder(folder: Path, case: Case) -> Decoder:
    compiled("native")
    model = save_tiny(folder / "model", case.family, head_dim=32, num_hidden_layers=LAYERS)
    if case.kind:
        kind = replace(KINDS[case.kind], rounds_inputs=case.rounds_inputs)
        save_integers(model, folder / "integers", folder / "exact", kind)
        model = folder / "integers"
    kernels = Kernels(compiled=True, precision=case.precision)
    options = LoadOptions(
        dtype=case.dtype, device=CPU, kernels=kernels, positions=256, is_batch_invariant=case.is_batch_invariant
    )
    made = open_model(model, "fused").load(SoloCollective(), options)
    assert isinstance(made, Decoder)
    return made


def plans() -> list[StepPlan]:
    """Prompts; decodes with a prompt; decodes; a decode with a draft tree."""

    def plan(step: int, requests: Sequence[tuple[int, int, int, list[int]]], tree: list[int] | None = None) -> StepPlan:
        count = sum(size for _, _, size, _ in requests)
        return StepPlan(
            step=step,
            admitted=[NewRow(row, PROFILE_SAMPLING) for row, start, _, _ in requests if not start],
            rows=[row for row, *_ in requests],
            starts=[start for _, start, _, _ in requests],
            counts=[size for _, _, size, _ in requests],
            pages=[pages for *_, pages in requests],
            tokens=[(7 * step + 11 * at) % 300 for at in range(count)],
            draws=[(request, 0) for request in range(len(requests))],
            paths=[DraftPath(request=0, depth=len(tree), parents=tree)] if tree else [],
        )

    return [
        plan(0, [(0, 0, 40, [5, 1, 6]), (1, 0, 7, [2])]),
        plan(1, [(0, 40, 1, []), (1, 7, 1, []), (2, 0, 20, [3, 0])]),
        plan(2, [(0, 41, 1, []), (1, 8, 1, []), (2, 20, 1, [])]),
        plan(3, [(0, 42, 4, []), (1, 9, 1, []), (2, 21, 1, [])], [-1, 0, 0]),
    ]


def computed(model: Decoder, case: Case) -> tuple[list[torch.Tensor], list[LayerCache]]:
    """Returns the hidden states of all steps, and the pages after them."""
    caches = make_caches(model.kv, 8, PAGE, case.dtype, CPU, format=choose_format(case.pages, model.kv.head_dims))
    builder = BatchBuilder(CacheShape(PAGE, model.kv.kv_heads, 1), case.dtype, CPU)
    with torch.inference_mode():
        return [model.hidden(builder.build(plan), caches) for plan in plans()], caches


@pytest.mark.parametrize("case", SUPPORTED.values(), ids=SUPPORTED.keys())
def test_one_call_equals_single_operations(tmp_path: Path, case: Case) -> None:
    """Without the step kernel of attention only the third step, of decodes alone, is one call."""
    model = decoder(tmp_path, case)
    layers = model.step_layers
    assert isinstance(layers, NativeLayers)
    states, caches = computed(model, case)
    num_steps = len(plans()) if can_attend(compiled("native"), PAGE, 32, case.dtype) else 1
    assert layers.num_computed == LAYERS * num_steps
    model.step_layers = None
    expected, expected_caches = computed(model, case)
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))
    assert all(same_pages(one, other) for one, other in zip(caches, expected_caches, strict=True))


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_other_layers_use_single_operations(tmp_path: Path, case: Case) -> None:
    model = decoder(tmp_path, case)
    computed(model, case)
    assert isinstance(model.step_layers, NativeLayers) and model.step_layers.num_computed == 0


CHANGES: dict[str, Callable[[StepBatch], StepBatch]] = {
    "copies": lambda batch: replace(batch, await_pages=lambda _: None),
    "images": lambda batch: replace(batch, has_images_within=True),
    "parts": lambda batch: replace(batch, windowed=batch),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_steps_use_single_operations(tmp_path: Path, change: Callable[[StepBatch], StepBatch]) -> None:
    """Pages that are copied are awaited layer by layer; layers with parts of pages have another step."""
    model, case = decoder(tmp_path, SUPPORTED["bf16"]), SUPPORTED["bf16"]
    caches = make_caches(model.kv, 8, PAGE, case.dtype, CPU)
    batch = BatchBuilder(CacheShape(PAGE, model.kv.kv_heads, 1), case.dtype, CPU).build(plans()[0])
    with torch.inference_mode():
        model.hidden(change(batch), caches)
    assert isinstance(model.step_layers, NativeLayers) and model.step_layers.num_computed == 0


def test_calibrated_pages_and_several_ranks_use_single_operations(tmp_path: Path) -> None:
    case = Case(pages="int8")
    model = decoder(tmp_path, case)
    feedback = make_feedback(torch.zeros(2, 32), torch.eye(32).expand(2, 32, 32))
    model.kv = replace(model.kv, roundings=(KvRounding(feedback, feedback),) * LAYERS)
    computed(model, case)
    assert isinstance(model.step_layers, NativeLayers) and model.step_layers.num_computed == 0
    attention = choose_attention(CPU)
    assert open_step_layers(attention, model.ops, model.config, 1) is not None
    assert open_step_layers(attention, model.ops, model.config, 2) is None
