"""Collects the spans of each request and decides at its end whether they are exported.

    sampled by ratio, or by the client's traceparent    each span is exported as it ends
    failed, slow, moved, replayed                       all spans are exported from that moment on
    others                                              dropped at the end

So a process that is killed has exported the spans of sampled requests up to then. Spans of open requests are bounded: those of a
request after `MAX_RECORDS` are counted in its last span and dropped.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from phalanx_api.trace import Trace, parse_traceparent, start_trace
from phalanx_frontend.tracing.span import NO_ATTRIBUTES, Attributes, Span, SpanEvent, Value

_FIRST_TOKEN = "phalanx.time_to_first_token"
MAX_RECORDS = 256
"""Spans of one request, those of one group's queue and prefill counted as one."""


class SpanExporter(Protocol):
    """Receives ended spans."""

    def export(self, span: Span) -> None:
        """Queues a span; never blocks."""
        ...

    def close(self) -> None:
        """Sends what is queued, within 30 s."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Which requests are traced."""

    ratio: float = 0.01
    """Share of the requests without a traceparent."""
    slow_s: float = 10.0
    """A request whose first token takes longer is exported, and one without a token, such as of embeddings, that lasts longer."""


class RequestTrace:
    """Spans of one HTTP request. Times in arguments are those of the tracer's monotonic clock."""

    __slots__ = (
        "_arrived_s",
        "_descriptions",
        "_has_ended",
        "_is_handed_over",
        "_is_only_holder",
        "_num_ends",
        "_num_records",
        "_outlives_request",
        "_records",
        "_resumed",
        "_tracer",
        "_unix_offset_s",
        "attributes",
        "error",
        "identity",
        "is_kept",
        "name",
        "resumed_name",
    )

    def __init__(self, tracer: "Tracer", identity: Trace, name: str) -> None:
        self.identity = identity
        self.name = name
        self.resumed_name = ""
        """Of the span of the request that began the stream."""
        self.attributes: dict[str, Value] = {}
        """Of the span of the request."""
        self.is_kept = identity.is_sampled
        """Whether its spans are exported."""
        self.error = ""
        self._tracer = tracer
        self._arrived_s = tracer.clock()
        self._unix_offset_s = identity.arrived_s - self._arrived_s
        self._descriptions: list[Callable[[RequestTrace], None]] = []
        self._records: list[Callable[[], None]] = []
        self._num_records = 0
        self._resumed: Trace | None = None
        self._is_only_holder = False
        self._is_handed_over = False
        self._outlives_request = False
        self._has_ended = False
        self._num_ends = 1  # calls of `end` until the span ends

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels of an exemplar, if the trace is exported."""
        return {"trace_id": self.identity.trace_id} if self.is_kept else None

    def resume(self, identity: Trace, is_only_holder: bool) -> None:
        """Continues the trace of a stream that another HTTP request began.

        `is_only_holder`: the router of that request was lost with its span, which this one exports too.
        """
        self._resumed, self._is_only_holder = identity, is_only_holder
        own = self.identity
        self.identity = msgspec.structs.replace(
            own, trace_id=identity.trace_id, parent_id=identity.span_id, is_sampled=own.is_sampled or identity.is_sampled
        )
        self._tracer.add_alias(identity.span_id, self)
        if identity.is_sampled:
            self.keep()
        self.resumed_name, self.name = self.name, "resume"

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        error: str = "",
        attributes: Attributes = NO_ATTRIBUTES,
        events: Sequence[SpanEvent] = (),
        service: str = "",
    ) -> None:
        """Records a span that ended, below the span of the request."""
        self._record(
            partial(self._export, name, start_s, end_s, error=error, attributes=attributes, events=events, service=service)
        )

    def add_later(self, add: Callable[["RequestTrace"], None]) -> None:
        """Calls `add` at once if the trace is exported, or when that is decided. `add` records spans."""
        self._record(partial(add, self))

    def describe(self, describe: Callable[["RequestTrace"], None]) -> None:
        """Calls `describe` before the span of the request is exported. `describe` sets attributes."""
        self._descriptions.append(describe)

    def _record(self, make: Callable[[], None]) -> None:
        """Defers the work for spans: most traces are dropped."""
        self._num_records += 1
        if self._num_records > MAX_RECORDS:
            return
        if self.is_kept:
            make()
        elif not self._has_ended:
            self._records.append(make)

    def _export(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        error: str,
        attributes: Attributes,
        events: Sequence[SpanEvent],
        service: str,
    ) -> None:
        self._tracer.exporter.export(
            Span(
                trace_id=self.identity.trace_id,
                span_id=new_span_id(),
                parent_id=self.root_id,
                name=name,
                start_s=start_s + self._unix_offset_s,
                end_s=end_s + self._unix_offset_s,
                error=error,
                attributes=attributes,
                events=events,
                service=service,
            )
        )

    def event(self, name: str, at_s: float, attributes: Attributes = NO_ATTRIBUTES) -> SpanEvent:
        """Returns an event of a span."""
        return SpanEvent(name, at_s + self._unix_offset_s, attributes)

    def keep(self) -> None:
        """Exports the spans so far, and all later ones."""
        self.is_kept = True
        records, self._records = self._records, []
        for make in records:
            make()

    def fail(self, error: str) -> None:
        """Records why the request failed."""
        self.error = error
        self.keep()

    def hand_over(self) -> None:
        """Leaves the span of the request to the router at which the stream is resumed. No client resumes what outlives it."""
        self._is_handed_over = not self._outlives_request

    def first_token(self, seconds: float) -> None:
        """Records the first token, `seconds` after the arrival."""
        self.attributes.setdefault(_FIRST_TOKEN, seconds)
        if seconds > self._tracer.rules.slow_s:
            self.keep()

    def end_later(self) -> Callable[[], None]:
        """Keeps the span open after the HTTP request, until the returned function is called, once."""
        self._num_ends += 1
        self._outlives_request = True
        return self.end

    def end(self) -> None:
        """Ends the span of the request, except if a resumed stream continues it elsewhere."""
        self._num_ends -= 1
        if self._num_ends:
            return
        self._tracer.forget(self)
        now, identity = self._tracer.clock(), self.identity
        has_token = _FIRST_TOKEN in self.attributes or self._resumed is not None
        if not has_token and now - self._arrived_s > self._tracer.rules.slow_s:
            self.keep()
        if self._num_records > MAX_RECORDS:
            self.attributes["phalanx.dropped_spans"] = self._num_records - MAX_RECORDS
        if self.is_kept and not self._is_handed_over:
            for describe in self._descriptions:
                describe(self)
            self._export_root(identity, self.name, self._arrived_s + self._unix_offset_s, now)
            resumed = self._resumed
            if resumed is not None and self._is_only_holder:
                self._export_root(resumed, self.resumed_name, resumed.arrived_s, now)
        self._records, self._descriptions, self._has_ended = [], [], True

    @property
    def root_id(self) -> str:
        """The span of the request that began the stream."""
        return self.identity.span_id if self._resumed is None else self._resumed.span_id

    def _export_root(self, identity: Trace, name: str, start_s: float, end_s: float) -> None:
        span = Span(
            trace_id=identity.trace_id,
            span_id=identity.span_id,
            parent_id=identity.parent_id,
            name=name,
            start_s=start_s,
            end_s=end_s + self._unix_offset_s,
            kind="server",
            error=self.error,
            attributes=self.attributes,
        )
        self._tracer.exporter.export(span)


class Tracer:
    """Open traces of one process. `clock`: monotonic seconds."""

    def __init__(
        self,
        exporter: SpanExporter,
        rules: SamplingRules,
        clock: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.exporter = exporter
        self.rules = rules
        self.clock = clock
        self._unix_s = unix_s
        self._open: dict[str, RequestTrace] = {}

    def open(self, traceparent: str, name: str) -> RequestTrace:
        """Starts the trace of a request, below the client's span if it sent one."""
        identity = start_trace(
            parse_traceparent(traceparent) if traceparent else None,
            trace_id=f"{random.getrandbits(128) or 1:032x}",
            span_id=new_span_id(),
            ratio=self.rules.ratio,
            arrived_s=self._unix_s(),
        )
        trace = RequestTrace(self, identity, name)
        self._open[identity.span_id] = trace
        return trace

    def find(self, identity: Trace | None) -> RequestTrace | None:
        """Returns the open trace of a request."""
        return None if identity is None else self._open.get(identity.span_id)

    def add_alias(self, span_id: str, trace: RequestTrace) -> None:
        """Lets `find` return `trace` for another span, too."""
        self._open[span_id] = trace

    def forget(self, trace: RequestTrace) -> None:
        """Removes an ended trace."""
        for span_id in (trace.identity.span_id, trace.root_id):
            if self._open.get(span_id) is trace:
                del self._open[span_id]

    def close(self) -> None:
        """Sends what is queued."""
        self.exporter.close()


def new_span_id() -> str:
    """Returns a random span id: 16 hexadecimal digits."""
    return f"{random.getrandbits(64) or 1:016x}"
