"""Measures the speed of decodes with speculation: tokens per decode and step, and the speedup in time.

    tokens_per_step = tokens of decodes / decodes                                              1 without draft tokens
    speedup         = tokens_per_step / (time of the step / its fitted time without draft tokens)

Both are means over about the last twenty steps with decodes. A step without draft tokens takes its fitted time.
"""

from phalanx_api.cost import StepModel
from phalanx_runtime.core.step_builder import StepBuilder

FOLLOWED = 20
"""Number of recent values in a mean."""


class MovingAverage:
    """Mean over about the last `FOLLOWED` values; over all while they are fewer."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Adds one value."""
        self._count = min(self._count + 1, FOLLOWED)
        self.mean += (value - self.mean) / self._count


class EnginePace:
    """Speed of one engine."""

    def __init__(self) -> None:
        self._gained, self._stretch = MovingAverage(), MovingAverage()

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode gains per step; at least 1."""
        return max(1.0, self._gained.mean)

    @property
    def speedup(self) -> float:
        """Ratio of the token rate to that of one token per step without draft tokens."""
        return self.tokens_per_step / (self._stretch.mean or 1.0)

    def stepped(self, making: StepBuilder, model: StepModel | None, wall_s: float) -> None:
        """Records the time of a step."""
        gained = [chunk.gained for chunk in making.chunks if chunk.is_decode and chunk.gained]
        if not gained:
            return
        self._gained.add(sum(gained) / len(gained))
        has_proposals = any(chunk.depth for chunk in making.chunks)
        plain_s = model.predict(making.plain) if model is not None and has_proposals else 0.0
        self._stretch.add(max(1.0, wall_s / plain_s) if plain_s > 0 else 1.0)
