"""One span of a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server"]
NO_ATTRIBUTES: Attributes = {}


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    at_s: float
    """Unix time."""
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a request's time."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: the first span of its trace."""
    name: str
    start_s: float
    """Unix time."""
    end_s: float
    kind: Kind = "internal"
    error: str = ""
    """Why the part failed."""
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    service: str = ""
    """The group whose time it is; empty: this process."""
