"""Bounds the time of a step before it counts as hung.

    bound = max(10 s, 5 x expected)      expected: by the fitted step-time function (`phalanx_api.cost`), before the fit the
                                         longest of recent steps of the same form

Steps of one form have a similar number of tokens and a similar context. The first steps of a form may compile kernels or touch
memory for the first time, so their bound is at least `FIRST_BOUND_S`, or `NEW_FORM_BOUND_S` after the fit. Pure: times are
arguments.
"""

from dataclasses import dataclass

from phalanx_api.cost import hung_after_s
from phalanx_runtime.core.step_plan import StepPlan

FIRST_BOUND_S = 300.0
"""Bound of a form's first steps before the fit: a hang is detected late, a compilation is not taken for a hang."""
NEW_FORM_BOUND_S = 60.0
"""The same after the fit: the process and its libraries are warm."""
ENOUGH_STEPS = 3
FADE = 0.95
"""Decay per step of a form's longest time: one slow step is forgotten after some dozens."""

Form = tuple[int, int]


def form_of(plan: StepPlan) -> Form:
    """Returns the powers of two of a step's tokens and of their context."""
    context = sum(plan.starts) + sum(plan.counts)
    return sum(plan.counts).bit_length(), context.bit_length()


@dataclass(slots=True)
class _Seen:
    steps: int = 0
    longest_s: float = 0.0


class StepTimes:
    """Times of past steps, by form."""

    def __init__(self) -> None:
        self._seen: dict[Form, _Seen] = {}

    def bound_s(self, form: Form, expected_s: float | None = None) -> float:
        """Returns the seconds after which a step of this form counts as hung. `expected_s`: by the fitted function, if fitted."""
        seen = self._seen.get(form)
        first_s = FIRST_BOUND_S if expected_s is None else NEW_FORM_BOUND_S
        if expected_s is None and seen is not None:
            expected_s = seen.longest_s
        bound_s = hung_after_s(expected_s)
        is_known = seen is not None and seen.steps >= ENOUGH_STEPS
        return bound_s if is_known else max(first_s, bound_s)

    def took(self, form: Form, wall_s: float) -> None:
        """Records the time of a step of this form."""
        seen = self._seen.setdefault(form, _Seen())
        seen.steps += 1
        seen.longest_s = max(wall_s, FADE * seen.longest_s)
