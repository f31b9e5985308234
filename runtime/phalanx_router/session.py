"""State of one stream on its way through groups, and the settings of a router."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.links.leader_link import LeaderLink, LinkSettings
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.routing.queue import QueueBounds, QueuedRequest
from phalanx_router.routing.quota import QuotaGrant
from phalanx_router.streams.stream import Setback, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Limits and intervals of one router."""

    link: LinkSettings
    served_names: tuple[str, ...] = ()
    # Maximum number of groups that one stream may lose.
    max_replays: int = 3
    # Wait of a started stream for a group.
    patience_s: float = 600.0
    # Silence after which the API server gets a KeepAlive.
    keep_alive_s: float = 5.0
    # Retry-After when no group is ready.
    retry_after_s: float = 2.0
    # Wait before groups that refused a started stream are tried again.
    refusal_pause_s: float = 0.5
    # Maximum number of replays and drains of one stream together.
    max_moves: int = 32
    # In force until the operator sends one.
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    # Limits on new requests that wait while each group is full.
    queue: QueueBounds = field(default_factory=QueueBounds)
    # Interval of balancing.
    tick_s: float = 0.25
    # Cold-start hold of new requests while no group exists; 0: they get 503 at once.
    hold_s: float = 0.0
    # Maximum number of held requests.
    max_held: int = 1024
    # Wait of a resume for leaders that are not linked or do not answer.
    find_s: float = 3.0


_next_number: Callable[[], int] = count().__next__


@dataclass(slots=True, eq=False, kw_only=True)
class StreamSession:
    """Routing state of one stream."""

    stream: Stream
    tokenizer: str | None
    # Page keys of the prompt.
    keys: PromptKeys
    # Weights that computed its tokens; unset before a group had it.
    model_hash: str | None = None
    # Unset while no group has it.
    link: LeaderLink | None = None
    # Key of the last group that had it.
    group: str = ""
    handle: int = 0
    # Groups lost without a drain.
    losses: int = 0
    # Groups lost or drained.
    moves: int = 0
    # Keys of groups that failed or refused it.
    excluded: set[str] = field(default_factory=set)
    # Last setback.
    last_setback: Setback | None = None
    # When its wait for a group began.
    unassigned_since: float | None = None
    # Id of the open move, "" without one.
    move: str = ""
    # Completed moves; `moved_at`: time of the last one, `left`: key of its source.
    moved: int = 0
    moved_at: float | None = None
    left: str = ""
    # Completed moves that balancing initiated.
    balanced: int = 0
    # Identifies the stream in this process.
    number: int = field(default_factory=_next_number)
    # Entry in the queue; `wait_ended` completes when the wait ends.
    waiting: QueuedRequest | None = None
    wait_ended: asyncio.Future[None] | None = None
    # When its present group received it.
    sent_at: float = 0.0
    # Output tokens charged to the tenant in the queue.
    charged: int = 0
    # In a cold-start hold.
    is_held: bool = False
    error: Exception | None = None
    """Why no group can take it."""
    # Quota taken from the tenant, at `granted_at`.
    granted: QuotaGrant | None = None
    granted_at: float = 0.0
    # Groups that died while they computed it, without a known other cause.
    deaths: int = 0
    # Leader key and group key of the deaths charged to those leaders.
    blamed_incarnations: set[tuple[str, str]] = field(default_factory=set)
    # Name of the last group if it was lost for good, else "".
    lost_group: str = ""
    # When it arrived at this router.
    began_at: float = 0.0
    # Uniform in [0, 1), drawn once for the canary share.
    canary_draw: float | None = None

    def replay(self, now: float) -> wire.Request:
        """Returns the request for a group now, with the delivered tokens and the time that it has waited here."""
        request = self.stream.journal.replay()
        waited_ms = request.waited_ms + 1e3 * max(0.0, now - self.began_at)
        return msgspec.structs.replace(request, waited_ms=waited_ms)

    @property
    def is_unstarted(self) -> bool:
        """Whether a group has it and it has no token from this or an earlier group."""
        return self.link is not None and not self.move and not self.moves and not self.stream.journal.delivered

    @property
    def has_started(self) -> bool:
        """Whether a group may have computed tokens of it; such a stream is never rejected for load."""
        journal = self.stream.journal
        return bool(self.moves or journal.delivered or journal.epoch)

    def give_up(self, error: Exception) -> None:
        """Ends the wait for a group with `error`."""
        self.error = error
        self.stream.nudge()
        if self.wait_ended is not None and not self.wait_ended.done():
            self.wait_ended.set_result(None)

    def detach(self) -> None:
        """Detaches from the group without aborting: another router may adopt the stream."""
        self.link = None

    def abort(self) -> None:
        """Aborts the request at its group, if it has one."""
        if self.link is not None:
            self.link.abort(self.handle)
            self.link = None
