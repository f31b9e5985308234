"""A request in the simulated fleet."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Job:
    """A request, its progress, and what its client received."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks; equal ids are equal text
    generated: int = 0  # tokens that the client received
    computed: int = 0  # tokens in pages, before it decodes
    first_s: float | None = None  # arrival of the first token
    last_s: float = 0.0  # arrival of the latest token
    longest_gap_s: float = 0.0
    ended_s: float | None = None
    missed: int = 0  # prompt tokens that no cache had
    preemptions: int = 0
    moves: int = 0
    moved_s: float | None = None
    last_source: str = ""  # group that it left last
    handle: int = 0
    shared_blocks: list[int] = field(default_factory=list)
    """Cached blocks that it shares or has published."""
    own_pages: int = 0
    since_step: int = 0
    """As a decode: number of the group's step that samples its next token after `base` tokens of context."""
    base: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that must be in pages before the next one is sampled."""
        return self.prompt_tokens + self.generated

    def receive(self, times: Times) -> None:
        """Records tokens that arrive at these times."""
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
