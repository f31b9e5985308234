"""Time lines of requests for the console of a router: those of open streams and of the last ones that ended.

A time line has ids, counts and times, never a prompt or an output. It is written at the events of a stream, not per token.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from phalanx_api.trace import PrefillTime
from phalanx_frontend.ids import STREAM_NAME_SEPARATOR
from phalanx_frontend.tracing.span import Value
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream_trace import StreamTrace

MAX_ENDED = 200
"""Time lines kept of ended requests."""
MAX_MOVES = 50
"""Last moves of the router."""
MAX_EVENTS = 64
"""Of one request; later ones are counted."""
MAX_NOTE = 200


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a stream."""

    at: float
    kind: str
    group: str = ""
    index: int = 0  # delivered tokens
    note: str = ""


@dataclass(frozen=True, slots=True)
class GroupSegment:
    """The tokens that one group computed: those from `start` up to the start of the next segment."""

    group: str
    epoch: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMove:
    """A move of a stream, ended unless `outcome` is empty."""

    number: int  # of the stream
    at: float
    source: str
    target: str
    index: int  # delivered tokens at its start
    ended_at: float = 0.0
    transfer: str = ""
    reason: str = ""
    outcome: str = ""
    num_bytes: int = 0
    pages: int = 0
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class TimelineEnd:
    """How a request ended."""

    at: float
    how: str  # a finish reason, a code of an error, or closed: a stop string, or the client left
    tokens: int
    first_token_at: float | None


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTimeline:
    """What happened to one request."""

    number: int
    name: str  # id of the answer, if it is not a secret
    tenant: str
    prompt_tokens: int
    arrived_at: float
    session: StreamSession | None  # while it is open
    events: list[TimelineEvent] = field(default_factory=list)
    segments: list[GroupSegment] = field(default_factory=list)
    moves: list[StreamMove] = field(default_factory=list)
    num_dropped: int = 0  # events and segments beyond the bound
    end: TimelineEnd | None = None

    @property
    def tokens(self) -> int:
        """Delivered tokens."""
        if self.end is not None:
            return self.end.tokens
        return len(self.session.stream.journal.delivered) if self.session is not None else 0

    @property
    def first_token_at(self) -> float | None:
        """When the first token of this router reached its client's stream."""
        if self.end is not None:
            return self.end.first_token_at
        return self.session.first_token_at if self.session is not None else None

    @property
    def last_group(self) -> str:
        """The last group that got it."""
        return self.segments[-1].group if self.segments else ""

    @property
    def group(self) -> str:
        """The group that has it, or had it when it ended; empty while it waits."""
        if self.session is None:
            return self.last_group
        return self.session.assignment.link.endpoint.group if self.session.assignment is not None else ""

    @property
    def is_moving(self) -> bool:
        """Whether a move is in progress."""
        return bool(self.moves) and not self.moves[-1].outcome

    def add(self, at: float, kind: str, group: str = "", note: str = "") -> None:
        """Records an event."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(TimelineEvent(at, kind, group, self.tokens, note[:MAX_NOTE]))
        else:
            self.num_dropped += 1

    def assigned(self, group: str, epoch: int) -> None:
        """Records the group that computes from here on."""
        if len(self.segments) < MAX_EVENTS:
            self.segments.append(GroupSegment(group, epoch, self.tokens))
        else:
            self.num_dropped += 1


class RecordedTrace(StreamTrace):
    """A stream's trace that also writes its time line."""

    def __init__(self, inner: StreamTrace, timeline: RequestTimeline, log: "RequestLog", clock: Callable[[], float]) -> None:
        super().__init__(None, clock)
        self._inner = inner
        self._timeline = timeline
        self._log = log
        self._now = clock

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about the stream."""
        return self._inner.log_fields

    def queued(self) -> None:
        """The stream waits for a group."""
        self._inner.queued()
        self._timeline.add(self._now(), "queued")

    def held(self) -> None:
        """No group exists, and the stream waits for the first."""
        self._inner.held()
        self._timeline.add(self._now(), "held")

    def released(self) -> None:
        """The wait for the first group is over."""
        self._inner.released()

    def chosen(self, group: str, why: str) -> None:
        """A group was chosen."""
        self._inner.chosen(group, why)
        self._timeline.add(self._now(), "chosen", group, why)

    def pulling(self) -> None:
        """The request waits for pages of another group."""
        self._inner.pulling()
        self._timeline.add(self._now(), "pulling")

    def sent(self, group: str, epoch: int) -> None:
        """A group has the stream."""
        self._inner.sent(group, epoch)
        self._timeline.assigned(group, epoch)
        self._timeline.add(self._now(), "sent", group)

    def adopted(self, group: str, epoch: int, num_delivered: int) -> None:
        """A group has continued the stream of a lost router."""
        self._inner.adopted(group, epoch, num_delivered)
        self._timeline.assigned(group, epoch)
        self._timeline.add(self._now(), "adopted", group)

    def first_token(self, epoch: int, times: PrefillTime, cached_tokens: int, num_delivered: int) -> None:
        """The group of this epoch has computed its first token."""
        self._inner.first_token(epoch, times, cached_tokens, num_delivered)

    def lost(self, why: str, num_delivered: int, is_planned: bool) -> None:
        """The stream left its group; another one replays it."""
        self._inner.lost(why, num_delivered, is_planned)
        self._timeline.add(self._now(), "drained" if is_planned else "lost", self._timeline.last_group, why)

    def refused(self, why: str, num_delivered: int) -> None:
        """The group refused the request."""
        self._inner.refused(why, num_delivered)
        self._timeline.add(self._now(), "refused", self._timeline.last_group, why)

    def move_started(self, target: str) -> None:
        """A move of the stream began."""
        self._inner.move_started(target)
        timeline = self._timeline
        timeline.add(self._now(), "move started", target)
        move = StreamMove(
            number=timeline.number, at=self._now(), source=timeline.last_group, target=target, index=timeline.tokens
        )
        timeline.moves[MAX_EVENTS - 1 :] = [move]  # beyond the bound the last one is replaced

    def moved(self, group: str, epoch: int, num_delivered: int) -> None:
        """The target of the move has the stream."""
        self._inner.moved(group, epoch, num_delivered)
        self._timeline.assigned(group, epoch)
        self._timeline.add(self._now(), "moved", group)

    def move_ended(self, attributes: dict[str, Value], error: str) -> None:
        """The move is over."""
        self._inner.move_ended(attributes, error)
        timeline = self._timeline
        if error:
            timeline.add(self._now(), "move failed", timeline.last_group, error)
        if timeline.moves:
            timeline.moves[-1] = _ended(timeline.moves[-1], attributes, self._now(), _page_bytes(timeline.session))
            self._log.moves.append(timeline.moves[-1])

    def joined(self) -> None:
        """An equal request computes the stream."""
        self._inner.joined()
        self._timeline.add(self._now(), "joined")

    def separated(self) -> None:
        """The equal request computes it no more."""
        self._inner.separated()
        self._timeline.add(self._now(), "separated")

    def ended(self, num_delivered: int, error: str) -> None:
        """The stream is over."""
        self._inner.ended(num_delivered, error)


def _page_bytes(session: StreamSession | None) -> int:
    if session is None or session.assignment is None:
        return 0
    return session.assignment.link.group_report.served.page_bytes


def _ended(move: StreamMove, attributes: dict[str, Value], now: float, page_bytes: int) -> StreamMove:
    num_bytes, stall_s = attributes.get("phalanx.bytes", 0), attributes.get("phalanx.stall_s")
    num_bytes = num_bytes if isinstance(num_bytes, int) else 0
    return replace(
        move,
        ended_at=now,
        transfer=str(attributes.get("phalanx.transfer", "")),
        reason=str(attributes.get("phalanx.why", "")),
        outcome=str(attributes.get("phalanx.outcome", "")),
        num_bytes=num_bytes,
        pages=-(-num_bytes // page_bytes) if page_bytes else 0,
        stall_s=stall_s if isinstance(stall_s, float) else None,
    )


class RequestLog:
    """Time lines of all open requests and of the last `MAX_ENDED` that ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.moves: deque[StreamMove] = deque(maxlen=MAX_MOVES)
        """The last ones that ended, of all requests."""
        self._clock = clock
        self._open: dict[int, RequestTimeline] = {}
        self._ended: deque[RequestTimeline] = deque(maxlen=MAX_ENDED)

    def opened(self, session: StreamSession, inner: StreamTrace) -> StreamTrace:
        """Starts the time line of a session. Returns the trace that writes it and passes all on to `inner`."""
        journal = session.stream.journal
        timeline = RequestTimeline(
            number=session.number,
            name=public_name(journal.id, journal.can_resume),
            tenant=journal.tenant,
            prompt_tokens=journal.num_prompt,
            arrived_at=session.arrived_at,
            session=session,
        )
        timeline.add(session.arrived_at, "arrived")
        self._open[session.number] = timeline
        return RecordedTrace(inner, timeline, self, self._clock)

    def closed(self, session: StreamSession, how: str) -> None:
        """Ends the time line of a session."""
        timeline = self._open.pop(session.number, None)
        if timeline is None:
            return
        now = self._clock()
        timeline.add(now, "ended", timeline.last_group, how)
        timeline.end = TimelineEnd(now, how, timeline.tokens, timeline.first_token_at)
        timeline.session = None
        self._ended.append(timeline)

    def open(self) -> Iterable[RequestTimeline]:
        """Time lines of open requests, the oldest first."""
        return self._open.values()

    def newest(self) -> Iterator[RequestTimeline]:
        """All time lines: open ones, then ended ones, the newest first."""
        return chain(reversed(self._open.values()), reversed(self._ended))

    def find(self, number: int) -> RequestTimeline | None:
        """Time line of the request with this number."""
        found = self._open.get(number)
        return found or next((timeline for timeline in self._ended if timeline.number == number), None)

    def named(self, name: str) -> Iterator[RequestTimeline]:
        """Time lines of the requests whose answers have this id, the newest first."""
        return (timeline for timeline in self.newest() if timeline.name == name)


def public_name(id: str, can_resume: bool) -> str:
    """Returns the client's part of a stream name; empty if the whole name is a secret, which permits to resume the stream."""
    name, separator, _ = id.partition(STREAM_NAME_SEPARATOR)
    return name if separator or not can_resume else ""
