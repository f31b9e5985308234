"""What a move at the router is made of: where a stream is, what was proposed, what is to be done, and how it ended."""

from dataclasses import dataclass
from typing import Literal

from phalanx_api import moves, wire

How = Literal["stop", "precopy", "recompute"]
"""With pages, frozen first or copied while it computes; or without pages: the target computes prompt and tokens again."""
Why = Literal["rescue", "drain", "hotspot", "asked"]
Outcome = Literal["moved", "refused", "timeout", "source", "target", "stream"]
"""How a move ended: the stream is at the target; the target has no room; somebody did not answer; the source or the target gave
up or was lost; the stream ended or left its group meanwhile."""


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """Bounds of moves at a router, in seconds.

    prepare_s: until Prepared. copy_s: until Frozen. ready_s: from Frozen until Arrived, twice the tail's time added: until
    then the stream stands still. start_s: from the commit until the target's reports show that it took the request.
    lease_s: how long a target keeps its pages of a move of which it hears nothing. linger_s: how long a move that is over is
    known.
    """

    prepare_s: float = 1.0
    copy_s: float = 60.0
    ready_s: float = 0.2
    start_s: float = 3.0
    lease_s: float = 10.0
    linger_s: float = 30.0


@dataclass(frozen=True, slots=True)
class StreamAt:
    """Where a stream is: the link's key, its handle there, the epoch, and how many tokens the client's side has."""

    key: str
    handle: int
    epoch: int
    num_delivered: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A stream is to go from where it is to the group of `target`. `bytes_per_s` bounds its copy; None is no bound."""

    move: str
    at: StreamAt
    target: str
    how: How
    why: Why
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ToSource:
    """Send this frame on the link of the source."""

    frame: moves.MoveOut | moves.Thaw
    why: str


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send this frame on the link of the target."""

    frame: wire.Prepare | moves.Cancel
    why: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Let the target compute prompt and tokens so far, for its prefix cache; tell `warmed` when it did or will not."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The epoch rises now. The request, with all tokens delivered so far, goes to the target, on the pages of `move` if it is
    not empty; then the source is told to let go (`EndSource` follows)."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class EndSource:
    """Send Release of the move and Abort of the handle to the source: the request runs elsewhere."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Unheard:
    """The target never took the request: its stream has lost its group."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Over:
    """The move is over. `stall_s`: from the last token before it to the first one after it, when it moved."""

    move: str
    outcome: Outcome
    code: str
    why: str
    num_bytes: int = 0
    stall_s: float | None = None


Action = ToSource | ToTarget | Warm | Commit | EndSource | Unheard | Over
