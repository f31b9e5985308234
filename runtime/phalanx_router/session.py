"""State of one stream on its way through groups, the list of open streams, and the settings of a router.

Parts of a session and their writers:

    `assignment`, `last_key`                dispatcher, mover; backend for adopted streams
    `model_hash`, `revision`                as above, and `dispatch.coalescing`; backend at a purge
    `wait`, `charge`                        `dispatch`
    `failures`                              `backend`; `dispatch` clears `excluded` after a wait
    `moves`                                 `migration`
    `sharing`                               `dispatch.coalescing`
"""

import asyncio
import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from phalanx_api import wire
from phalanx_api.summary import MAX_LISTED_STREAMS, BalancePolicy, OpenStream, StreamList
from phalanx_frontend.backend import BackendError
from phalanx_frontend.flight import NO_FLIGHT_RECORDER, FlightRecorder
from phalanx_frontend.limits import DEFAULT_LIMITS, Limits
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.holders import NO_HOLDERS, HolderSettings
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.metrics import Outcome
from phalanx_router.moves.records import MoveRequest
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.routing.queue import QueueBounds, QueuedRequest
from phalanx_router.routing.quota import QuotaGrant
from phalanx_router.streams.stream import Setback, Stream
from phalanx_router.streams.traffic import RequestMeter

_next_number: Callable[[], int] = count().__next__
RECENT_S = 30.0
"""Time after a move for which a stream is listed before others, with the group that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Limits and intervals of one router."""

    link: LinkSettings
    served_names: tuple[str, ...] = ()
    max_replays: int = 3
    max_departures: int = 32  # losses and drains
    patience_s: float = 600.0  # wait of a started stream for a group
    keep_alive_s: float = 5.0  # silence before a KeepAlive
    retry_after_s: float = 2.0
    refusal_pause_s: float = 0.5  # before groups that refused a started stream are tried again
    policy: BalancePolicy = field(default_factory=BalancePolicy)  # until the operator sends one
    queue: QueueBounds = field(default_factory=QueueBounds)
    tick_s: float = 0.25
    hold_s: float = 0.0  # cold-start hold of new requests; 0: by policy
    max_held: int = 1024
    find_s: float = 3.0  # wait of a resume for leaders
    adapter_wait_s: float = 120.0  # wait of a request until a group has loaded its adapter
    holders: HolderSettings = NO_HOLDERS
    recorder: FlightRecorder = NO_FLIGHT_RECORDER
    limits: Limits = DEFAULT_LIMITS  # of requests to the API


@dataclass(frozen=True, slots=True)
class Assignment:
    """The group that runs a stream."""

    link: LeaderLink
    key: str  # `link.key` when the stream was sent
    handle: int


@dataclass(slots=True, kw_only=True)
class GroupWait:
    """Wait of a stream for a group."""

    queued: QueuedRequest | None = None  # last entry in the queue
    completion: asyncio.Future[None] | None = None
    unassigned_since: float | None = None
    sent_at: float = 0.0
    is_held: bool = False  # in a cold-start hold
    canary_draw: float | None = None  # uniform in [0, 1)
    error: Exception | None = None

    def end(self) -> None:
        """Wakes the waiting task."""
        if self.completion is not None and not self.completion.done():
            self.completion.set_result(None)


@dataclass(slots=True, kw_only=True)
class TenantCharge:
    """Charges to the tenant."""

    is_exempt: bool = False  # a computation of the router's own
    output_tokens: int = 0  # in the queue's counter
    grant: QuotaGrant | None = None
    granted_at: float = 0.0
    num_before: int = 0  # tokens of prompt and output that earlier connections of the stream were charged
    is_due: bool = False  # of a choice of a resumed stream that is lost: it is computed and charged as a new request


@dataclass(slots=True, kw_only=True)
class FailureHistory:
    """Groups that a stream has lost or left."""

    excluded: set[str] = field(default_factory=set)  # group keys; failed or refused the stream
    last_setback: Setback | None = None
    lost_group: str = ""  # name, if lost for good
    num_losses: int = 0  # without a drain
    num_departures: int = 0  # losses and drains
    num_deaths: int = 0  # groups that died without another known cause
    blamed_incarnations: set[tuple[str, str]] = field(default_factory=set)  # their leader and group keys


@dataclass(slots=True, kw_only=True)
class MoveHistory:
    """Moves of a stream."""

    open_move: str = ""  # id
    num_completed: int = 0
    num_balanced: int = 0  # optional ones
    last_at: float | None = None
    last_source: str = ""  # group key
    open_pull: str = ""  # id, while the request waits for pages of another group
    num_pulls: int = 0


@dataclass(slots=True, kw_only=True)
class Sharing:
    """One computation for equal requests."""

    key: bytes | None = None  # `routing.equality.computation_key` and the tokenizer
    computed_by: "StreamSession | None" = None  # the session that this one has joined
    joined: "list[StreamSession]" = field(default_factory=list)  # sessions that have joined this one
    num_before: int = 0  # tokens that the session had when it joined
    background: asyncio.Task[wire.FinishReason] | None = None  # computes for joined sessions after the client has left


