"""Pools hidden states of prompts into vectors, on the sampling rank, in float32.

    mean    sum over all prompt tokens, across the steps that compute them, divided by their number
    last    the last prompt token
    cls     the first prompt token

A request starts again at position 0 after a preemption, and its state with it. A step that is taken back leaves no state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_api.wire import Pooling
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.protocol import Model


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The tokens of one pooled request in a step."""

    request: int
    """Index into the plan's `rows`."""
    row: int
    pooling: Pooling
    start: int
    end: int
    num_prompt: int

    @property
    def positions(self) -> range:
        """Positions whose hidden states count."""
        match self.pooling:
            case "mean":
                return range(self.start, self.end)
            case "last":
                return range(max(self.start, self.num_prompt - 1), self.end)
            case "cls":
                return range(self.start, min(self.end, 1))

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == self.num_prompt


def pooled_chunks(plan: StepPlan, rows: Mapping[int, NewRow]) -> list[PooledChunk]:
    """Returns the chunks of pooled requests. `rows` includes admitted ones."""
    return [
        PooledChunk(request, row, pooling, start=start, end=start + count, num_prompt=rows[row].num_prompt)
        for request, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True))
        if (pooling := rows[row].pooling) is not None
    ]


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """Vectors of the prompts that end in a step."""

    requests: Sequence[int] = ()
    """Indices into the plan's `rows`."""
    vectors: Tensor | None = None
    """[requests, hidden] float32; absent if there are none."""

    def queue_copy(self) -> "PooledVectors":
        """Queues a copy to the host, complete when the device has computed it."""
        if self.vectors is None:
            return self
        return PooledVectors(self.requests, self.vectors.to("cpu", non_blocking=True, copy=True))

    def encode(self) -> list[tuple[int, bytes]]:
        """Returns `StepResult.vectors`. Waits for the device."""
        if self.vectors is None:
            return []
        rows = self.vectors.cpu().numpy().astype("<f4", copy=False)
        return [(request, row.tobytes()) for request, row in zip(self.requests, rows, strict=True)]


NO_VECTORS = PooledVectors()


class Pooler:
    """State of the pooled requests in progress, by row."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sums: dict[int, Tensor] = {}

    def pool(self, plan: StepPlan, rows: Mapping[int, NewRow], hidden: Tensor | None) -> PooledVectors:
        """Adds the step's hidden states and returns the vectors of prompts that end here. `rows` includes admitted ones.

        hidden: of the model, in this step. Must follow all other work of the step that may
        lack memory: a repeated step must find the state as before.
        """
        chunks = pooled_chunks(plan, rows)
        if hidden is None or not chunks:
            return NO_VECTORS
        sums, vectors = dict[int, Tensor](), list[Tensor]()
        states = self._model.pooled_states(hidden)
        first = len(states) - sum(len(chunk.positions) for chunk in chunks)
        for chunk in chunks:
            end = first + len(chunk.positions)
            total = self._sums.get(chunk.row) if chunk.start else None
            if end > first:
                added = states[first:end].sum(0, dtype=torch.float32)
                total = sums[chunk.row] = added if total is None else total + added
            first = end
            if chunk.is_last:
                assert total is not None, "an earlier chunk had the first position"
                vectors.append(total / chunk.num_prompt if chunk.pooling == "mean" else total)
        pooled = PooledVectors([chunk.request for chunk in chunks if chunk.is_last], torch.stack(vectors) if vectors else None)
        self._sums |= sums
        for chunk in chunks:
            if chunk.is_last:
                self._sums.pop(chunk.row, None)
        return pooled
