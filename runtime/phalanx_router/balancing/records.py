"""What balancing looks at beside `route.view`, and what it answers: streams, proposals, and why there is none."""

from dataclasses import dataclass
from typing import Literal

from phalanx_api.moves import MoveMode

Rung = Literal["rescue", "replicate", "migrate", "evacuate"]
"""A group that is about to preempt, one prefix that many ask for, a hotspot, a group that is to be emptied."""
FOR_BALANCE: tuple[Rung, ...] = ("replicate", "migrate")
"""Moves that nobody needs to make: they are counted against the tokens that may move, and against those of a stream."""
Way = MoveMode | Literal["recompute"]
"""How a request gets there: with its pages, as `phalanx_api.moves` has it, or its tokens only, computed anew."""
RefusalCode = Literal["mode", "saturated", "pingpong", "slots", "bytes", "tokens", "no_target", "no_victim", "stale"]


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of this router as of now.

    stream: names it for ever. key: of the group that has it. context: tokens in pages, prompt and output. generated: output
    tokens; 0 has not begun. moves: how often balancing has moved it. moved_s, left: when it was last moved, and the key of the
    group that it left then. is_pinned: it stays, because it is moving. barred: keys of groups where it may not go.
    has_prefix: its prompt begins with the heaviest prefix of its group.
    """

    stream: str
    key: str
    context: int
    generated: int
    moves: int = 0
    moved_s: float | None = None
    left: str = ""
    is_pinned: bool = False
    barred: frozenset[str] = frozenset()
    has_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """Move this stream from one group to another. `source` and `target` are keys of views.

    bytes_per_s: bound of its transfer; None is no bound.
    """

    stream: str
    source: str
    target: str
    way: Way
    rung: Rung
    context: int
    bytes_per_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing (more) leaves this group now. `code` is machine-readable, `why` a sentence."""

    source: str
    rung: Rung
    code: RefusalCode
    why: str
