"""Limits, inputs and actions of the state machines of a move (`phalanx_api.moves`).

Their owner reports events and executes each action once, in order. Late, repeated or unknown events have no effect.
"""

from dataclasses import dataclass

from phalanx_api import moves, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """Limits of moves at a leader."""

    max_rounds: int = 3
    """Rounds of copies while the request computes."""
    tail_pages: int = 16
    """Pages left at which the request is frozen."""
    max_tail_s: float = 0.25
    """Copy time after the last round beyond which the move fails."""
    stall_s: float = 5.0
    """Timeout of a copy without progress."""
    frozen_s: float = 1.0
    """Timeout of a frozen request for Thaw or Release, after which it continues; exceeds a router's timeout for Arrived.
    `MoveOut.answer_s` and twice the time of the tail are added to both."""
    growth_tokens: int = 64
    """Room at the target for tokens computed during the copy."""
    initial_pages_per_s: float = 200.0
    """Assumed rate before the first copy."""
    state_pages: int = 0
    """Pages that take as long to copy as the states of a request, which follow its last page."""


DEFAULT_LIMITS = MoveLimits()


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """State of a request, and the time of a step."""

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
    """Let every rank send pages [first, end) of the request."""

    order: moves.MoveOut
    first: int
    end: int
    num_computed: int | None
    """Set in the last copy of a move: the tokens at the target."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSend:
    """Let every rank send the held pages of a prefix from position `first` on, in one order."""

    order: moves.SendPrefix
    first: int
    num_computed: int
    """Tokens in all held pages."""
    why: str


@dataclass(frozen=True, slots=True)
class ReleasePrefix:
    """Release the held pages of a prefix."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class StopCopy:
    """Let every rank end the copy."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """Plan no further step of the request; report `stopped` when it is in no running step."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Unfreeze:
    """Let the request continue."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseMoved:
    """End the request here silently: it runs at the target."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve pages for `num_tokens`, let the ranks expect the uncached ones, and report `reserved` or `refused`."""

    order: wire.Prepare
    num_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the reserved pages and let the ranks reject the key."""

    move: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMoved:
    """Start the request on the reserved pages, which hold `num_computed` tokens of `num_sent` that the source had computed."""

    move: str
    handle: int
    request: wire.Request
    num_computed: int
    num_sent: int
    num_received: int
    """Tokens that the ranks received, without those that were cached here: a state that arrives includes these."""
    why: str


SourceAction = SendFrame | StartCopy | StopCopy | Freeze | Unfreeze | ReleaseMoved
TargetAction = SendFrame | Reserve | Drop
PrefixAction = SendFrame | StartSend | StopCopy | ReleasePrefix
