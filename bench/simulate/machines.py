"""The machine of a simulated group: the analytic one, or one that `bench.engine.step_fit` measured.

Loads, targets and balancing intervals are made for the analytic machine. A measured one keeps the proportions of its costs; its
times are divided by one factor, so that a full step takes equally long. Loads are scaled to equal work in groups, as the operator
computes it (`decide.scaling.demand`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.engine.step_grid import read_model
from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.traffic import speed_up
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import GroupCapacity, OfferedLoad, Targets, busy_groups
from phalanx_router.routing.view_builder import scale_model

ANALYTIC = StepModel(fixed_s=0.003, token_s=0.00012, knee_tokens=142, context_s=0.068e-6, attention_s=0.0)
"""A 32B model on one H200: 3 ms, 17 ms of weights, 0.12 ms per prompt token, 0.068 us per token of context."""
TOKENS, SCARCE_TOKENS = 200_000, 120_000
"""Tokens in the pages of a group; the second for loads with scarce pages."""
STEP_TOKENS = 1024
COPY_BYTES_PER_S = 1e9
"""KV transfer rate between measured groups, before their times are divided."""
TTFT_TARGET_S, ITL_TARGET_S = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """Step times and sizes of a group, and their source."""

    model: StepModel = ANALYTIC
    step_tokens: int = STEP_TOKENS
    token_bytes: int = 262_144
    copy_bytes_per_s: float = 25e9
    about: str = "the analytic cost function of a 32B model on one H200"

    def shape(self, tokens: int) -> Shape:
        return Shape(
            self.model,
            tokens // 16,
            max_num_batched_tokens=self.step_tokens,
            token_bytes=self.token_bytes,
            copy_bytes_per_s=self.copy_bytes_per_s,
        )


def read_machine(path: Path | None) -> Machine:
    """Returns the analytic machine, or that of a `bench.engine.step_fit` file. Raises ValueError for another file."""
    if path is None:
        return Machine()
    model, fit = read_model(path), json.loads(path.read_text())
    full = StepWork(STEP_TOKENS, 0, STEP_TOKENS, STEP_TOKENS**2 / 2)
    speedup = model.predict(full) / ANALYTIC.predict(full)
    try:
        token_bytes, errors = fit["page_bytes"] // fit["page_size"], fit["errors"]["held_out"]
        about = (
            f"the steps of {fit['model']} on {fit['threads']} thread(s) of {fit['device']}, times divided by {speedup:.1f}; "
            f"of {errors['num_points']} steps, each held out once, the function is off by {errors['median']:.1%} (median), "
            f"{errors['p95']:.1%} (p95)"
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks fields of the measurement: {error!r}") from error
    return Machine(scale_model(model, 1 / speedup), STEP_TOKENS, token_bytes, speedup * COPY_BYTES_PER_S, about)


def scale_load(arrivals: Sequence[Arrival], machine: Machine, tokens: int) -> list[Arrival]:
    """Rescales the rate so that the load is as much work for this machine as for the analytic one."""
    analytic = Machine()
    return (
        speed_up(arrivals, _work(arrivals, analytic, tokens) / _work(arrivals, machine, tokens))
        if machine != analytic
        else list(arrivals)
    )


def _work(arrivals: Sequence[Arrival], machine: Machine, tokens: int) -> float:
    """Returns the groups' worth of work at one such request per second, without prefix caching."""
    prompts, outputs = [arrival.input_tokens for arrival in arrivals], [arrival.output_tokens for arrival in arrivals]
    squared = fmean(prompt * prompt for prompt in prompts)
    shape = Traffic(
        window_s=60.0,
        arrivals=len(arrivals),
        prompt=fmean(prompts),
        prompt_squared=squared,
        missed=fmean(prompts),
        output=fmean(outputs),
    )
    capacity = GroupCapacity(machine.model, 1.0, tokens, machine.step_tokens)
    return busy_groups(OfferedLoad(1.0, shape, 0.0, 0.0), capacity, Targets(TTFT_TARGET_S, ITL_TARGET_S))
