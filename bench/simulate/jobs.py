"""One request in the simulated fleet: what it is, where it stands, and what its client saw."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Job:
    """A request. `blocks`: ids of the parts that its prompt is made of, the first first; equal ids are equal text.

    generated, first_s, last_s, longest_gap_s: tokens that its client has, when the first and the last came, the longest pause
    between two. computed: tokens of it in the pages of its group, while it is no decode. missed: prompt tokens that no cache had.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    generated: int = 0
    computed: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    ended_s: float | None = None
    missed: int = 0
    preemptions: int = 0
    moves: int = 0
    moved_s: float | None = None
    left: str = ""
    handle: int = 0
    held: list[int] = field(default_factory=list)
    """Blocks whose cached pages it shares or has published."""
    own_pages: int = 0
    since_step: int = 0
    """As a decode: the step of its group that draws its next token but one after `base` tokens of context."""
    base: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that must be in pages before the next one is drawn: prompt and output."""
        return self.prompt_tokens + self.generated

    def saw(self, times: Times) -> None:
        """Its client got a token at each of these times."""
        if not len(times):
            return
        if self.first_s is None:
            self.first_s = float(times[0])
        else:
            self.longest_gap_s = max(self.longest_gap_s, float(times[0]) - self.last_s)
        if len(times) > 1:
            self.longest_gap_s = max(self.longest_gap_s, float(np.diff(times).max()))
        self.last_s = float(times[-1])
        self.generated += len(times)
