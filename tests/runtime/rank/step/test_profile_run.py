"""The profile run covers the step at the end of the longest context."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx_api.engine_config import EngineConfig, KvCacheDtype
from phalanx_runtime.checkpoint.adapter import LINEARS
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention import paged as attention
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, PagedAttention, StepBatch, attend
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import KvLayout, LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank import profile_run
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.memory.memory_profiler import make_memory_profiler
from phalanx_runtime.rank.profile_run import PROFILE_SAMPLING, profile_largest_step
from phalanx_runtime.rank.step.adapters import adapter_rows
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
PAGE, TOKENS, HEADS, DIM, LENGTH = 16, 512, 8, 64, 8192


class OneLayer:
    """A model that only attends; `lengths` records the context lengths."""

    num_bytes, positions, vocab_size, embedding_size = 0, 1 << 20, 32, 0

    def __init__(self, softcap: float | None, width: int = 8) -> None:
        self.kv = KvLayout(2, (DIM,), (None,))
        self.width = width
        self.lengths: list[int] = []
        self._form = AttentionParams(softcap=softcap)

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        self.lengths += [chunk.length for chunk in batch.chunks]
        q, k = torch.ones(TOKENS, HEADS, DIM), torch.ones(TOKENS, 2, DIM)
        return PagedAttention()(q, k, k, caches[0], batch, self._form)[batch.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.vocab_size)

    def pooled_states(self, hidden: Tensor) -> Tensor:
        return hidden


def spec(kv_cache_dtype: KvCacheDtype = "auto") -> RankSpec:
    return RankSpec(
        rank=0,
        world_size=1,
        local_world_size=1,
        local_rank=0,
        incarnation=1,
        hosts=["localhost"],
        base_port=1,
        token="",
        model_dir=str(Path()),
        engine=EngineConfig(max_num_batched_tokens=TOKENS, max_num_seqs=2, page_size=PAGE, kv_cache_dtype=kv_cache_dtype),
    )


def profiled_bytes(model: OneLayer, longest: int, kv_cache_dtype: KvCacheDtype = "auto") -> int:
    return profile_largest_step(
        spec(kv_cache_dtype), model, Pipeline(SoloCollective()), torch.float32, CPU, make_memory_profiler(CPU), longest
    ).activations


def measured_bytes(model: OneLayer, kv_cache_dtype: KvCacheDtype = "auto") -> int:
    """Returns the peak bytes of a chunk at the end of a context of LENGTH, over distinct pages."""
    format = choose_format(kv_cache_dtype, model.kv.head_dims)
    caches = make_caches(model.kv, LENGTH // PAGE, PAGE, torch.float32, CPU, format=format)
    for tensor in (tensor for cache in caches for tensor in cache.tensors):
        tensor.zero_()
    builder = BatchBuilder(CacheShape(PAGE, 2, 1), torch.float32, CPU)
    pages = [list(range(LENGTH // PAGE))]
    plan = StepPlan(
        step=0,
        admitted=[NewRow(0, PROFILE_SAMPLING)],
        rows=[0],
        starts=[LENGTH - TOKENS],
        counts=[TOKENS],
        pages=pages,
        tokens=[0] * TOKENS,
        draws=[(0, 0)],
    )
    with torch.inference_mode():
        return make_memory_profiler(CPU).peak_bytes(lambda: model.hidden(builder.build(plan), caches))


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_profile_run_covers_the_last_chunk_at_maximum_length(
    softcap: float | None, wide: bool, kv_cache_dtype: KvCacheDtype
) -> None:
    model = OneLayer(softcap, width=1 << 20 if wide else 8)
    needs = profiled_bytes(model, LENGTH, kv_cache_dtype)
    assert model.lengths == [LENGTH // 2 if wide else LENGTH]  # a wide model is extrapolated
    # The measurement varies by some tens of MiB: the C library keeps freed memory.
    assert measured_bytes(model, kv_cache_dtype) * 0.7 <= needs < 192 << 20


def test_many_long_decodes_fit_the_reserved_memory() -> None:
    model = OneLayer(None)
    reserved = profiled_bytes(model, LENGTH)
    rows = TOKENS  # each gathers 8 MiB, 4 GiB in total
    table = list(range(LENGTH // PAGE))
    caches = make_caches(model.kv, len(table), PAGE, torch.float32, CPU)
    for cache in caches:
        cache.k.zero_()
        cache.v.zero_()
    builder = BatchBuilder(CacheShape(PAGE, 2, 1), torch.float32, CPU)
    numbers, new = list(range(rows)), [NewRow(row, PROFILE_SAMPLING) for row in range(rows)]
    plan = StepPlan(
        step=0,
        admitted=new,
        rows=numbers,
        starts=[LENGTH - 1] * rows,
        counts=[1] * rows,
        pages=[table] * rows,
        tokens=[0] * rows,
        draws=[(i, 0) for i in numbers],
    )
    with torch.inference_mode():
        assert [band.size for band in builder.build(plan).bands] == [rows]
        peak = make_memory_profiler(CPU).peak_bytes(lambda: model.hidden(builder.build(plan), caches))
    assert peak * 0.7 <= reserved < 192 << 20


def test_chunk_that_fills_the_context_runs_alone() -> None:
    model = OneLayer(None)
    profiled_bytes(model, TOKENS // 2)
    assert model.lengths == [TOKENS]


def causal(queries: int, length: int) -> Tensor:
    return torch.full((queries, length), float("-inf")).triu(1 + length - queries)


@pytest.mark.parametrize(
    ("shape", "length", "mask"),
    [
        ((2, 3, 40, 8), 40, None),
        ((2, 3, 40, 8), 72, causal(40, 72)),
        ((5, 2, 4, 8), 72, causal(5, 72)[:, None, None, :]),  # decoding requests: one mask for all query heads
    ],
)
def test_tiles_of_queries_give_equal_results(
    shape: tuple[int, ...], length: int, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(shape), torch.randn((*shape[:2], length, 8)), torch.randn((*shape[:2], length, 8))
    form = AttentionParams(softcap=3.0)
    whole = attend(q, k, v, mask, form)
    monkeypatch.setattr(attention, "TILE_BYTES", 3 * 4 * shape[0] * shape[1] * length)
    torch.testing.assert_close(attend(q, k, v, mask, form), whole, rtol=1e-5, atol=1e-6)


def test_context_token_costs_a_mask_key_and_value() -> None:
    kv = KvLayout(2, (64, 128), (None, 16))
    assert profile_run.context_bytes(kv, 10, torch.bfloat16) == 10 * (2 * 2 + 3) + 2 * 2 * 128 * 2


@pytest.mark.parametrize("max_loras", [0, 2])
def test_largest_step_has_an_adapter(tmp_path: Path, max_loras: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(
        dtype=torch.float32, device=CPU, kernels=Kernels(), positions=TOKENS, max_loras=max_loras, max_lora_rank=4
    )
    model = open_model(save_tiny(tmp_path / "model")).load(SoloCollective(), options)
    assert isinstance(model, Decoder)
    added: list[int] = []
    index_add = torch.Tensor.index_add_

    def counted(y: Tensor, dim: int, rows: Tensor, part: Tensor) -> Tensor:
        added.append(len(part))
        return index_add(y, dim, rows, part)

    monkeypatch.setattr(torch.Tensor, "index_add_", counted)
    profile_largest_step(spec(), model, Pipeline(SoloCollective()), torch.float32, CPU, make_memory_profiler(CPU), TOKENS)
    assert sum(added) == TOKENS * max_loras // 2 * len(LINEARS) * len(model.layers)
    added.clear()
    step = adapter_rows([1], [1], lambda arrays: [torch.from_numpy(array) for array in arrays])
    if model.adapters is not None and step is not None:
        model.adapters.of_step(step)[0].o.add(torch.zeros(1, 64), torch.zeros(1, 64))
    assert not added, "the slot is empty again"
