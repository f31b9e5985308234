"""How much of its devices an engine uses: time in steps, and shares of copy and matmul rate, over the last seconds."""

import math
from dataclasses import dataclass

from phalanx_api.roofline import ModelShape, Roofline, StepDemand, step_demand
from phalanx_runtime.core.step_plan import StepPlan

WINDOW_S = 5.0
"""Older steps weigh less: e-fold after this time."""


def plan_demand(shape: ModelShape, plan: StepPlan) -> StepDemand:
    """Returns what a step must read and compute, with draft tokens."""
    chunks = list(zip(plan.starts, plan.counts, strict=True))
    return step_demand(
        shape,
        tokens=len(plan.tokens),
        num_logits=len(plan.draws) + sum(plan.depths),
        keys_read=sum(start + count for start, count in chunks),
        token_keys=sum(count * (start + (count + 1) / 2) for start, count in chunks),
    )


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares from 0 to 1; 0 too where rates or sizes are unknown."""

    busy: float = 0.0
    bandwidth: float = 0.0
    flops: float = 0.0


class UtilizationMeter:
    """Sums over recent steps. `roofline`: without it only busy times are known."""

    __slots__ = ("_bandwidth_s", "_busy_s", "_elapsed_s", "_flops_s", "_last_s", "_roofline", "_wall_s")

    def __init__(self, roofline: Roofline | None = None) -> None:
        self._roofline = roofline
        self._last_s: float | None = None
        self._elapsed_s = self._wall_s = self._busy_s = self._bandwidth_s = self._flops_s = 0.0

    def add(self, plan: StepPlan, wall_s: float, busy_s: float, now: float) -> None:
        """Adds a step that ended now. `busy_s`: time of the device, at most the step's."""
        self._advance(now, wall_s)
        self._wall_s += wall_s
        self._busy_s += min(busy_s, wall_s)
        if self._roofline is not None:
            bandwidth, flops = self._roofline.utilization(plan_demand(self._roofline.shape, plan), 1.0)
            self._bandwidth_s += bandwidth  # seconds that the step takes at the full rate
            self._flops_s += flops

    def utilization(self, now: float, is_idle: bool = False) -> Utilization:
        """Returns the shares now; of an idle engine zeros."""
        self._advance(now)
        if is_idle or not self._wall_s:
            return Utilization()
        busy = self._busy_s / max(self._elapsed_s, self._wall_s)
        return Utilization(min(1.0, busy), self._bandwidth_s / self._wall_s, self._flops_s / self._wall_s)

    def _advance(self, now: float, wall_s: float = 0.0) -> None:
        elapsed_s = wall_s if self._last_s is None else max(0.0, now - self._last_s)
        factor = math.exp(-elapsed_s / WINDOW_S)
        self._elapsed_s = self._elapsed_s * factor + WINDOW_S * (1 - factor)
        self._wall_s, self._busy_s = self._wall_s * factor, self._busy_s * factor
        self._bandwidth_s, self._flops_s = self._bandwidth_s * factor, self._flops_s * factor
        self._last_s = now


def computing_s(wall_s: float, copy_wait_s: float, busy_s: float) -> float:
    """Returns the part of a step's time that computes, which the cost model learns from.

    copy_wait_s: time of the host in waits for copies. busy_s: of the device's own computation, which may overlap with a wait.
    """
    return max(wall_s - copy_wait_s, min(busy_s, wall_s))
