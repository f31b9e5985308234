"""Measures the speedup of decodes by speculation.

tokens_per_step = tokens of decodes / decodes
speedup         = tokens_per_step / (step time / its fitted time without draft tokens)
"""

from phalanx_api.cost import StepModel
from phalanx_runtime.core.step_builder import StepBuilder

WINDOW = 20
"""Recent values in a mean."""


class MovingAverage:
    """Mean of about the last `WINDOW` values; of all while they are fewer."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Adds one value."""
        self._count = min(self._count + 1, WINDOW)
        self.mean += (value - self.mean) / self._count


class EnginePace:
    """Decoding speed of one engine."""

    def __init__(self) -> None:
        self._num_gained, self._stretch = MovingAverage(), MovingAverage()

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode and step; at least 1."""
        return max(1.0, self._num_gained.mean)

    @property
    def speedup(self) -> float:
        """Token rate relative to decoding without draft tokens."""
        return self.tokens_per_step / (self._stretch.mean or 1.0)

    def record_step(self, builder: StepBuilder, model: StepModel | None, wall_s: float) -> None:
        """Records a finished step."""
        gained = [chunk.num_gained for chunk in builder.chunks if chunk.is_decode and chunk.num_gained]
        if not gained:
            return
        self._num_gained.add(sum(gained) / len(gained))
        has_drafts = any(chunk.draft.depth for chunk in builder.chunks)
        plain_s = model.predict(builder.plain_work) if model is not None and has_drafts else 0.0
        self._stretch.add(max(1.0, wall_s / plain_s) if plain_s > 0 else 1.0)
