"""Inputs and outputs of balancing beside `routing.view`: streams, proposed moves, refusals."""

from dataclasses import dataclass
from typing import Literal

from phalanx_api.moves import MoveMode

Rung = Literal["rescue", "replicate", "migrate", "evacuate"]
"""Reasons for a move: an imminent preemption, a hot prefix, a hotspot, a group that is being emptied."""
OPTIONAL_RUNGS: tuple[Rung, ...] = ("replicate", "migrate")
"""Optional moves, limited by the token budget and by the moves of a stream."""
TransferMode = MoveMode | Literal["recompute"]
"""Transfer of a request: with its pages (`phalanx_api.moves.MoveMode`), or recomputed from its tokens."""
RefusalCode = Literal["mode", "saturated", "pingpong", "slots", "bytes", "tokens", "no_target", "no_victim", "stale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """A snapshot of one stream of this router."""

    stream: str  # unique for the lifetime of the router
    key: str  # of the current group
    context: int  # tokens in pages, prompt and output
    generated: int  # output tokens; 0 before the first
    moves: int = 0  # by balancing
    moved_s: float | None = None  # time of the last move
    left: str = ""  # key of the source of the last move
    is_pinned: bool = False  # must not move, for example because a move is under way
    barred: frozenset[str] = frozenset()  # keys of groups that must not be its target
    has_prefix: bool = False  # whether the prompt begins with the heaviest prefix of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """Move one stream between groups. `source` and `target` are keys of views."""

    stream: str
    source: str
    target: str
    way: TransferMode
    rung: Rung
    context: int
    bytes_per_s: float | None  # transfer cap; `None` is unlimited
    why: str


@dataclass(frozen=True, slots=True)
class NoMove:
    """The reason for no (further) moves from a group. `code` is machine-readable, `why` a sentence."""

    source: str
    rung: Rung
    code: RefusalCode
    why: str
