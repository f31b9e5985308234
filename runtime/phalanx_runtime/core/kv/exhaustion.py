"""Predicts how many steps remain until the page pool is exhausted.

    E[remaining] = max(mean output - generated, generated / 2), at most what max_tokens allows; all of that before the first mean

Each running request fills a slot per step, new requests as many as recently; a finished request frees its pages. Requests
expected to finish earlier are no preemption candidates. Pure: O(running log running).
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """A running request."""

    rest: float
    """Expected remaining steps."""
    slots: int
    """Slots that it fills now and frees at its end."""


def expected_remaining_steps(generated: int, most: int, mean_output: float) -> float:
    """Returns the expected remaining output tokens of a request, at most `most`; `mean_output` 0 means unknown."""
    if not mean_output:
        return float(most)
    return min(float(most), max(mean_output - generated, generated / 2))


def steps_to_full(free_slots: float, going: Iterable[RunningEstimate], newcomer_slots: float = 0.0) -> float | None:
    """Returns the steps until no slot is free, if the pool is exhausted before requests finish.

    newcomer_slots: slots that new requests fill per step.
    """
    left = sorted(going, key=lambda one: one.rest)
    at = 0.0
    for place, one in enumerate(left):
        rate, lasts = len(left) - place + newcomer_slots, one.rest - at
        if free_slots < rate * lasts:
            return at + free_slots / rate
        free_slots += one.slots + one.rest - rate * lasts  # with the slots filled until then
        at = one.rest
    return None
