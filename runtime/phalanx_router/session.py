"""One stream on its way through groups, and the bounds of all such ways."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.links.leader_link import LeaderLink, LinkSettings
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.routing.queue import QueueBounds, Waiting
from phalanx_router.routing.quota import Granted
from phalanx_router.streams.stream import Setback, Stream


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Bounds of one router.

    max_replays: how often one stream may lose its group. max_moves: how often it may lose it or be left by it. patience_s:
    how long a stream that was running waits for a group. keep_alive_s: silence after which the door hears that a stream
    lives. retry_after_s: what clients are told when no group is ready. refusal_pause_s: wait before groups that refused a
    running stream are asked again. policy: followed until the operator tells another. queue: how many newcomers wait while every
    group has as many waiting as it should. tick_s: how often balancing looks. hold_s, max_held: how long newcomers wait while
    there is no group at all, and how many of them; 0 s: they are answered at once. find_s: how long a client that resumes waits
    for leaders that are not linked, or do not answer.
    """

    link: LinkSettings
    served_names: tuple[str, ...] = ()
    max_replays: int = 3
    patience_s: float = 600.0
    keep_alive_s: float = 5.0
    retry_after_s: float = 2.0
    refusal_pause_s: float = 0.5
    max_moves: int = 32
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    queue: QueueBounds = field(default_factory=QueueBounds)
    tick_s: float = 0.25
    hold_s: float = 0.0
    max_held: int = 1024
    find_s: float = 3.0


_next_number: Callable[[], int] = count().__next__


@dataclass(slots=True, eq=False)
class Run:
    """Where one stream is. `link` is None while no group has it; `group` is the key of the last one that had it.

    move: the open move of it, "" without one. moved: how often it was moved; `moved_at` when it last was, from group `left`.
    model_hash: the weights that drew its tokens; None before any group had it. keys: of its prompt's pages. waiting: its place in
    the queue; `came` ends the wait. sent_at: when its group got it. charged: output tokens that its tenant was charged for.
    granted: what it took of its tenant's quota, at `granted_at`. balanced: how many of the moves were for balance. number: names
    it in this process.
    deaths: groups that died while they computed it, for no cause of their own; killed: those
    of them that were charged with it, by leader and incarnation. widowed_by: the group that had it and went for
    good, by name; "" while the last one that had it did not. began_at: when it came to this router. lot: drawn
    once, in [0, 1): on which side of a canary's share it falls.
    """

    stream: Stream
    tokenizer: str | None
    keys: PromptKeys
    model_hash: str | None = None
    link: LeaderLink | None = None
    group: str = ""
    handle: int = 0
    losses: int = 0
    moves: int = 0
    excluded: set[str] = field(default_factory=set)
    trouble: Setback | None = None
    homeless_since: float | None = None
    move: str = ""
    moved: int = 0
    moved_at: float | None = None
    left: str = ""
    balanced: int = 0
    number: int = field(default_factory=_next_number)
    waiting: Waiting | None = None
    came: asyncio.Future[None] | None = None
    sent_at: float = 0.0
    charged: int = 0
    is_held: bool = False
    broken: Exception | None = None
    """Why it cannot be sent to any group."""
    granted: Granted | None = None
    granted_at: float = 0.0
    deaths: int = 0
    killed: set[tuple[str, str]] = field(default_factory=set)
    widowed_by: str = ""
    began_at: float = 0.0
    lot: float | None = None

    def replay(self, now: float) -> wire.Request:
        """The request as a group gets it now: with what was delivered, and with how long it is here already."""
        request = self.stream.journal.replay()
        waited_ms = request.waited_ms + 1e3 * max(0.0, now - self.began_at)
        return msgspec.structs.replace(request, waited_ms=waited_ms)

    @property
    def is_unstarted(self) -> bool:
        """Whether a group has it and no token of it came yet, nor of a run before."""
        return self.link is not None and not self.move and not self.moves and not self.stream.journal.delivered

    @property
    def has_started(self) -> bool:
        """Whether a group may have computed something of it: then it goes on wherever it can, and is never turned away."""
        journal = self.stream.journal
        return bool(self.moves or journal.delivered or journal.epoch)

    def give_up(self, error: Exception) -> None:
        """Ends its wait for a group with this error."""
        self.broken = error
        self.stream.nudge()
        if self.came is not None and not self.came.done():
            self.came.set_result(None)

    def part(self) -> None:
        """Lets the group go on without this router: another one may adopt the stream."""
        self.link = None

    def leave(self) -> None:
        """Ends what the group does for the stream, if one has it."""
        if self.link is not None:
            self.link.abort(self.handle)
            self.link = None
