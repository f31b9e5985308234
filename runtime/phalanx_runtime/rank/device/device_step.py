"""Steps that are queued on the device with their sampling; the host reads the tokens later, and plans the next step meanwhile.

    graph    decode steps (`decode_step`)
    eager    other steps, built by `BatchBuilder`; draft tokens of the plan are verified on the device
    host     steps that `DeviceStep.can_launch` refuses, with the obstacle counted: the rank samples them with `Sampler`

A row with penalties that the host samples once stays on the host: its counts on the device are then out of date.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from phalanx_api.wire import Sampling
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.draft_tree import chain, levels
from phalanx_runtime.core.request import has_penalties
from phalanx_runtime.core.step_plan import NewRow, StepPlan, StepResult
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.copies import Array, upload
from phalanx_runtime.model.logits import all_gather_logits
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_graphs import NO_ACCOUNT, DecodeGraphs
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.decode_step import GraphObstacle, decode_obstacle
from phalanx_runtime.rank.device.host_tokens import HostTokens
from phalanx_runtime.rank.device.pending_step import PendingStep, SampledTensors, mark_time
from phalanx_runtime.rank.sampling.gpu.results import token_logprobs, verify_drafts
from phalanx_runtime.rank.sampling.gpu.row_state import RowState
from phalanx_runtime.rank.sampling.gpu.sample import SamplingWorkspace, sample_rows
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder, prompt_logprob_ranges
from phalanx_runtime.rank.step.draft_paths import DraftedPath, paths_of_draws
from phalanx_runtime.rank.step.pooling import NO_VECTORS, Pooler

StepObstacle = Literal["draft passes", "prompt logprobs", "host rows", "penalties with drafts", "draws"]
"""Why the host samples a step. "host rows": `RowState.admit` excludes a row; "draws": more than the workspace holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSampler:
    """`decode_step.DeviceSampling` by `sample_rows`."""

    state: RowState
    workspace: SamplingWorkspace

    def __call__(self, logits: Tensor, rows: Tensor, indices: Tensor, tokens: Tensor) -> None:
        """See `DeviceSampling`."""
        sample_rows(logits, rows, indices, self.state, tokens, workspace=self.workspace)


