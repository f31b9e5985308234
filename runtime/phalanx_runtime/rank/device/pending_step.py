"""The result of a queued step: copied to the host after it, read when the engine needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from phalanx_api.wire import TokenDetail
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.rank.sampling.gpu.results import DeviceLogprobs, DeviceRuns
from phalanx_runtime.rank.sampling.logits_processors import NOTHING_LEFT
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.pooling import NO_VECTORS, PooledVectors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTensors:
    """What a step sampled, on the device."""

    tokens: Tensor | None
    """[draws and draft tokens], -1 if no token could be sampled; absent without draws. See `HostTokens` for those of a graph."""
    logprobs: DeviceLogprobs | None = None
    """Of `tokens`, if requested."""
    runs: DeviceRuns | None = None
    """Of the draws, with draft tokens."""
    pooled: PooledVectors = NO_VECTORS


def mark_time(device: torch.device) -> Any:
    """Queues a time stamp of a GPU; `None` on other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class PendingStep:
    """A queued step. A call waits for it and returns its result; further calls return the same."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: SampledTensors,
        rows: Sequence[SamplingRow],
        device: torch.device,
        started: Any = None,
    ) -> None:
        """rows: of the draws. started: `mark_time` before the step. The copies to the host are queued here, so that the tensors
        may change afterwards."""
        self._plan = plan
        self._rows = rows
        self._result: StepResult | None = None
        self._copies = [None if tensor is None else _on_host(tensor) for tensor in _parts(sampled)]
        self._pooled = sampled.pooled.queue_copy()
        self._started = started
        # Without draws too: the step ends when the device has computed it, and its time is that of the device.
        self._event = mark_time(device)

    def __call__(self) -> StepResult:
        """Returns the result; appends the tokens to rows with state."""
        if self._result is None:
            if self._event is not None:
                self._event.synchronize()
            self._result = self._read()
            if self._event is not None and self._started is not None:
                busy_s = self._started.elapsed_time(self._event) / 1e3
                self._result = msgspec.structs.replace(self._result, busy_s=busy_s)
        return self._result

    def _read(self) -> StepResult:
        plan, (tokens, *others) = self._plan, self._copies
        if tokens is None:
            return StepResult(step=plan.step, tokens=[], vectors=self._pooled.encode())
        runs = _runs(tokens.tolist(), others[4:], plan.depths)
        details = self._details(runs, others[:4])
        for row, run in zip(self._rows, runs, strict=True):
            for token in run.tokens if row.has_state else ():
                row.append(token)
        return StepResult(
            step=plan.step,
            tokens=[token for run in runs for token in run.tokens or [0]],
            details=[detail for part in details for detail in part] if any(map(any, details)) else [],
            failed=[(draw, NOTHING_LEFT) for draw, run in enumerate(runs) if not run.tokens],
            run_lengths=[max(1, len(run.tokens)) for run in runs] if plan.paths else [],
            accepted=[
                (draw, run.accepted) for draw, run in enumerate(runs) if run.accepted and run.accepted[-1] >= len(run.accepted)
            ],
            vectors=self._pooled.encode(),
        )

    def _details(self, runs: "Sequence[_Run]", parts: Sequence[Tensor | None]) -> list[list[TokenDetail | None]]:
        """Returns the details of each run's tokens. A failed draw has one without value."""
        logprobs, ranks, top_ids, top_logprobs = (part.tolist() if part is not None else [] for part in parts)
        details: list[list[TokenDetail | None]] = []
        for row, run in zip(self._rows, runs, strict=True):
            top = row.sampling.logprobs
            if top is None or not run.tokens:
                details.append([None] * max(1, len(run.tokens)))
                continue
            details.append(
                [
                    TokenDetail(
                        logprob=logprobs[at], rank=ranks[at], top_ids=top_ids[at][:top], top_logprobs=top_logprobs[at][:top]
                    )
                    for at in run.logits_rows
                ]
            )
        return details


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of one draw."""

    tokens: list[int]
    """Empty if none could be sampled."""
    accepted: list[int]
    logits_rows: list[int]
    """Where each token was sampled."""


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


def _parts(sampled: SampledTensors) -> list[Tensor | None]:
    logprobs, runs = sampled.logprobs, sampled.runs
    return [
        sampled.tokens,
        *([None] * 4 if logprobs is None else [logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs]),
        *([None] * 3 if runs is None else [runs.accepted, runs.tokens, runs.num_tokens]),
    ]


def _runs(tokens: list[int], parts: Sequence[Tensor | None], depths: Sequence[int] = ()) -> list[_Run]:
    accepted, run_tokens, lengths = parts
    if accepted is None or run_tokens is None or lengths is None:
        return [_Run([] if token < 0 else [token], [], [at]) for at, token in enumerate(tokens)]
    runs, first = list[_Run](), 0
    for draw, length in enumerate(lengths.tolist()):
        nodes = [node for node in accepted[draw].tolist() if node >= 0]
        runs.append(_Run(run_tokens[draw, :length].tolist(), nodes, [first, *(first + 1 + node for node in nodes)][:length]))
        first += 1 + depths[draw]
    return runs
