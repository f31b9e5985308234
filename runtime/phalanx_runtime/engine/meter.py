"""Who counts what the engine does, and what it is told of a request that is over."""

from dataclasses import dataclass
from typing import Protocol

from phalanx_api import wire


class Meter(Protocol):
    """Counts what the engine does. Times are seconds."""

    def load(self, load: wire.Load) -> None:
        """The engine reported its load, or is gone and holds nothing."""
        ...

    def step(self, num_tokens: int) -> None:
        """One step brought this many tokens."""
        ...

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """A request got its first token from this engine."""
        ...

    def queued(self, wait_s: float) -> None:
        """A request was given to a step for the first time, so long after it came to the engine."""
        ...

    def next_token(self, gap_s: float) -> None:
        """A request got another token."""
        ...

    def ended(self, end: "Ended") -> None:
        """A request is over."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that is over. `reason`: stop, length, abort (nobody wants it any more), moved (it runs in another group), or
    error (refused, or engine lost)."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    latency_s: float
    decode_s: float
    """From the first token to the last; 0 without a second one."""
