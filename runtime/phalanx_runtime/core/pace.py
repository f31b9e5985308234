"""How fast requests gain tokens where a step may give each several: tokens of a decode in a step, and what that is worth in time.

    tokens_per_step = tokens that decodes gained / decodes                                     1 without proposals
    speedup         = tokens_per_step / (time of the step / its fitted time without proposals)

Both are followed over about the last twenty steps that had decodes. A step without proposals is as long as its fitted time.
"""

from phalanx_api.cost import StepModel
from phalanx_runtime.core.step_builder import StepBuilder

FOLLOWED = 20
"""How many of the latest values count."""


class MovingAverage:
    """A mean over about the last `FOLLOWED` values; over all of them while they are fewer."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Follows one value."""
        self._count = min(self._count + 1, FOLLOWED)
        self.mean += (value - self.mean) / self._count


class EnginePace:
    """Follows the steps of one engine."""

    def __init__(self) -> None:
        self._gained, self._stretch = MovingAverage(), MovingAverage()

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode gains in a step; at least 1."""
        return max(1.0, self._gained.mean)

    @property
    def speedup(self) -> float:
        """By how much tokens come faster than one in each step without proposals."""
        return self.tokens_per_step / (self._stretch.mean or 1.0)

    def stepped(self, making: StepBuilder, model: StepModel | None, wall_s: float) -> None:
        """A step was computed in this time."""
        gained = [chunk.gained for chunk in making.chunks if chunk.is_decode and chunk.gained]
        if not gained:
            return
        self._gained.add(sum(gained) / len(gained))
        has_proposals = any(chunk.depth for chunk in making.chunks)
        plain_s = model.predict(making.plain) if model is not None and has_proposals else 0.0
        self._stretch.add(max(1.0, wall_s / plain_s) if plain_s > 0 else 1.0)
