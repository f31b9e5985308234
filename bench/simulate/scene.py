"""What a router of the simulated fleet knows when it decides, and what it may answer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from phalanx_api import wire
from phalanx_router.balancing.records import TransferMode

NOTHING = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=1)


@dataclass(slots=True)
class Sent:
    """What this router has in one group, counted when it sends and when an end comes back: as fresh as can be."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens without a first token yet, hits aside."""
    context_tokens: int = 0


@dataclass(slots=True)
class Seen:
    """One group as its latest report said. `unseen`: what was sent there that it had not taken in yet."""

    load: wire.Load = NOTHING
    at_s: float = 0.0
    sent: Sent = field(default_factory=Sent)
    unseen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By handle: prompt tokens that no page there holds, and all tokens."""

    def reported(self, load: wire.Load, now: float) -> None:
        """Notes a report."""
        self.load, self.at_s = load, now
        self.unseen = {handle: what for handle, what in self.unseen.items() if handle > load.last_handle}


@dataclass(frozen=True, slots=True)
class Scene:
    """Now: what every group told, how many tokens of a prompt each holds, and chance."""

    now: float
    groups: Sequence[Seen]
    hits_of: Callable[[Job], Sequence[int]]
    chance: random.Random


@dataclass(frozen=True, slots=True)
class Send:
    """This request goes there now."""

    job: Job
    group: int


@dataclass(frozen=True, slots=True)
class Wish:
    """Move this request there. A rescue stops it at once; others decode while they are copied."""

    job: Job
    source: int
    target: int
    way: TransferMode
    bytes_per_s: float | None = None
    tag: object = None


class Policy(Protocol):
    """A way to serve requests, made anew for each run. Groups are numbered."""

    def arrived(self, job: Job, scene: Scene) -> list[Send]:
        """A request came: what is sent now."""
        ...

    def woken(self, scene: Scene) -> list[Send]:
        """A group reported: what is sent now of what waits."""
        ...

    def reported(self, group: int, load: wire.Load, now: float) -> None:
        """A group told what it has in hand."""
        ...

    def started(self, job: Job, group: int, now: float) -> None:
        """The first token of a request came."""
        ...

    def ended(self, job: Job, group: int, now: float) -> None:
        """A request left a group: it ended, moved, or was taken back."""
        ...

    def tick(self, now: float, engines: Sequence[Engine]) -> list[Wish]:
        """What to move, asked every `TICK_S`. Running requests are read off the engines; loads off the reports."""
        ...

    def taken_back(self, scene: Scene) -> list[tuple[Job, int]]:
        """Requests without a token that should come back from these groups; each that did is told by `arrived` again."""
        ...

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> Wish | None:
        """Where a request goes that this group is about to preempt."""
        ...

    def moved(self, wish: Wish, is_moved: bool, now: float) -> None:
        """How a move ended."""
        ...


TICK_S = 0.25


class Plain:
    """A policy that only chooses: the base of most of what others do."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The group that gets it."""
        raise NotImplementedError

    def arrived(self, job: Job, scene: Scene) -> list[Send]:
        """It is sent at once."""
        return [Send(job, self.choose(job, scene))]

    def woken(self, scene: Scene) -> list[Send]:
        """Nothing waits."""
        return []

    def started(self, job: Job, group: int, now: float) -> None:
        """Nothing."""

    def taken_back(self, scene: Scene) -> list[tuple[Job, int]]:
        """None."""
        return []

    def reported(self, group: int, load: wire.Load, now: float) -> None:
        """Nothing."""

    def ended(self, job: Job, group: int, now: float) -> None:
        """Nothing."""

    def tick(self, now: float, engines: Sequence[Engine]) -> list[Wish]:
        """No moves."""
        return []

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> Wish | None:
        """No rescue."""
        return None

    def moved(self, wish: Wish, is_moved: bool, now: float) -> None:
        """Nothing."""


def least(values: Sequence[float], chance: random.Random) -> int:
    """The place of the smallest; one of the smallest by chance."""
    best = min(values)
    return chance.choice([place for place, value in enumerate(values) if value == best])
