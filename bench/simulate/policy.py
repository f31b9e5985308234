"""The interface between the simulated fleet and its routing policies."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from phalanx_api import wire
from phalanx_router.moves.records import TransferMode

EMPTY_LOAD = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=1)


@dataclass(slots=True)
class SentTotals:
    """The router's requests in one group, counted when it sends and when they end."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests without a first token, cache hits excluded."""
    context_tokens: int = 0


@dataclass(slots=True)
class GroupState:
    """One group as of its latest report."""

    load: wire.Load = EMPTY_LOAD
    at_s: float = 0.0
    sent: SentTotals = field(default_factory=SentTotals)
    unreported: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Requests sent since the report, by handle: uncached prompt tokens, and all tokens."""

    def record(self, load: wire.Load, now: float) -> None:
        self.load, self.at_s = load, now
        self.unreported = {handle: tokens for handle, tokens in self.unreported.items() if handle > load.last_handle}


@dataclass(frozen=True, slots=True)
class RouterState:
    """What the router knows now."""

    now: float
    groups: Sequence[GroupState]
    hits_of: Callable[[Job], Sequence[int]]
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Send:
    job: Job
    group: int


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Orders a move. `stop` stops the request at once; others decode during the copy."""

    job: Job
    source: int
    target: int
    mode: TransferMode
    bytes_per_s: float | None = None
    tag: object = None


class Policy(Protocol):
    """A policy for routing and moving requests, created for each run. Groups are numbered."""

    def job_arrived(self, job: Job, state: RouterState) -> list[Send]: ...

    def dispatch(self, state: RouterState) -> list[Send]:
        """Returns what to send now from the queue, after a report."""
        ...

    def load_reported(self, group: int, load: wire.Load, now: float) -> None: ...

    def first_token(self, job: Job, group: int, now: float) -> None: ...

    def job_left(self, job: Job, group: int, now: float) -> None:
        """Handles a request that left a group: it ended, moved, or was requeued."""
        ...

    def tick(self, now: float, engines: Sequence[Engine]) -> list[MoveOrder]:
        """Returns the moves to make, every `TICK_S`. Running requests come from the engines, loads from reports."""
        ...

    def requeues(self, state: RouterState) -> list[tuple[Job, int]]:
        """Returns requests without a token to requeue, with their groups; each returns through `job_arrived`."""
        ...

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> MoveOrder | None:
        """Returns a target for a request that this group is about to preempt."""
        ...

    def move_ended(self, order: MoveOrder, is_moved: bool, now: float) -> None:
        """Handles the end of a move."""
        ...


TICK_S = 0.25


class DispatchOnly:
    """Base of policies that only choose a group."""

    def choose(self, job: Job, state: RouterState) -> int:
        raise NotImplementedError

    def job_arrived(self, job: Job, state: RouterState) -> list[Send]:
        return [Send(job, self.choose(job, state))]

    def dispatch(self, state: RouterState) -> list[Send]:
        return []

    def first_token(self, job: Job, group: int, now: float) -> None:
        """Does nothing."""

    def requeues(self, state: RouterState) -> list[tuple[Job, int]]:
        return []

    def load_reported(self, group: int, load: wire.Load, now: float) -> None:
        """Does nothing."""

    def job_left(self, job: Job, group: int, now: float) -> None:
        """Does nothing."""

    def tick(self, now: float, engines: Sequence[Engine]) -> list[MoveOrder]:
        return []

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> MoveOrder | None:
        return None

    def move_ended(self, order: MoveOrder, is_moved: bool, now: float) -> None:
        """Does nothing."""


def random_argmin(values: Sequence[float], rng: random.Random) -> int:
    """Returns the index of the smallest value; ties are broken at random."""
    best = min(values)
    return rng.choice([index for index, value in enumerate(values) if value == best])
