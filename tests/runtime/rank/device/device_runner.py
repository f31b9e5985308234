"""A runner of one rank whose decode steps run on the device; other steps are built by `BatchBuilder`."""

import time
from collections.abc import Callable
from typing import cast

import msgspec
import torch
from torch import Tensor

from phalanx_runtime.core.step_plan import LAST_SAMPLED, PoolShape, StepPlan, StepResult
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget, DecodeGraphs, EagerGraph, StepGraph, bucket_sizes
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.device_decodes import DecodeStep, DeviceDecodes, DeviceSampling
from phalanx_runtime.rank.device.device_rows import DeviceRows
from phalanx_runtime.rank.memory.kv_cache import page_bytes
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape

MAX_MODEL_LEN = 256


def same_logits(logits: Tensor) -> Tensor:
    """Returns the logits of the only rank."""
    return logits


def greedy(device_rows: DeviceRows) -> DeviceSampling:
    """Returns the sampling of the most probable tokens."""

    def sample(logits: Tensor, rows: Tensor, indices: Tensor, tokens: Tensor) -> None:
        tokens.copy_(logits.argmax(-1))
        device_rows.record(tokens, rows)

    return sample


class DeviceRunner:
    """Takes model and pages of a `ModelRunner`. The last page is for padding rows."""

    def __init__(self, runner: ModelRunner, max_num_seqs: int, make_graph: Callable[[], StepGraph] = EagerGraph) -> None:
        model, pool = runner.model, runner.pool
        self.pool = PoolShape(pool.num_pages - 1, pool.page_size)
        cache = runner.caches[0].k
        self.rows = DeviceRows(max_num_seqs, MAX_MODEL_LEN, pool.page_size, cache.device)
        inputs = DecodeInputs(self.rows, model.kv.kv_heads, padding_page=pool.num_pages - 1)
        step = DecodeStep(model=model, caches=runner.caches, inputs=inputs, gather=same_logits, sample=greedy(self.rows))
        self.graphs = DecodeGraphs(bucket_sizes(max_num_seqs), step, make_graph)
        self.decodes = DeviceDecodes(inputs, self.graphs)
        shape = CacheShape(pool.page_size, model.kv.kv_heads, page_bytes(model.kv, pool.page_size, cache.dtype))
        self._model, self._caches = model, runner.caches
        self._builder = BatchBuilder(shape, cache.dtype, cache.device)
        self._builder.last_tokens = self.rows.last_tokens
        self._sampler = TorchSampler(model.vocab_size)
        self._sampled: set[int] = set()
        with torch.inference_mode():
            self.account = self.graphs.capture(CaptureBudget(1 << 30, 1000.0), time.perf_counter)

    @property
    def as_runner(self) -> ModelRunner:
        """This runner, for the driver, which needs `pool`, `start` and `finish`."""
        return cast(ModelRunner, self)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> None:
        """Computes a step."""
        plan = self._without_samples(plan)
        self.decodes.update(plan)
        self._builder.update(plan)
        for new in plan.admitted:
            self._sampler.admit(new)
        sampled = self.decodes.compute(plan)
        tokens = self._compute(plan) if sampled is None else [sampled.tolist()[request] for request, _ in plan.draws]
        self._sampled |= {plan.rows[request] for request, _ in plan.draws}
        self._result = StepResult(step=plan.step, tokens=tokens)

    def finish(self) -> StepResult:
        """Returns its result."""
        return self._result

    def _without_samples(self, plan: StepPlan) -> StepPlan:
        """Returns the plan that a scheduler makes before it knows sampled tokens."""
        self._sampled -= {new.row for new in plan.admitted}
        unknown = [row in self._sampled for row, count in zip(plan.rows, plan.counts, strict=True) for _ in range(count)]
        tokens = [LAST_SAMPLED if is_unknown else token for is_unknown, token in zip(unknown, plan.tokens, strict=True)]
        return msgspec.structs.replace(plan, tokens=tokens)

    def _compute(self, plan: StepPlan) -> list[int]:
        logits = self._model.logits(self._model.hidden(self._builder.tensors(plan), self._caches))
        draws = [(plan.rows[request], index) for request, index in plan.draws]
        tokens = self._sampler.sample(logits, draws).tokens if draws else []
        if draws:
            device = logits.device
            rows = torch.tensor([row for row, _ in draws], dtype=torch.int32, device=device)
            self.rows.record(torch.tensor(tokens, device=device), rows)
        return tokens
