"""Interface of the engine's metrics."""

from dataclasses import dataclass
from typing import Protocol

from phalanx_api import wire


class EngineMeter(Protocol):
    """Receives measurements of the engine client. Times are in seconds."""

    def load(self, load: wire.Load) -> None:
        """The engine reported its load, or has ended (an empty report)."""
        ...

    def step(self, num_tokens: int) -> None:
        """One step produced `num_tokens` tokens."""
        ...

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """A request got its first token, `wait_s` after submission."""
        ...

    def queued(self, wait_s: float) -> None:
        """A request entered a step for the first time, `wait_s` after its arrival at the engine."""
        ...

    def next_token(self, gap_s: float) -> None:
        """A request got another token, `gap_s` after the previous one."""
        ...

    def ended(self, end: "EndedRequest") -> None:
        """A request ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """One ended request."""

    reason: str
    """stop, length, abort (not wanted any more), moved (runs in another group), or error (refused, or engine lost)."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    latency_s: float
    decode_s: float
    """From the first token to the last; 0 for a single token."""
