"""Trace of a request: its W3C trace context, and which traces are exported.

    client --traceparent--> router: span of the request, the parent of all others
                            router, group: queue, prefill, decode, moves, replays

Source: W3C Trace Context, Recommendation of 2021. Spans of groups are made by routers, from times in frames, so that one process
decides whether a trace is exported.
"""

import re
from dataclasses import dataclass

import msgspec

SAMPLED = 1
"""Flag of a traceparent."""
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?")
_TRACE_BITS = 56
"""Random bits of a trace id that decide on its sampling."""


class Trace(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Identity of a trace and of the span of its request."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    parent_id: str = ""  # the client's span
    arrived_s: float = 0.0  # Unix time of the request's arrival
    is_sampled: bool = False  # exported in any case

    def traceparent(self) -> str:
        """Returns the header with which others add spans below that of the request."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """The client's span."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(header: str) -> ParentSpan | None:
    """Returns the client's span; null without a valid header, which starts a new trace."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found[5]):
        return None
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return ParentSpan(found["trace"], found["span"], bool(int(found["flags"], 16) & SAMPLED))


def start_trace(parent: ParentSpan | None, *, trace_id: str, span_id: str, ratio: float, arrived_s: float) -> Trace:
    """Returns the trace of a new request. `trace_id`, `span_id`: random ones; `ratio`: share of the traces without a parent.

    A parent decides, because its own spans are exported or not.
    """
    if parent is not None:
        return Trace(
            trace_id=parent.trace_id,
            span_id=span_id,
            parent_id=parent.span_id,
            arrived_s=arrived_s,
            is_sampled=parent.is_sampled,
        )
    return Trace(trace_id=trace_id, span_id=span_id, arrived_s=arrived_s, is_sampled=is_in_sample(trace_id, ratio))


def is_in_sample(trace_id: str, ratio: float) -> bool:
    """Returns whether a trace is among this share of all: equal in all processes, and true for a larger share too."""
    return int(trace_id, 16) % (1 << _TRACE_BITS) < ratio * (1 << _TRACE_BITS)


class ChunkTime(msgspec.Struct, frozen=True, array_like=True):
    """A prefill chunk of a traced request."""

    started_ago_s: float  # before the frame was made
    ended_ago_s: float
    tokens: int


class PrefillTime(msgspec.Struct, frozen=True, array_like=True):
    """Times of a traced request at its group, up to its first token there."""

    submitted_ago_s: float  # before the frame was made
    chunks: list[ChunkTime]
