"""How long a step may take before it counts as hung.

    bound = max(10 s, 5 x expected)      expected: by the fitted step-time function (`phalanx_api.cost`), before there is one
                                         the longest of recent steps of the same form

Steps of one form have about as many tokens and about as much context. The first ones of a form may compile kernels or touch
memory for the first time, so theirs is at least `FIRST_BOUND_S`, or `NEW_FORM_BOUND_S` once times are fitted.
Pure: times are arguments.
"""

from dataclasses import dataclass

from phalanx_api.cost import hung_after_s
from phalanx_runtime.core.step_plan import StepPlan

FIRST_BOUND_S = 300.0
"""Bound of a form's first steps before the fit. One that hangs then is noticed late; one that compiles is not taken for hung."""
NEW_FORM_BOUND_S = 60.0
"""The same where there is a fitted time: the process and its libraries are warm, so that only this form's own can be new."""
ENOUGH_STEPS = 3
FADE = 0.95
"""The longest time of a form counts so much less with each later step: one slow step is forgotten after some dozens."""

Form = tuple[int, int]


def form_of(plan: StepPlan) -> Form:
    """The magnitudes of a step's tokens and of the context that they see, as powers of two."""
    context = sum(plan.starts) + sum(plan.counts)
    return sum(plan.counts).bit_length(), context.bit_length()


@dataclass(slots=True)
class _Seen:
    steps: int = 0
    longest_s: float = 0.0


class StepTimes:
    """The times of steps so far, by form."""

    def __init__(self) -> None:
        self._seen: dict[Form, _Seen] = {}

    def bound_s(self, form: Form, expected_s: float | None = None) -> float:
        """Seconds after which a step of this form counts as hung. `expected_s`: by the fitted function, None before it is one."""
        seen = self._seen.get(form)
        first_s = FIRST_BOUND_S if expected_s is None else NEW_FORM_BOUND_S
        if expected_s is None and seen is not None:
            expected_s = seen.longest_s
        bound_s = hung_after_s(expected_s)
        is_known = seen is not None and seen.steps >= ENOUGH_STEPS
        return bound_s if is_known else max(first_s, bound_s)

    def took(self, form: Form, wall_s: float) -> None:
        """A step of this form ended after so long."""
        seen = self._seen.setdefault(form, _Seen())
        seen.steps += 1
        seen.longest_s = max(wall_s, FADE * seen.longest_s)
