"""Spans of one stream on its way through groups.

    request ─┬─ wait       in the router's queue
             ├─ hold       the part of it in which the service had no group
             ├─ pull       the request waits for pages of another group
             ├─ queue      in a group's queue; with an error: the group was lost, or refused the request, before the first token;
             │             without chunks and error: the request was aborted or queued again before it
             ├─ prefill    one event per chunk; queue and prefill again, with phalanx.preempted, after a preemption
             ├─ decode     from the first to the last token of a group; error: why the group no longer has the stream
             ├─ move       while the stream continues at its source
             ├─ replay     from the loss of a group to the first token of another one; error: the stream ended before
             └─ joined     an equal request computes the stream

All are children of the request's span, so that the loss of a router, with the spans that are open there, leaves none without its
parent. Times are those of the router's clock; those of a group are differences to the arrival of its frame.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from phalanx_api.trace import PrefillTime
from phalanx_frontend.tracing.group_spans import add_prefill
from phalanx_frontend.tracing.span import Value
from phalanx_frontend.tracing.tracer import RequestTrace


@dataclass(slots=True, kw_only=True)
class _GroupTurn:
    """The group that has the stream."""

    group: str
    epoch: int
    started: float
    decode_started: float | None = None
    num_before: int = 0
    """Tokens that the stream had at the first token of this group."""
    has_token: bool = False
    """This group has computed a token."""


class StreamTrace:
    """The spans of one stream. Its methods are called as things happen; without a trace they do nothing."""

    __slots__ = (
        "_clock",
        "_group",
        "_held_since",
        "_joined_at",
        "_lost_at",
        "_move_started",
        "_pulling_since",
        "_trace",
        "_waiting_since",
    )

    def __init__(self, trace: RequestTrace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._waiting_since: float | None = None
        self._held_since: float | None = None
        self._pulling_since: float | None = None
        self._lost_at: float | None = None
        self._joined_at: float | None = None
        self._group: _GroupTurn | None = None
        self._move_started = 0.0

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about the stream: its trace id, if it is exported."""
        exemplar = self._trace.exemplar if self._trace is not None else None
        return exemplar or {"trace_id": ""}

    def queued(self) -> None:
        """The stream waits for a group."""
        if self._trace is None:
            return
        self._end_pull({})
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def held(self) -> None:
        """No group exists, and the stream waits for the first."""
        if self._trace is None:
            return
        self._held_since = self._clock()

    def released(self) -> None:
        """The wait for the first group is over."""
        if self._trace is not None and self._held_since is not None:
            self._trace.add("hold", self._held_since, self._clock())
            self._held_since = None

    def chosen(self, group: str, why: str) -> None:
        """A group was chosen."""
        self._end_wait({"phalanx.group": group, "phalanx.why": why})

    def pulling(self) -> None:
        """The request waits for pages of another group."""
        if self._trace is None:
            return
        self._pulling_since = self._clock()

    def sent(self, group: str, epoch: int) -> None:
        """A group has the stream."""
        if self._trace is None:
            return
        self._end_pull({"phalanx.group": group})
        self._end_group("")
        self._group = _GroupTurn(group=group, epoch=epoch, started=self._clock())

    def adopted(self, group: str, epoch: int, num_delivered: int) -> None:
        """A group has continued the stream of a lost router."""
        self.sent(group, epoch)
        if self._group is not None:
            self._group.decode_started, self._group.num_before = self._group.started, num_delivered
            self._group.has_token = num_delivered > 0

    def first_token(self, epoch: int, times: PrefillTime, cached_tokens: int, num_delivered: int) -> None:
        """The group of this epoch has computed its first token, or the next one after it preempted the request."""
        group, now = self._group, self._clock()
        if self._trace is None or group is None or group.epoch != epoch:
            return
        self._trace.add_later(
            partial(
                add_prefill,
                times=times,
                now=now,
                cached_tokens=cached_tokens,
                is_again=group.has_token,
                group=group.group,
                epoch=epoch,
            )
        )
        group.has_token = True
        if group.decode_started is None:
            group.decode_started, group.num_before = now, num_delivered
        if self._lost_at is not None:
            self._trace.add("replay", self._lost_at, now, attributes={"phalanx.group": group.group, "phalanx.epoch": epoch})
            self._lost_at = None

    def lost(self, why: str, num_delivered: int, is_planned: bool) -> None:
        """The stream left its group; another one replays it. `is_planned`: the group drains."""
        if self._trace is None:
            return
        if not is_planned:
            self._trace.keep()
        self._lost_at = self._clock() if self._lost_at is None else self._lost_at
        self._end_group("" if is_planned else why, num_delivered)

    def refused(self, why: str, num_delivered: int) -> None:
        """The group refused the request; another one computes it."""
        if self._trace is None:
            return
        if num_delivered and self._lost_at is None:
            self._lost_at = self._clock()
        self._end_group(why, num_delivered)

    def move_started(self, target: str) -> None:
        """A move of the stream to group `target` began."""
        if self._trace is None:
            return
        self._move_started = self._clock()

    def moved(self, group: str, epoch: int, num_delivered: int) -> None:
        """The target of the move has the stream."""
        if self._trace is None:
            return
        self._end_group("", num_delivered)
        self.sent(group, epoch)

    def move_ended(self, attributes: dict[str, Value], error: str) -> None:
        """The move is over. Traces of moved streams are exported."""
        if self._trace is None:
            return
        self._trace.keep()
        self._trace.add("move", self._move_started, self._clock(), attributes=attributes, error=error)

    def joined(self) -> None:
        """An equal request computes the stream."""
        if self._trace is None:
            return
        self._joined_at = self._clock()

    def separated(self) -> None:
        """The equal request computes it no more."""
        if self._trace is not None and self._joined_at is not None:
            self._trace.add("joined", self._joined_at, self._clock())
            self._joined_at = None

    def ended(self, num_delivered: int, error: str) -> None:
        """The stream is over."""
        self.released()
        self._end_wait({})
        self._end_pull({})
        self._end_group(error, num_delivered)
        if self._trace is not None and self._lost_at is not None:
            self._trace.add("replay", self._lost_at, self._clock(), error=error or "aborted")
            self._lost_at = None

    def _end_wait(self, attributes: dict[str, Value]) -> None:
        if self._trace is not None and self._waiting_since is not None:
            self._trace.add("wait", self._waiting_since, self._clock(), attributes=attributes)
            self._waiting_since = None

    def _end_pull(self, attributes: dict[str, Value]) -> None:
        if self._trace is not None and self._pulling_since is not None:
            self._trace.add("pull", self._pulling_since, self._clock(), attributes=attributes)
            self._pulling_since = None

    def _end_group(self, error: str, num_delivered: int = 0) -> None:
        group, self._group = self._group, None
        if self._trace is None or group is None:
            return
        attributes: dict[str, Value] = {"phalanx.group": group.group, "phalanx.epoch": group.epoch}
        if group.decode_started is not None:
            attributes["phalanx.tokens"] = num_delivered - group.num_before
        name, started = ("queue", group.started) if group.decode_started is None else ("decode", group.decode_started)
        self._trace.add(name, started, self._clock(), error=error, attributes=attributes, service=group.group)


UNTRACED = StreamTrace()
"""Of all streams that are not traced."""
