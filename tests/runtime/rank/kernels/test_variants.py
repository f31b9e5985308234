"""Steps launch listed kernel variants only, on fake tensors: of each family, and of whole steps with sampling."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.core.step_plan import StepResult
from phalanx_runtime.model.adapters.load import places
from phalanx_runtime.model.adapters.slots import LayerSlots, SlotShape
from phalanx_runtime.model.attention.page_format import FORMATS, PageFormat
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.sparse import ExpertAdditions, ExpertWeights, Routing
from phalanx_runtime.model.kernels.variant import KernelVariant, observed_launches
from phalanx_runtime.model.linear.packed.weight import GGML, PackedFormat, PackedLayout, PackedWeight
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Shard, partition
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.kernels.variants import KernelOptions, model_variants, step_variants
from phalanx_runtime.rank.memory.kv_cache import make_caches
from tests.runtime.collective.fake_groups import fake_group
from tests.runtime.model.gpu.fakes import CUDA, PAGE, empty, fake_batch, fake_decoder, fake_rounding
from tests.runtime.rank.device.fake_decoders import ALONE, DTYPE, LLAMA_8B, POSITIONS, QWEN3_600M
from tests.runtime.rank.device.fake_plans import decode, mixed, speculative, with_logprobs
from tests.runtime.rank.device.fake_rank import FakeRank
from tests.runtime.rank.kernels.config import BASE

CHANGES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 2},
    "Qwen2ForCausalLM": {"head_dim": 128},
    "Qwen3ForCausalLM": {"head_dim": 128, "num_attention_heads": 8},
    "Phi3ForCausalLM": {"head_dim": 96, "partial_rotary_factor": 0.75},
    "SmolLM3ForCausalLM": {"hidden_size": 576, "num_hidden_layers": 4},
    "Gemma2ForCausalLM": {"head_dim": 256, "intermediate_size": 1000},
    "Gemma3ForCausalLM": {"head_dim": 256, "num_attention_heads": 4, "num_hidden_layers": 7},
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
    "attention_bias": True,
}
DECODES = [(300, 1), (20, 1), (700, 1)]
STEPS = {
    "single": DECODES[:1],
    "decode": DECODES,
    "many": [(40, 1)] * 300,
    "mixed": [*DECODES, (0, 200), (256, 90)],
    "chunks": [(0, 200), (7, 5)],
}


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def listed(config: ModelConfig, world_size: int = 1, format: PageFormat | None = None, **more: Any) -> list[KernelVariant]:
    options = KernelOptions(dtype=DTYPE, page_size=PAGE, capability=9, world_size=world_size, format=format, **more)
    return model_variants(config, partition(config, world_size)[0], options)


def surplus(found: list[KernelVariant], expected: list[KernelVariant]) -> list[str]:
    """Returns what was launched and is not listed."""
    return [f"{variant.name} {variant.arguments}" for variant in set(found).difference(expected)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("architecture", CHANGES)
def test_layers_of_each_family_launch_listed_variants(architecture: str, world_size: int) -> None:
    config = parse_config({**BASE, **CHANGES[architecture], "architectures": [architecture]})
    expected = listed(config, world_size)
    with observed_launches() as found:
        decoder = fake_decoder(config, world_size)
        kv_heads = decoder.shard.kv_heads.size
        caches = [LayerCache(*(empty(64, kv_heads, PAGE, config.head_dim) for _ in range(2))) for _ in decoder.layers]
        for runs in STEPS.values():
            batch = fake_batch(runs, kv_heads)
            decoder.hidden(batch, caches, empty(len(batch.tokens), config.hidden_size))
        decoder.logits(empty(1, config.hidden_size))
    assert surplus(found, expected) == []
    assert {variant.name for variant in found} == {variant.name for variant in expected}
    assert len(expected) == len(set(expected)) <= (40 if config.mixture else 25)


COMPRESSED = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"]


@pytest.mark.parametrize(
    ("architecture", "name", "is_calibrated"),
    [*product(COMPRESSED, FORMATS, [False]), (COMPRESSED[1], "int8", True), (COMPRESSED[2], "int4", True)],
)
def test_layers_with_compressed_pages_launch_listed_variants(architecture: str, name: str, is_calibrated: bool) -> None:
    config = parse_config({**BASE, **CHANGES[architecture], "architectures": [architecture]})
    expected = listed(config, format=FORMATS[name], is_calibrated=is_calibrated)
    with observed_launches() as found:
        decoder = fake_decoder(config)
        rounding = fake_rounding(decoder.kv.kv_heads, config.head_dim)
        roundings = (rounding,) * config.num_layers if is_calibrated else ()
        kv = KvLayout(decoder.kv.kv_heads, (config.head_dim,) * config.num_layers, config.windows, roundings=roundings)
        caches = make_caches(kv, 64, PAGE, DTYPE, CUDA, FORMATS[name])
        for runs in STEPS.values():
            batch = fake_batch(runs, decoder.kv.kv_heads)
            decoder.hidden(batch, caches, empty(len(batch.tokens), config.hidden_size))
        decoder.logits(empty(1, config.hidden_size))
    assert surplus(found, expected) == []
    needed = {"compress_heads", "round_in_turn", "restore_heads"} if is_calibrated else {"compress_heads"}
    assert {variant.name for variant in found} == {variant.name for variant in expected} >= needed


def additions(config: ModelConfig, shard: Shard, tokens: int) -> ExpertAdditions:
    """What adapters add to the experts of a rank, in a captured step."""
    shape = SlotShape(num_slots=3, rank=16, dtype=DTYPE, device=CUDA)
    layer = LayerSlots(places(config, shard, 0, has_experts=True), shape, Kernels(triton=True))
    rows = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
    table = torch.zeros(tokens, 3, dtype=torch.int64, device=CUDA)
    found = layer.of_step(StepAdapters(rows=rows, pieces=(), table=table, slots=rows), has_experts=True).experts
    assert found is not None
    return found


@pytest.mark.parametrize(("world_size", "is_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_biased_experts_of_every_rank_launch_listed_variants(rank: int, world_size: int, is_parallel: bool) -> None:
    """With columns of all experts, only rank 0 adds the bias of the down product. With adapters and without."""
    config = parse_config({**BASE, **GPT_OSS})
    assert config.mixture is not None
    config = replace(config, mixture=replace(config.mixture, is_parallel=is_parallel))
    options = KernelOptions(dtype=DTYPE, page_size=PAGE, capability=9, world_size=world_size, has_expert_adapters=True)
    shard = partition(config, world_size)[rank % world_size]
    count, inner, hidden = shard.experts.size, shard.expert_mlp.size, config.hidden_size
    adds_bias = rank % world_size == 0 or is_parallel
    weights = ExpertWeights(
        gate_up=empty(count, 2 * inner, hidden),
        down=empty(count, hidden, inner),
        gate_up_bias=empty(count, 2 * inner),
        down_bias=empty(count, hidden) if adds_bias else None,
    )
    experts = GroupedExperts(weights, shard.experts, Routing(per_token=4, norm_topk_prob=True), config.activation)
    with observed_launches() as found:
        for tokens in (1, 300):
            experts(empty(tokens, hidden), empty(tokens, 16))
            experts.with_additions(empty(tokens, hidden), empty(tokens, 16), additions(config, shard, tokens))
    assert {variant.name for variant in found} >= {"multiply_experts", "shrink_experts", "expand_experts", "combine_experts"}
    assert surplus(found, model_variants(config, shard, options)) == []


@pytest.mark.parametrize("name", get_args(PackedFormat))
def test_packed_experts_launch_listed_variants(name: PackedFormat) -> None:
    config = parse_config({**BASE, **GPT_OSS})
    shard = partition(config, 1)[0]
    count, inner, hidden = shard.experts.size, shard.expert_mlp.size, config.hidden_size
    layout = PackedLayout(name, GGML[name].group if name in GGML else 32 if name.endswith("4") else 4096, 16)

    def packed(rows: int, inputs: int) -> PackedWeight:
        num_words, num_scales = layout.row_sizes(inputs)
        words = empty(count, rows, num_words).to(torch.int32)
        scales = empty(count, rows, num_scales).to(layout.scale_dtype)
        return PackedWeight(
            words=words, scales=scales, format=name, group=layout.group, width=layout.width, outputs=rows, inputs=inputs
        )

    weights = ExpertWeights(
        gate_up=packed(2 * inner, hidden),
        down=packed(hidden, inner),
        gate_up_bias=empty(count, 2 * inner),
        down_bias=empty(count, hidden),
    )
    experts = GroupedExperts(weights, shard.experts, Routing(per_token=4, norm_topk_prob=True), config.activation)
    with observed_launches() as found:
        for tokens in (1, 300):
            experts(empty(tokens, hidden), empty(tokens, 16))
            experts.with_additions(empty(tokens, hidden), empty(tokens, 16), additions(config, shard, tokens))
    expected = listed(config, expert_layouts=(weights.layouts,), has_expert_adapters=True)
    assert {variant.name for variant in found} >= {"multiply_packed_experts", "combine_experts"}
    assert surplus(found, expected) == []
    assert "multiply_experts" not in {variant.name for variant in expected}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_600M], ids=["llama 8b", "qwen3 0.6b"])
def test_whole_steps_launch_listed_variants(config: ModelConfig, world_size: int) -> None:
    """Captured and eager steps with filters, penalties, logprobs and draft trees, and a step that the host sampled.

    Two ranks have adapters too.
    """
    kv_heads, has_adapters = config.num_kv_heads // world_size, world_size == 2
    steps = step_variants(kv_heads, config.vocab_size, DTYPE, -(-POSITIONS // PAGE), has_adapters=has_adapters)
    with observed_launches() as found:
        rank = FakeRank(config, ALONE if world_size == 1 else fake_group(world_size)[0], max_loras=2 * has_adapters)
        for make_plan in (decode, mixed, speculative, with_logprobs):
            rank.run(make_plan(2))
        rank.step.record(decode(3), StepResult(step=3, tokens=[5, 6]))
    assert surplus(found, [*listed(config, world_size, has_adapters=has_adapters), *steps]) == []
    assert {variant.name for variant in found} >= {variant.name for variant in steps}


def test_shapes_of_models_share_variants() -> None:
    """Only attention depends on the number of heads; vocabularies and widths differ in alignment and powers of two."""
    first, second = (step_variants(8, config.vocab_size, DTYPE, 512) for config in (LLAMA_8B, QWEN3_600M))
    assert first == second
    narrow, wide = (listed(LLAMA_8B, world_size) for world_size in (2, 4))
    assert narrow == wide


def test_float64_has_no_kernels() -> None:
    options = KernelOptions(dtype=torch.float64, page_size=PAGE, capability=9, world_size=1)
    assert model_variants(LLAMA_8B, partition(LLAMA_8B, 1)[0], options) == []
