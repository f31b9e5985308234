"""Times each of our kernels alone, at the sizes of a decode step and a prompt: bytes moved, time, share of the copy rate.

Small tensors stay in the cache of the device between calls, as they do between the kernels of a step: shares above 1 are
possible. Prefill attention is compared with the matmul rate.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.bounds import Figure
from bench.gpu.clock import Work
from bench.gpu.sizes import Sizes
from bench.gpu.steps import Bench
from phalanx_api import wire
from phalanx_api.roofline import ModelShape
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, StepBatch
from phalanx_runtime.model.layers import HeadNorm
from phalanx_runtime.rank.sampling.gpu.results import token_logprobs, verify_drafts
from phalanx_runtime.rank.sampling.gpu.row_state import RowState
from phalanx_runtime.rank.sampling.gpu.sample import make_workspace, sample_rows
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

EPS = 1e-5
DRAFTS = 4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias and mask": {"temperature": 0.8, "logit_bias": {7: 1.0}, "allowed_token_ids": [*range(64)]},
}
MAX_SLOTS = 32
"""Rows with penalties or a bias, as in the product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel at one size."""

    name: str
    work: Work
    num_bytes: float = 0.0
    """Read and written once."""
    flops: float = 0.0
    """Set where the matmul rate is the limit."""


def kernel_figures(bench: Bench) -> Iterator[Figure]:
    """Time and share of its limit of each kernel."""
    shape, sizes = bench.sizes.large_shape, bench.sizes
    make = Tensors(sizes, bench.device)
    with torch.inference_mode():
        cases = [
            *attention_cases(make, shape, sizes),
            *elementwise_cases(make, shape, sizes.compared_batch),
            *elementwise_cases(make, shape, sizes.prefill),
            *sampling_cases(make, shape, sizes),
        ]
        yield from figures_of(bench, cases)


def figures_of(bench: Bench, cases: Iterable[KernelCase]) -> Iterator[Figure]:
    """Time and share of its limit of each case."""
    for case in cases:
        seconds = bench.clock.captured_s(case.work)
        limit_s = case.flops / bench.rates.matmul_flops_per_s or case.num_bytes / bench.rates.copy_bytes_per_s
        yield Figure(name=case.name, value=1e6 * seconds, unit="us", predicted=1e6 * limit_s)
        rate = "matmul rate" if case.flops else "copy rate"
        yield Figure(name=f"{case.name}, of the {rate}", value=limit_s / seconds, unit="share")


class Tensors:
    """Makes random tensors of a model on the device."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device, self.dtype = sizes, device, sizes.dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def integers(self, count: int, end: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns random integers below `end`."""
        return torch.randint(end, (count,), dtype=dtype, device=self.device)

    def angles(self, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
        """Returns random cosines and signed sines, which keep the size of what they rotate."""
        theta = 6.3 * torch.rand(tokens, 1, dim // 2, device=self.device)
        cos, sin = theta.cos(), theta.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def cache(self, shape: ModelShape, num_pages: int) -> LayerCache:
        """Returns random pages of one layer."""
        return LayerCache(*(self(num_pages, shape.kv_heads, self.sizes.page, shape.head_dim) for _ in range(2)))

    def batch(self, shape: ModelShape, runs: list[tuple[int, int]]) -> StepBatch:
        """Returns a step on pages in random order. `runs`: tokens of each request before the step and in it."""
        page = self.sizes.page
        needed = [-(-(before + count) // page) for before, count in runs]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
        rows = list(range(len(runs)))
        plan = StepPlan(
            step=1,
            admitted=[NewRow(row, wire.Sampling(max_tokens=1, seed=0)) for row in rows],
            rows=rows,
            starts=[before for before, _ in runs],
            counts=[count for _, count in runs],
            pages=[order[sum(needed[:row]) : sum(needed[: row + 1])] for row in rows],
            tokens=[0] * sum(count for _, count in runs),
            draws=[],
        )
        return BatchBuilder(CacheShape(page, shape.kv_heads, 1 << 20), self.dtype, self.device).build(plan)


def attention_work(make: Tensors, shape: ModelShape, runs: list[tuple[int, int]]) -> Work:
    """Returns attention of one layer over such a step, its keys written before."""
    from phalanx_runtime.model.attention.gpu import open_gpu_attention

    tokens, page = sum(count for _, count in runs), make.sizes.page
    cache = make.cache(shape, sum(-(-(before + count) // page) for before, count in runs))
    q = make(tokens, shape.heads, shape.head_dim)
    k, v = (make(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
    attention = open_gpu_attention(False)
    batch = make.batch(shape, runs)
    return partial(attention, q, k, v, cache=cache, batch=batch, params=AttentionParams(), is_written=True)


def attention_cases(make: Tensors, shape: ModelShape, sizes: Sizes) -> Iterator[KernelCase]:
    """Decode at each batch size, and a prompt."""
    size, q = shape.bytes_per_number, shape.heads * shape.head_dim
    layer_bytes = shape.kv_bytes_per_token / shape.layers
    for batch in sizes.batches:
        work = attention_work(make, shape, [(sizes.context - 1, 1)] * batch)
        moved = batch * (sizes.context * layer_bytes + 2 * q * size)
        yield KernelCase(name=f"decode attention, {batch} x {sizes.context}", work=work, num_bytes=moved)
    tokens = sizes.prefill
    flops = 4.0 * q * tokens * (tokens + 1) / 2
    yield KernelCase(name=f"prefill attention, {tokens}", work=attention_work(make, shape, [(0, tokens)]), flops=flops)


def elementwise_cases(make: Tensors, shape: ModelShape, tokens: int) -> Iterator[KernelCase]:
    """The kernels between linears, for this number of tokens."""
    from phalanx_runtime.model.decoder.gpu import TritonOps

    ops, hidden, inner, dim = TritonOps(), shape.hidden, shape.intermediate, shape.head_dim
    size, num_heads = shape.bytes_per_number, shape.heads + 2 * shape.kv_heads
    x, y, weight = make(tokens, hidden), make(tokens, hidden), make(hidden)
    yield KernelCase(name=f"norm, {tokens}", work=partial(ops.norm, x, weight, EPS), num_bytes=2.0 * tokens * hidden * size)
    add_norm = partial(ops.add_norm, x, y, None, weight, EPS)
    yield KernelCase(name=f"add_norm, {tokens}", work=add_norm, num_bytes=4.0 * tokens * hidden * size)
    gate_up = make(tokens, 2 * inner)
    yield KernelCase(name=f"gate, {tokens}", work=partial(ops.gate, gate_up, "silu"), num_bytes=3.0 * tokens * inner * size)
    angles = make.angles(tokens, dim)
    num_pages = -(-tokens // make.sizes.page)
    slots = torch.randperm(num_pages * make.sizes.page * shape.kv_heads, device=make.device)[: tokens * shape.kv_heads]
    moved = 2.0 * tokens * num_heads * dim * size
    for name, norm in (("", None), (" with q/k norm", HeadNorm(make(dim), make(dim), EPS))):
        qkv, cache = make(tokens, num_heads, dim), make.cache(shape, num_pages)
        prepare = partial(ops.prepare_heads, qkv, norm, angles, cache, slots)
        yield KernelCase(name=f"prepare_heads{name}, {tokens}", work=prepare, num_bytes=moved)


def sampling_cases(make: Tensors, shape: ModelShape, sizes: Sizes) -> Iterator[KernelCase]:
    """Sampling by mode, logprobs, and verification of draft chains. The least work is one read of the logits."""
    batch, device = sizes.compared_batch, make.device
    logits = make(batch, shape.vocab)
    moved = float(logits.nbytes)
    indices = torch.ones(batch, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    workspace = make_workspace(shape.vocab, batch, device)
    for name, fields in SAMPLINGS.items():
        state = RowState(shape.vocab, batch, device, MAX_SLOTS)
        state.allocate_slots()
        rows = [state.admit(NewRow(row, wire.Sampling(max_tokens=9, seed=row, **fields), 1, [1])) for row in range(batch)]
        order = torch.arange(batch, dtype=torch.int32, device=device)
        order[[row for row, is_admitted in enumerate(rows) if not is_admitted]] = 0  # more rows than slots
        work = partial(sample_rows, logits, order, indices, state, tokens, workspace=workspace)
        yield KernelCase(name=f"sampling, {name}, {batch}", work=work, num_bytes=moved)
    sampled = make.integers(batch, shape.vocab)
    yield KernelCase(name=f"logprobs, {batch}", work=partial(token_logprobs, logits, sampled, 5), num_bytes=moved)
    drafts, found = (make.integers(batch * count, shape.vocab).view(batch, count) for count in (DRAFTS, DRAFTS + 1))
    order, last = torch.arange(batch, dtype=torch.int32, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    verify = partial(verify_drafts, drafts, found, order, last)
    yield KernelCase(name=f"verification, {batch} x {DRAFTS}", work=verify, num_bytes=float(drafts.nbytes + 2 * found.nbytes))
