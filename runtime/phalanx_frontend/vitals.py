"""What a door tells of the engine behind it, at /v1/health and /v1/metrics. The runtime and the router each implement it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx_api.account import MemoryAccount


@dataclass(frozen=True, slots=True)
class RankHealth:
    """One rank: whether its process lives, and how long its heartbeat has been silent (None: it has never spoken)."""

    rank: int
    alive: bool
    silent_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether this process can mend itself, and whether requests are served. `not_alive`, `not_ready`: why not, or None."""

    not_alive: str | None = None
    not_ready: str | None = None
    incarnation: int | None = None
    ranks: Sequence[RankHealth] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start of this process: requests that ended, and what they were given.

    proposed, accepted: tokens that were proposed, and those of them that were drawn too; at a router by the engines behind it,
    since each of them started.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    proposed: int = 0
    accepted: int = 0


class Vitals(Protocol):
    """What the door asks when somebody asks it. All calls return at once."""

    def health(self) -> Health:
        """The state of the process and of the ranks that it knows."""
        ...

    def totals(self) -> Totals:
        """What was served, by whichever door it came."""
        ...

    def memory(self) -> Sequence[MemoryAccount]:
        """The account of each rank that has told one."""
        ...

    def kv_bytes_per_token(self) -> int | None:
        """Bytes of one token in the KV caches of all ranks of a group; None while no group has told."""
        ...
