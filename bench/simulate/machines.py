"""Which machine a group is: the analytic one of balancing.md 4.3, or the one that `bench.engine.step_fit` measured.

Loads, targets and the beat of balancing are made for the analytic one. A machine that was measured keeps the proportions of its
costs, and its times are divided by one number, so that a full step takes as long as there. Loads come to it at the rate at which
they are as many groups' worth of work, as the operator reckons it (`decide.demand`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.engine.step_grid import read_model
from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.traffic import sped_up
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import GroupCapacity, OfferedLoad, Targets, busy_groups
from phalanx_router.routing.look import scale_model

ANALYTIC = StepModel(fixed_s=0.003, token_s=0.00012, knee_tokens=142, context_s=0.068e-6, attention_s=0.0)
"""A 32B model on one H200: 3 ms, 17 ms of weights, 0.12 ms a prompt token, 0.068 us a token of context (balancing.md 4.3)."""
TOKENS, SCARCE_TOKENS = 200_000, 120_000
"""What the pages of a group hold; where they are to be scarce."""
STEP_TOKENS = 1024
COPY_BYTES_PER_S = 1e9
"""What copies of pages reach between groups that were measured, before their times are divided."""
TTFT_TARGET_S, ITL_TARGET_S = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """What a group is made of, and what is known of it: whose steps they are, and how well the function foretells them."""

    model: StepModel = ANALYTIC
    step_tokens: int = STEP_TOKENS
    token_bytes: int = 262_144
    copy_bytes_per_s: float = 25e9
    about: str = "the analytic cost function of a 32B model on one H200"

    def shape(self, tokens: int) -> Shape:
        """A group with pages for so many tokens."""
        return Shape(
            self.model,
            tokens // 16,
            max_num_batched_tokens=self.step_tokens,
            token_bytes=self.token_bytes,
            copy_bytes_per_s=self.copy_bytes_per_s,
        )


def read_machine(path: Path | None) -> Machine:
    """The analytic machine, or that of a file that `bench.engine.step_fit` wrote. Raises ValueError for another file."""
    if path is None:
        return Machine()
    model, told = read_model(path), json.loads(path.read_text())
    full = StepWork(STEP_TOKENS, 0, STEP_TOKENS, STEP_TOKENS**2 / 2)
    faster = model.predict(full) / ANALYTIC.predict(full)
    try:
        token_bytes, held = told["page_bytes"] // told["page_size"], told["errors"]["held_out"]
        about = (
            f"the steps of {told['model']} on {told['threads']} thread(s) of {told['device']}, times divided by {faster:.1f}; "
            f"of {held['num_points']} steps, each held out once, the function is off by {held['median']:.1%} (median), "
            f"{held['p95']:.1%} (p95)"
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not tell how it was measured: {error!r}") from error
    return Machine(scale_model(model, 1 / faster), STEP_TOKENS, token_bytes, faster * COPY_BYTES_PER_S, about)


def as_heavy(arrivals: Sequence[Arrival], machine: Machine, tokens: int) -> list[Arrival]:
    """The load at the rate at which it is as much work for this machine as it was for the analytic one."""
    usual = Machine()
    return (
        sped_up(arrivals, _busy(arrivals, usual, tokens) / _busy(arrivals, machine, tokens))
        if machine != usual
        else list(arrivals)
    )


def _busy(arrivals: Sequence[Arrival], machine: Machine, tokens: int) -> float:
    """Groups' worth of work in one such request a second. No cache holds any of it."""
    prompts, outputs = [one.input_tokens for one in arrivals], [one.output_tokens for one in arrivals]
    squared = fmean(prompt * prompt for prompt in prompts)
    shape = Traffic(
        window_s=60.0,
        arrivals=len(arrivals),
        prompt=fmean(prompts),
        prompt_squared=squared,
        missed=fmean(prompts),
        output=fmean(outputs),
    )
    ability = GroupCapacity(machine.model, 1.0, tokens, machine.step_tokens)
    return busy_groups(OfferedLoad(1.0, shape, 0.0, 0.0), ability, Targets(TTFT_TARGET_S, ITL_TARGET_S))
