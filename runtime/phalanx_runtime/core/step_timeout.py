"""Time after which a step counts as hung.

    timeout = max(10 s, 5 x expected)      expected: by the cost model; before its fit, the longest recent step of the form

A form is a magnitude of tokens, context and tiles of images. Its first steps may compile kernels, so they have a minimum. A tile
adds 10 s: its image may be encoded or not, whatever earlier steps did.
"""

from dataclasses import dataclass

from phalanx_api.cost import hang_timeout_s
from phalanx_runtime.core.step_plan import StepPlan

FIRST_BOUND_S = 300.0
"""Minimum before the fit."""
NEW_FORM_BOUND_S = 60.0
"""Minimum after the fit."""
ENOUGH_STEPS = 3
"""Steps after which the minimum ends."""
TILE_BOUND_S = 10.0
"""A tile of the largest towers takes about as long on one slow core."""
DECAY = 0.95
"""Decay of a form's longest time per step."""

Form = tuple[int, int, int]


def form_of(plan: StepPlan) -> Form:
    """Returns the powers of two of a step's tokens, of their context and of its tiles of images."""
    context = sum(plan.starts) + sum(plan.counts)
    return sum(plan.counts).bit_length(), context.bit_length(), plan.image_tiles.bit_length()


@dataclass(slots=True)
class _FormTimes:
    num_steps: int = 0
    longest_s: float = 0.0


class StepTimes:
    """Times of past steps by form."""

    def __init__(self) -> None:
        self._times: dict[Form, _FormTimes] = {}

    def bound_s(self, form: Form, expected_s: float | None = None) -> float:
        """Returns the timeout of a step. `expected_s`: time by the cost model, once fitted."""
        times = self._times.get(form)
        first_s = FIRST_BOUND_S if expected_s is None else NEW_FORM_BOUND_S
        if expected_s is None and times is not None:
            expected_s = times.longest_s
        bound_s = hang_timeout_s(expected_s)
        is_known = times is not None and times.num_steps >= ENOUGH_STEPS
        most_tiles = (1 << form[2]) - 1
        return (bound_s if is_known else max(first_s, bound_s)) + TILE_BOUND_S * most_tiles

    def record(self, form: Form, wall_s: float) -> None:
        """Records the time of a finished step."""
        times = self._times.setdefault(form, _FormTimes())
        times.num_steps += 1
        times.longest_s = max(wall_s, DECAY * times.longest_s)