@dataclass(slots=True, eq=False, kw_only=True)
class StreamSession:
    """Routing state of one stream."""

    stream: Stream
    tokenizer: str | None
    keys: PromptKeys
    arrived_at: float = 0.0
    number: int = field(default_factory=_next_number)  # unique in this process

    assignment: Assignment | None = None
    last_key: str = ""  # of the last assignment
    model_hash: str | None = None  # of the weights that computed its tokens
    revision: str = ""  # `LeaderLink.revision_identity` of the groups that computed its tokens; empty if they differ or unknown

    wait: GroupWait = field(default_factory=GroupWait)
    charge: TenantCharge = field(default_factory=TenantCharge)
    failures: FailureHistory = field(default_factory=FailureHistory)
    moves: MoveHistory = field(default_factory=MoveHistory)
    sharing: Sharing = field(default_factory=Sharing)
    meter: RequestMeter | None = None  # unless it joined another session at first
    first_token_at: float | None = None  # at its client, also of a session that joined another one

    def replay(self, now: float) -> wire.Request:
        """Replay of the journal, with the time waited here."""
        request = self.stream.journal.replay()
        waited_ms = request.waited_ms + 1e3 * max(0.0, now - self.arrived_at)
        return msgspec.structs.replace(request, waited_ms=waited_ms)

    @property
    def is_waiting(self) -> bool:
        """Whether neither a group nor another session computes it."""
        return self.assignment is None and self.sharing.computed_by is None

    @property
    def is_computing(self) -> bool:
        """Whether no other session computes it."""
        return self.sharing.computed_by is None

    @property
    def computing(self) -> "StreamSession":
        """The session that computes its tokens: another one that it has joined, or itself."""
        return self.sharing.computed_by or self

    @property
    def is_unstarted(self) -> bool:
        """Whether its first group has it and no token has arrived."""
        is_first = not self.moves.open_move and not self.failures.num_departures and not self.stream.journal.delivered
        return self.assignment is not None and is_first

    @property
    def has_started(self) -> bool:
        """Whether a group may have computed tokens of it."""
        journal = self.stream.journal
        return bool(self.failures.num_departures or journal.delivered or journal.epoch)

    def assign(self, link: LeaderLink, key: str, handle: int) -> None:
        """Records the group that runs the stream."""
        self.assignment, self.last_key = Assignment(link, key, handle), key
        is_other = bool(self.stream.journal.delivered) and self.revision != link.revision_identity
        self.revision = "" if is_other else link.revision_identity
        self.share_with(self.sharing.joined)

    def share_with(self, joined: "Sequence[StreamSession]") -> None:
        """Names the resumable streams among these to the group: it continues them after the loss of this router."""
        assignment = self.assignment
        if assignment is None:
            return
        for journal in (other.stream.journal for other in joined):
            if journal.can_resume:
                assignment.link.share(assignment.handle, journal.as_shared())

    def give_up(self, error: Exception) -> None:
        """Ends the wait for a group with `error`."""
        self.wait.error = error
        self.stream.wake()
        self.wait.end()

    def detach(self) -> None:
        """Leaves the stream to its group: another router may adopt it."""
        self.assignment = None

    def abort(self) -> None:
        """Aborts the request at its group."""
        if self.assignment is not None:
            self.assignment.link.abort(self.assignment.handle)
            self.assignment = None


@dataclass(slots=True)
class StreamEnd:
    """How a stream ended. Neither a reason nor an error: its client left."""

    finish: wire.FinishReason | None = None
    error: BaseException | None = None

    @property
    def is_by_client(self) -> bool:
        """Whether the client left."""
        return self.finish is None and self.error is None

    def outcome(self, session: StreamSession) -> Outcome:
        """Outcome for metrics."""
        if self.finish is not None:
            return "finished"
        if not isinstance(self.error, BackendError):
            return "cancelled"
        return "failed" if session.failures.num_departures or self.error.status >= 500 else "refused"


def end_of(task: asyncio.Task[wire.FinishReason]) -> StreamEnd:
    """End of a computation in the background; a cancelled one has lost its last client."""
    if task.cancelled():
        return StreamEnd()
    error = task.exception()
    return StreamEnd(None if error is not None else task.result(), error)


def list_streams(
    sessions: Collection[StreamSession], open_moves: Sequence[MoveRequest], group_of: Callable[[str], str], now: float
) -> StreamList:
    """Returns the open streams for `kubectl phalanx watch`. `group_of`: name of the group with a key."""
    targets = {request.move: group_of(request.target) for request in open_moves}

    def rank(session: StreamSession) -> tuple[bool, float, float]:
        moves = session.moves
        return moves.open_move not in targets, -(moves.last_at or 0.0) if _is_recent(session, now) else 0.0, session.arrived_at

    def listed(session: StreamSession) -> OpenStream:
        journal, assignment = session.stream.journal, session.computing.assignment
        return OpenStream(
            number=session.number,
            tenant=journal.tenant,
            group=assignment.link.endpoint.group if assignment is not None else "",
            prompt_tokens=journal.num_prompt,
            tokens=len(journal.delivered),
            age_s=now - session.arrived_at,
            moves=session.moves.num_completed,
            moving_to=targets.get(session.moves.open_move, ""),
            left=group_of(session.moves.last_source) if _is_recent(session, now) else "",
            joined=not session.is_computing,
        )

    first = heapq.nsmallest(MAX_LISTED_STREAMS, sessions, key=rank)
    return StreamList(at_s=now, total=len(sessions), streams=[listed(session) for session in first])


def _is_recent(session: StreamSession, now: float) -> bool:
    return session.moves.last_at is not None and now - session.moves.last_at < RECENT_S
