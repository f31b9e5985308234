"""Limits, inputs and actions that both ends of a move share.

`phalanx_api.moves` defines the frames and the protocol. A state machine decides and has no effects: its owner (the engine loop,
or a test in virtual time) reports events and executes each action once, in order. Late, repeated or unknown events are harmless.
"""

from dataclasses import dataclass

from phalanx_api import moves, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """Limits of moves at a leader. Seconds, pages, tokens."""

    max_rounds: int = 3
    """Rounds of copying full pages while the request computes."""
    tail_pages: int = 16
    """The request is frozen when at most this many pages are left, or when copying them takes no longer than a step."""
    longest_tail_s: float = 0.25
    """Longest tail after the last round; with a longer one the move fails."""
    stall_s: float = 5.0
    """A copy without progress for this long has failed."""
    frozen_s: float = 1.0
    """A frozen request continues if Thaw or Release is this late. Longer than a router waits for Arrived."""
    growth_tokens: int = 64
    """Room at the target for tokens that the source computes meanwhile."""
    slow_pages_per_s: float = 200.0
    """Assumed rate before the first copy."""


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """State of a request: its tokens, the tokens in its pages, and the time of a step."""

    num_tokens: int
    num_computed: int
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send this frame to the router of the move."""

    frame: moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCopy:
    """Every rank sends pages [first, end) of the request to its address, and reports when they have arrived.

    `num_computed` is set for the last copy of a move: the tokens that the target then has.
    """

    asked: moves.MoveOut
    first: int
    end: int
    num_computed: int | None
    why: str


@dataclass(frozen=True, slots=True)
class StopCopy:
    """Ranks drop the copy and close its connections."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """No step planned from now on has the request; `stopped` is due when no running step has it. It keeps its pages."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Unfreeze:
    """Steps may have the request again."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseMoved:
    """The request runs at the target: it ends here silently, and its pages stay in the prefix cache."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate pages for `num_tokens`, reference cached pages of the request's prefix, and let the ranks expect the others under
    a one-time key; then report `reserved` or `refused`."""

    asked: wire.Prepare
    num_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the reserved pages and let the ranks reject the key."""

    move: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMoved:
    """The request starts here on the reserved pages of the move, with `num_computed` tokens."""

    move: str
    handle: int
    request: wire.Request
    num_computed: int
    why: str


SourceAction = SendFrame | StartCopy | StopCopy | Freeze | Unfreeze | ReleaseMoved
TargetAction = SendFrame | Reserve | Drop
