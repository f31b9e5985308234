"""When pages run out, given how long running requests are expected to go on: who is gone by then need not leave, and gives back.

    E[rest] = max(mean output - generated, generated / 2), at most what max_tokens allows; all that it allows before any mean

Each running request fills a slot a step, newcomers take what they took lately; a request that ends gives its pages back.
Pure: one look costs O(running log running).
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """A running request: steps that it is expected to go on, and the slots that it fills now and gives back then."""

    rest: float
    slots: int


def expected_remaining_steps(generated: int, most: int, mean_output: float) -> float:
    """Output tokens still to come of a request that has so many and may have `most` more; `mean_output` 0: none is known."""
    if not mean_output:
        return float(most)
    return min(float(most), max(mean_output - generated, generated / 2))


def steps_to_full(free_slots: float, going: Iterable[RunningEstimate], newcomer_slots: float = 0.0) -> float | None:
    """After how many steps no slot is free; None when requests end early enough, or nothing runs.

    newcomer_slots: what requests that begin take, a step.
    """
    left = sorted(going, key=lambda one: one.rest)
    at = 0.0
    for place, one in enumerate(left):
        rate, lasts = len(left) - place + newcomer_slots, one.rest - at
        if free_slots < rate * lasts:
            return at + free_slots / rate
        free_slots += one.slots + one.rest - rate * lasts  # what it filled until then comes back too
        at = one.rest
    return None