class DeviceStep:
    """Follows all plans of a rank and computes those that the device can sample. One stage.

    Each rank of the model samples from equal logits, so that the tokens stay on its device; the first reads them.
    """

    def __init__(
        self,
        *,
        model: Model,
        peers: Collective,
        caches: list[LayerCache],
        builder: BatchBuilder,
        inputs: DecodeInputs,
        graphs: DecodeGraphs,
        adapted_graphs: DecodeGraphs,
        sampler: DeviceSampler,
        pooler: Pooler,
        sampling_rows: Mapping[int, SamplingRow],
    ) -> None:
        """peers: the ranks of the model. `pooler`: also of steps that the host samples. `sampling_rows`: of the host's sampler,
        which records the tokens of rows with state."""
        self.graphs = graphs
        self.adapted_graphs = adapted_graphs
        """Of steps with adapters."""
        self.graph_obstacles: Counter[GraphObstacle] = Counter()
        """Steps that the device samples without a graph, by obstacle."""
        self.obstacles: Counter[StepObstacle] = Counter()
        """Steps that the host sampled, by obstacle."""
        self.num_launched = 0
        """Other steps, graphs included."""
        self.account = NO_ACCOUNT
        """What the captures took."""
        self._model = model
        self._peers = peers
        self._caches = caches
        self._builder = builder
        self._inputs = inputs
        self._rows = inputs.rows
        self._sampler = sampler
        self._pooler = pooler
        self._sampling_rows = sampling_rows
        self._device = self._rows.last_tokens.device
        self._host_tokens = HostTokens(len(inputs.sampled), self._device)
        self._sampling: dict[int, Sampling] = {}
        """Of admitted rows."""
        self._host_rows: set[int] = set()
        self._eager_rows: set[int] = set()
        """Rows that the device samples, but no graph: with logprobs."""
        builder.last_tokens = self._rows.last_tokens

    def update(self, plan: StepPlan) -> None:
        """Applies a plan to the rows, before its step. Every plan, whatever samples it."""
        for row in plan.left_rows:
            self._sampler.state.release(row)
        for new in plan.admitted:
            self._admit(new)
        self._rows.update(plan)

    def can_launch(self, plan: StepPlan) -> bool:
        """See `StepQueue`."""
        obstacle = self._obstacle(plan)
        if obstacle is not None:
            self.obstacles[obstacle] += 1
        return obstacle is None

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """See `StepQueue`."""
        self.num_launched += 1
        started = mark_time(self._device)
        sampled = self._compute(plan)
        if self._peers.rank:
            return None
        rows = [self._sampling_rows[plan.rows[request]] for request, _ in plan.draws]
        return PendingStep(plan, sampled, rows, self._device, started)

    def record(self, plan: StepPlan, result: StepResult | None) -> None:
        """Stores the tokens of a step that the host sampled as last tokens of their rows."""
        if not plan.draws:
            return
        last = np.frombuffer(bytearray(self._peers.broadcast(_last_tokens(plan, result))), np.int32)
        drawn = [plan.rows[request] for request, _ in plan.draws]
        self._rows.record(*upload((last, np.asarray(drawn, np.int32)), self._device))
        for row in drawn:
            if row not in self._host_rows and has_penalties(self._sampling[row]):
                self._host_rows.add(row)

    def _compute(self, plan: StepPlan) -> SampledTensors:
        if self._replay(plan):
            if self._peers.rank:
                return SampledTensors(tokens=None)
            return SampledTensors(tokens=self._host_tokens.store(self._inputs.sampled[: len(plan.rows)]))
        hidden = self._model.hidden(self._builder.tensors(plan), self._caches)
        sampled = SampledTensors(tokens=None)
        if plan.draws:
            logits = self._model.logits(hidden[: len(plan.draws) + sum(plan.depths)])
            sampled = self._sample(plan, all_gather_logits(self._model, logits, self._peers))
        pooled = self._pooler.pool(plan, self._builder.params, hidden) if not self._peers.rank else NO_VECTORS
        return replace(sampled, pooled=pooled)

    def _admit(self, new: NewRow) -> None:
        self._sampling[new.row] = new.sampling
        self._host_rows.discard(new.row)
        self._eager_rows.discard(new.row)
        if not self._sampler.state.admit(new):
            self._host_rows.add(new.row)
        elif new.sampling.logprobs is not None or any(image.stop >= new.num_prompt for image in new.images):
            self._eager_rows.add(new.row)  # a graph embeds the last prompt token as a token
        elif new.position_shift or any(image.shift for image in new.images):
            self._eager_rows.add(new.row)  # a graph takes the index of a token for its position

    def _replay(self, plan: StepPlan) -> bool:
        """Returns whether a graph computes the step; its tokens are then in `DecodeInputs.sampled`."""
        obstacle = decode_obstacle(plan)
        if obstacle is None and not self._eager_rows.isdisjoint(plan.rows):
            obstacle = "sampling"
        is_adapted = self._builder.has_adapters and any(self._builder.params[row].adapter for row in plan.rows)
        graphs = self.adapted_graphs if is_adapted else self.graphs
        if obstacle is None and graphs.run(len(plan.rows)) is None:
            obstacle = "size"
        if obstacle is not None:
            self.graph_obstacles[obstacle] += 1
        return obstacle is None

    def _obstacle(self, plan: StepPlan) -> StepObstacle | None:
        drawn = [plan.rows[request] for request, _ in plan.draws]
        if any(path.is_drafted for path in plan.paths):
            return "draft passes"
        if not self._host_rows.isdisjoint(drawn):
            return "host rows"
        if prompt_logprob_ranges(plan, self._builder.params):
            return "prompt logprobs"
        if plan.paths and any(has_penalties(self._sampling[row]) for row in drawn):
            return "penalties with drafts"  # `verify_drafts` counts no tokens
        if len(drawn) + sum(plan.depths) > len(self._sampler.workspace.thresholds):
            return "draws"
        return None

    def _sample(self, plan: StepPlan, logits: Tensor) -> SampledTensors:
        """logits: [draws and draft tokens, vocabulary]."""
        device, paths = logits.device, paths_of_draws(plan) if plan.paths else []
        drawn = [plan.rows[request] for request, _ in plan.draws]
        drafts = [*_draft_arrays(paths), np.asarray(drawn, np.int32)] if paths else []
        rows_of_nodes, indices, *uploaded = upload((*_draw_nodes(plan, paths), *drafts), device)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
        sampler = self._sampler
        sample_rows(logits, rows_of_nodes, indices, sampler.state, tokens, workspace=sampler.workspace, is_final=not paths)
        tops = [top for row in drawn if (top := self._sampling[row].logprobs) is not None]
        logprobs = token_logprobs(logits, tokens, max(tops)) if tops else None
        if not paths:
            return SampledTensors(tokens=tokens, logprobs=logprobs)
        draft_tokens, parents, gathered, rows = uploaded
        sampled = tokens.index_select(0, gathered.reshape(-1)).view_as(gathered)
        runs = verify_drafts(draft_tokens, sampled, rows, self._rows.last_tokens, parents)
        return SampledTensors(tokens=tokens, logprobs=logprobs, runs=runs)


def _last_tokens(plan: StepPlan, result: StepResult | None) -> bytes | None:
    """Returns the last token of each draw, int32."""
    if result is None:
        return None
    lengths = result.run_lengths or [1] * len(plan.draws)
    return bytes(np.asarray(result.tokens, np.int32)[np.cumsum(lengths) - 1])


def _draw_nodes(plan: StepPlan, paths: list[DraftedPath]) -> tuple[Array, Array]:
    """Returns row and output index of each logits row, [n] int32 each."""
    rows, indices = list[int](), list[int]()
    for at, (request, index) in enumerate(plan.draws):
        tree = tuple(paths[at].parents or chain(len(paths[at].tokens))) if paths else ()
        rows += [plan.rows[request]] * (1 + len(tree))
        indices += [index, *(index + 1 + level for level in levels(tree))]
    return np.asarray(rows, np.int32), np.asarray(indices, np.int32)


def _draft_arrays(paths: list[DraftedPath]) -> tuple[Array, Array, Array]:
    """Returns the draft tokens of all draws, their parents, and the logits rows after them.

    tokens: [draws, nodes], -1 past the draft tokens of a draw. parents: [draws, nodes] int32. Logits rows: [draws, nodes + 1],
    after the own tokens and after each node; any row past them.
    """
    nodes = max(len(path.tokens) for path in paths)
    tokens = np.full((len(paths), nodes), -1, np.int64)
    parents = np.full((len(paths), nodes), -1, np.int32)
    gathered = np.zeros((len(paths), nodes + 1), np.int64)
    first = 0
    for at, path in enumerate(paths):
        size = len(path.tokens)
        tokens[at, :size] = path.tokens
        parents[at, :size] = path.parents or chain(size)
        gathered[at, : size + 1] = np.arange(first, first + size + 1)
        first += size + 1
    return tokens, parents, gathered
