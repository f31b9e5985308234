"""Builds the flight recorder's entries of a step."""

from dataclasses import dataclass

from phalanx_api.flight.entries import EngineStep, RankStep
from phalanx_runtime.core.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Requests and pages of an engine at one time."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int


def rank_step(plan: StepPlan, started: float, at: float, *, waited_s: float) -> RankStep:
    """Returns the entry of a rank. `at`: end; `waited_s`: waits for copies, part of the time."""
    loads = [is_load for copies in (plan.host_copies, plan.part_host_copies) for is_load, _, _ in copies]
    return RankStep(
        at=at,
        step=plan.step,
        seconds=at - started,
        tokens=len(plan.tokens),
        requests=len(plan.rows),
        loads=sum(loads),
        stores=len(loads) - sum(loads),
        copies=len(plan.copies) + len(plan.part_copies),
        waited_s=waited_s,
    )


def engine_step(
    plan: StepPlan,
    result: StepResult,
    *,
    at: float,
    seconds: float,
    expected_s: float | None,
    occupancy: Occupancy,
) -> EngineStep:
    """Returns the entry of an engine. `occupancy`: before the result is applied."""
    draft_tokens = sum(path.depth for path in plan.paths)
    num_requests, num_own = len(plan.rows), len(plan.tokens) - draft_tokens
    decodes = num_requests if num_own == num_requests else _num_decodes(plan)
    return EngineStep(
        at=at,
        step=plan.step,
        seconds=seconds,
        expected_s=expected_s,
        decodes=decodes,
        prefill_tokens=num_own - decodes,
        draft_tokens=draft_tokens,
        running=occupancy.running,
        waiting=occupancy.waiting,
        free_pages=occupancy.free_pages,
        total_pages=occupancy.total_pages,
        loaded_pages=result.loaded_pages + result.loaded_parts,
        load_s=result.load_s + result.part_load_s,
    )


def _num_decodes(plan: StepPlan) -> int:
    """Requests with one own token after computed ones."""
    depth_of = {path.request: path.depth for path in plan.paths}
    chunks = enumerate(zip(plan.starts, plan.counts, strict=True))
    return sum(count == 1 + depth_of.get(request, 0) and start > 0 for request, (start, count) in chunks)
