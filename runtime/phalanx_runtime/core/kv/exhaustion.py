"""Predicts how many steps remain until the page pool is exhausted.

    E[remaining] = max(mean output - generated, generated / 2), bounded by max_tokens

A running request fills one slot per step and frees all at its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """A running request."""

    remaining_steps: float
    """Expected decode steps until the request ends."""
    slots: int
    """Freed at its end."""


def expected_remaining_steps(generated: int, max_remaining: int, mean_output: float) -> float:
    """Returns the expected remaining output tokens. `mean_output` 0: unknown."""
    if not mean_output:
        return float(max_remaining)
    return min(float(max_remaining), max(mean_output - generated, generated / 2))


def steps_to_full(free_slots: float, running: Iterable[RunningEstimate], new_slots_per_step: float = 0.0) -> float | None:
    """Returns the steps until no slot is free, unless all requests finish before. O(n log n)."""
    by_end = sorted(running, key=lambda request: request.remaining_steps)
    step = 0.0
    for num_finished, request in enumerate(by_end):
        rate, duration = len(by_end) - num_finished + new_slots_per_step, request.remaining_steps - step
        if free_slots < rate * duration:
            return step + free_slots / rate
        free_slots += request.slots + request.remaining_steps - rate * duration  # with the slots filled until then
        step = request.remaining_steps
    return None
