"""Whole steps of large models without a device, sampling included, on fake tensors: no wait of the host, no mix of devices.

A read of a value on the device raises, and so does an operator over several devices. The results are not read.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace as modified

import pytest
from msgspec.structs import replace
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.rank.device.limits import SAMPLING_SLOTS
from phalanx_runtime.rank.device.pending_step import PendingStep
from phalanx_runtime.rank.loader import make_runner
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.runtime.collective.fake_groups import fake_group
from tests.runtime.model.gpu.launches import NoWaits, launches_of
from tests.runtime.rank.device.fake_decoders import (
    ALONE,
    DEVICE,
    DTYPE,
    GPT_OSS_20B,
    LLAMA_8B,
    QWEN3_30B,
    QWEN3_600M,
    make_decoder,
)
from tests.runtime.rank.device.fake_plans import decode, mixed, prompts, speculative
from tests.runtime.rank.device.fake_rank import PAGE, POOL, SAMPLING, FakeRank
from tests.runtime.rank.device.recorded_ops import VIEWS, RecordedOps, record

LAYER_LAUNCHES = {
    *(f"phalanx::{name}" for name in ("paged_attention", "merge_splits", "prepare_heads", "gate", "add_norm")),
    *("aten::mm", "aten::addmm_"),
}
EXPERT_LAUNCHES = {f"phalanx::{name}_experts" for name in ("route", "multiply", "combine")} | {"phalanx::sort_pairs"}
PENALISED = wire.Sampling(max_tokens=50, seed=4, presence_penalty=0.5)
CONFIGS = {"llama 8b": LLAMA_8B, "qwen3 0.6b": QWEN3_600M, "qwen3 30b": QWEN3_30B, "gpt-oss 20b": GPT_OSS_20B}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode():
        yield


@configs
def test_a_decode_step_is_captured_with_its_sampling(config: ModelConfig) -> None:
    """Outside the graph: a launch that reads the update from the host, and one that writes the tokens there."""
    rank = FakeRank(config)
    for ops in rank.captured:
        assert ops.devices == {"cuda"}
        assert ops.names.count("phalanx::paged_attention") == config.num_layers
        own = [name for name in ops.names if name.startswith("phalanx::")]
        assert own[0] == "phalanx::build_decode_inputs" and own[-1] == "phalanx::sample_rows"
    for step in (2, 3):
        ops = record(lambda step=step: rank.run(decode(step)))  # type: ignore[misc]
        assert [name for name in ops.names if name not in VIEWS] == ["phalanx::update_rows", "phalanx::store_tokens"]
        assert ops.num_made == 0, "a replay allocates nothing"
    assert dict(rank.step.graphs.num_replays) == {2: 2}


@configs
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_decode_step_of_several_ranks_is_captured(config: ModelConfig, world_size: int) -> None:
    """With its collectives: a sum after each half of a layer and of the embedding, and the logits. Nothing waits between them."""
    peers, backend = fake_group(world_size)
    rank = FakeRank(config, peers)
    backend.calls.clear()
    ops = record(lambda: rank.step.graphs.compute(4))
    assert Counter(backend.calls) == {"allreduce": 2 * config.num_layers + 1, "allgather": 1}
    assert ops.devices == {"cuda"} and ops.names[-1] == "phalanx::sample_rows"
    backend.calls.clear()
    ops = record(lambda: rank.run(decode(2)))
    assert [name for name in ops.names if name not in VIEWS] == ["phalanx::update_rows", "phalanx::store_tokens"]
    assert not backend.calls and dict(rank.step.graphs.num_replays) == {2: 1}


def test_a_step_with_whole_experts_per_rank_is_captured() -> None:
    """128 experts over three ranks; the sum of their outputs is the all-reduce of the MLP."""
    mixture = QWEN3_30B.mixture
    assert mixture is not None
    peers, backend = fake_group(3)
    rank = FakeRank(modified(QWEN3_30B, mixture=modified(mixture, is_parallel=True)), peers)
    backend.calls.clear()
    ops = record(lambda: rank.step.graphs.compute(4))
    assert Counter(backend.calls) == {"allreduce": 2 * QWEN3_30B.num_layers + 1, "allgather": 1}
    assert ops.names.count("phalanx::sort_pairs") == QWEN3_30B.num_layers and ops.devices == {"cuda"}


@configs
def test_a_captured_step_reads_and_writes_the_same_memory(config: ModelConfig) -> None:
    """Captures of one size after different steps: the memory that they share with others has the same addresses."""
    rank, captures = FakeRank(config), list[RecordedOps]()
    for step in (2, 3):
        rank.run(decode(step))
        captures.append(record(lambda: rank.step.graphs.compute(4)))
    assert captures[0].names == captures[1].names
    assert captures[0].external == captures[1].external
    assert len({storage for _, storage, _ in captures[0].external}) > 8 * config.num_layers


def test_a_request_that_leaves_its_row_frees_its_slots() -> None:
    """As many requests with penalties as there are slots, then others in rows further on."""
    rank = FakeRank(QWEN3_600M, num_rows=2 * SAMPLING_SLOTS)
    first, second = range(SAMPLING_SLOTS), range(SAMPLING_SLOTS, 2 * SAMPLING_SLOTS)
    rank.run(prompts(2, first, PENALISED))
    rank.run(prompts(3, second[:-1], PENALISED, left_rows=first))
    assert not rank.step.obstacles
    rank.step.update(plan := prompts(4, first[:2], PENALISED))
    assert not rank.step.can_launch(plan) and rank.step.obstacles == {"host rows": 1}, "one slot was left"


ADAPTED = {"llama 8b": (LLAMA_8B, 7, 0, 1), "qwen3 30b": (QWEN3_30B, 4, 2, 1), "gpt-oss 20b, tp2": (GPT_OSS_20B, 4, 2, 2)}


@pytest.mark.parametrize(("config", "linears", "products", "world_size"), ADAPTED.values(), ids=ADAPTED.keys())
def test_captured_steps_add_adapters_of_their_rows(config: ModelConfig, linears: int, products: int, world_size: int) -> None:
    """Two launches for each linear, and for both products of experts, which read factors and slots of rows at constant
    addresses; other steps wait for nothing.

    Steps without adapters have graphs of their own.
    """
    peers = ALONE if world_size == 1 else fake_group(world_size)[0]
    rank, captures = FakeRank(config, peers, max_loras=2), list[RecordedOps]()
    added = {f"phalanx::{name}": linears * config.num_layers for name in ("shrink_rows", "expand_rows")}
    added |= {f"phalanx::{name}": products * config.num_layers for name in ("shrink_experts", "expand_experts") if products}
    for step in (2, 3):
        rank.run(decode(step))
        captures.append(record(lambda: rank.step.adapted_graphs.compute(4)))
    plain, adapted = rank.captured[: len(rank.captured) // 2], rank.captured[len(rank.captured) // 2 :]
    assert len(plain) == len(adapted) > 1
    for ops in (*plain, *adapted, *captures):
        assert Counter(name for name in ops.names if name in added) == ({} if ops in plain else added)
        assert ops.devices == {"cuda"}
    assert captures[0].external == captures[1].external
    assert dict(rank.step.adapted_graphs.num_replays) == {2: 2} and not rank.step.graphs.num_replays
    for make_plan in (mixed, speculative):
        plan = make_plan(4)
        plan = replace(plan, admitted=[replace(new, adapter=1) for new in plan.admitted])
        assert rank.adapters is not None
        with rank.adapters.held(1):
            launches = launches_of(lambda plan=plan: rank.run(plan))  # type: ignore[misc]
        assert {name: launches.count(name) for name in added} == added


@configs
def test_a_pipeline_stage_waits_for_nothing(config: ModelConfig) -> None:
    """The first of two stages, of two ranks each: it sends the hidden states on."""
    world, backend = fake_group(4)
    pipeline = Pipeline(world, 2)
    decoder = make_decoder(config, pipeline.peers, pipeline.stage)
    caches = make_caches(decoder.kv, POOL.num_pages, PAGE, DTYPE, DEVICE)
    runner = make_runner(decoder, caches, POOL, pipeline, DTYPE, DEVICE)
    plan = replace(mixed(1), admitted=[NewRow(row, SAMPLING) for row in range(3)], pages=[[0, 1, 2], [3, 4, 5], [*range(10, 23)]])
    with NoWaits():
        runner.start(replace(plan, tokens=[9] * 202))
    assert Counter(backend.calls) == {"allreduce": config.num_layers + 1, "send to 2": 1}


@pytest.mark.parametrize(
    ("name", "is_calibrated"),
    [("int4", False), ("int4", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("fp8", "int8"))],
)
def test_steps_with_compressed_pages_wait_for_nothing(name: str, is_calibrated: bool) -> None:
    """Captured decode steps, and steps with chunks and with trees of draft tokens: as many launches as without a format, but for
    two in each layer with a calibration."""
    plain, small = FakeRank(QWEN3_600M), FakeRank(QWEN3_600M, format=FORMATS[name], is_calibrated=is_calibrated)
    more = ("phalanx::round_in_turn", "phalanx::restore_heads") if is_calibrated else ()
    for ops, expected in zip(small.captured, plain.captured, strict=True):
        assert ops.devices == {"cuda"}
        launched, others = ([name for name in names if name.startswith("phalanx::")] for names in (ops.names, expected.names))
        assert [name.replace("compress", "prepare") for name in launched if name not in more] == others
    for make_plan in (decode, mixed, speculative):
        counts = [Counter(launches_of(lambda rank=rank, make=make_plan: rank.run(make(2)))) for rank in (plain, small)]  # type: ignore[misc]
        assert counts[1].total() - counts[0].total() == sum(counts[1][name] for name in more)
        assert counts[0]["phalanx::prepare_heads"] == counts[1]["phalanx::compress_heads"]
    assert dict(small.step.graphs.num_replays) == {2: 1}


@configs
@pytest.mark.parametrize("make_plan", [mixed, speculative])
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_steps_wait_for_nothing(config: ModelConfig, make_plan: Callable[[int], StepPlan], world_size: int) -> None:
    rank = FakeRank(config, ALONE if world_size == 1 else fake_group(world_size)[0])
    pending: list[PendingStep] = []
    launches = Counter(launches_of(lambda: pending.append(rank.run(make_plan(2)))))
    assert launches["phalanx::sample_rows"] == 1
    assert launches["phalanx::accept_drafts"] == (make_plan is speculative)
    in_layers = sum(count for name, count in launches.items() if name in LAYER_LAUNCHES | EXPERT_LAUNCHES)
    bound = 10 if config.mixture is None else 13
    assert in_layers <= bound * config.num_layers + 3, "with the first norm, the last one and the head"
    assert launches.total() - in_layers < 32, "rows, inputs, sampling"
    with pytest.raises(DataDependentOutputException):
        pending[0]()
