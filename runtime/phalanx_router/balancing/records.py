"""Inputs and outputs of balancing."""

from dataclasses import dataclass
from typing import Literal

from phalanx_router.moves.records import TransferMode

Rung = Literal["rescue", "replicate", "migrate", "evacuate"]
"""Reason for a move: imminent preemption, hot prefix, hotspot, evacuation."""
OPTIONAL_RUNGS: tuple[Rung, ...] = ("replicate", "migrate")
"""Limited by the token budget."""
HotspotAction = Literal["none", "steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate", "scale"]
"""Rungs of the ladder; `weigh`: routing includes the relative step time."""
RefusalCode = Literal["mode", "saturated", "pingpong", "slots", "bytes", "tokens", "no_target", "no_victim", "stale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """Snapshot of one stream of this router."""

    stream: str  # unique for the lifetime of the router
    key: str  # of its group
    context: int  # prompt and output tokens
    generated: int  # output tokens
    num_moves: int = 0  # by balancing
    moved_at: float | None = None
    last_source: str = ""  # group key
    is_pinned: bool = False  # must not move
    barred_targets: frozenset[str] = frozenset()  # keys of groups that lack its adapter, or that it has left a moment ago
    has_hot_prefix: bool = False  # its prompt begins with the hot prefix of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """A move of one stream. `source`, `target`: group keys."""

    stream: str
    source: str
    target: str
    transfer: TransferMode
    rung: Rung
    context: int
    bytes_per_s: float | None  # transfer cap
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopy:
    """A copy of the hot prefix of group `source` to group `target`, by a pull; no stream moves."""

    stream: str  # begins with the prefix
    source: str
    target: str
    num_pages: int
    bytes_per_s: float | None  # transfer cap
    why: str


@dataclass(frozen=True, slots=True)
class NoMove:
    """The reason for no (further) moves from a group."""

    source: str
    rung: Rung
    code: RefusalCode
    why: str
