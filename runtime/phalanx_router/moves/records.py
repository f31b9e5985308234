"""Inputs, actions and outcomes of a move at the router."""

from dataclasses import dataclass
from typing import Literal

from phalanx_api import moves, wire

TransferMode = Literal["stop", "precopy", "recompute"]
"""With pages, frozen before the copy or copied while the source computes; or without pages: the target recomputes all tokens."""
MoveReason = Literal["rescue", "drain", "hotspot", "asked"]
Outcome = Literal["moved", "refused", "timeout", "source", "target", "stream"]
"""End of a move: the target has the stream; the target refused; a timeout; the source or the target gave up or was lost; the
stream ended or left its group during the move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """Time limits of moves at a router, in seconds."""

    prepare_s: float = 1.0  # until Prepared
    copy_s: float = 60.0  # until Frozen
    ready_s: float = 0.2  # from Frozen until Arrived, plus twice `tail_s`; the stream stalls meanwhile
    start_s: float = 3.0  # from the commit until a load report of the target covers the request
    lease_s: float = 10.0  # the target keeps the pages this long without a frame of the move
    linger_s: float = 30.0  # an ended move is remembered to answer late frames


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Location of a stream: link key, handle on that link, epoch, and number of tokens delivered to the client."""

    key: str
    handle: int
    epoch: int
    num_delivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequest:
    """An order to move a stream from `at` to the group with key `target`. `bytes_per_s` caps the copy; `None` is unlimited."""

    move: str
    at: StreamPosition
    target: str
    how: TransferMode
    why: MoveReason
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ToSource:
    """Send this frame on the link to the source."""

    frame: moves.MoveOut | moves.Thaw
    why: str


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send this frame on the link to the target."""

    frame: wire.Prepare | moves.Cancel
    why: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Submit prompt and output tokens to the target for its prefix cache; report the end with `warmed` or `refused`."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Increment the epoch and submit the request with all delivered tokens to the target, on the pages of `move` unless it is
    empty. `EndSource` follows."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class EndSource:
    """Send Release of the move and Abort of the handle to the source: the target has the request."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The target did not accept the request after the commit: the stream has lost its group."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded:
    """The move has ended. `stall_s`: after a completed move, time between the last token of the source and the first of the
    target."""

    move: str
    outcome: Outcome
    code: str
    why: str
    num_bytes: int = 0
    stall_s: float | None = None


Action = ToSource | ToTarget | Warm | Commit | EndSource | TargetLost | MoveEnded
