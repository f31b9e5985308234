"""What the two ends of a move at a leader have in common: bounds, what a machine is told, and what it asks to be done.

The frames and the protocol are in `phalanx_api.moves`. A machine decides and has no effects: whoever owns it (the engine loop, or
a test in virtual time) tells it what happened and does what it asks, each action once, in order. Nothing it is told late, twice
or about a move that it does not know does harm.
"""

from dataclasses import dataclass

from phalanx_api import moves, wire


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Bounds of moves at a leader. Seconds, pages, tokens.

    max_rounds, tail_pages: full pages are copied at most so often while the request computes; it is frozen when so few are left,
    or when the rest takes no longer than a step. longest_tail_s: after the last round a longer rest is not waited for.
    stall_s: a copy of which nothing was heard for so long has failed. frozen_s: a frozen request goes on by itself when neither
    Thaw nor Release came so long after its pages should have been there. Longer than a router waits for Arrived.
    growth_tokens: room that a target keeps for what the source computes meanwhile. slow_pages_per_s: assumed before a copy.
    """

    max_rounds: int = 3
    tail_pages: int = 16
    longest_tail_s: float = 0.25
    stall_s: float = 5.0
    frozen_s: float = 1.0
    growth_tokens: int = 64
    slow_pages_per_s: float = 200.0


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Where a request is: tokens it has, tokens in its pages, and how long a step takes."""

    num_tokens: int
    num_computed: int
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send this frame to the router of the move."""

    frame: moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed
    why: str


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Every rank sends pages [first, end) of the request to its address, and says when they are there.

    `num_computed` comes with the last copy of a move: so many tokens the target has when these pages are in.
    """

    asked: moves.MoveOut
    first: int
    end: int
    num_computed: int | None
    why: str


@dataclass(frozen=True, slots=True)
class StopCopy:
    """Ranks forget the copy and close what they opened for it."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """No step that is planned from now on has the request; tell `stopped` when it is in none. It keeps its pages."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Unfreeze:
    """The request may be in steps again."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseMoved:
    """The request runs elsewhere: it ends here without a word, and its pages stay in the prefix cache."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take pages for so many tokens, hold those of the request's prefix that are here, let the ranks expect the rest under a
    one-time key; then tell `reserved` or `refused`."""

    asked: wire.Prepare
    num_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the reserved pages back and let the ranks refuse the key."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class StartMoved:
    """The request starts here, on the reserved pages of the move, with so many tokens computed."""

    move: str
    handle: int
    request: wire.Request
    num_computed: int
    why: str


SourceAction = SendFrame | StartCopy | StopCopy | Freeze | Unfreeze | ReleaseMoved
TargetAction = SendFrame | Reserve | Drop
