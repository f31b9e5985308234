"""Inputs and actions of a move."""

from dataclasses import dataclass
from typing import Literal

from phalanx_api import moves, wire
from phalanx_api.moves import MoveMode

TransferMode = MoveMode | Literal["recompute"]
"""Frozen before the copy of pages; copied while the source computes; without pages: the target computes all tokens."""
MoveReason = Literal["rescue", "drain", "hotspot", "manual"]
Outcome = Literal["moved", "refused", "timeout", "source", "target", "stream"]
"""The target has the stream; it refused; a timeout; the source or target gave up or was lost; the stream ended or left its
group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """Time limits of moves. "Plus steps": and `answer_s` of the longest recent step, as groups answer between steps."""

    prepare_s: float = 1.0  # until Prepared, plus steps
    copy_s: float = 60.0  # until Frozen
    ready_s: float = 0.2  # from Frozen until Arrived, plus steps and twice `tail_s`
    answer_steps: int = 3  # one runs, one is queued behind it, one is planned
    max_answer_s: float = 2.0  # most that steps add: longer steps end a move, and its stream continues
    start_s: float = 3.0  # from the commit until a load report of the target covers the request, plus steps
    lease_s: float = 10.0  # of the target's pages without a frame of the move
    linger_s: float = 30.0  # memory of an ended move

    def answer_s(self, step_s: float) -> float:
        """Returns what steps of `step_s` add to a time limit."""
        return min(self.answer_steps * step_s, self.max_answer_s)


DEFAULT_MOVE_SETTINGS = MoveSettings()


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Location of a stream."""

    key: str  # of the link
    handle: int  # on that link
    epoch: int
    num_delivered: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequest:
    """An order to move a stream."""

    move: str  # id
    position: StreamPosition  # at the source
    target: str  # group key
    transfer: TransferMode
    reason: MoveReason
    bytes_per_s: float | None = None  # transfer cap
    step_s: float = 0.0  # longest recent step of both groups


@dataclass(frozen=True, slots=True)
class ToSource:
    """Send a frame to the source of a move or the holder of a pull."""

    frame: moves.MoveOut | moves.SendPrefix | moves.Thaw | moves.Release
    why: str


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send a frame to the target."""

    frame: wire.Prepare | moves.Cancel
    why: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Submit all tokens to the target for its prefix cache."""

    move: str
    why: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Submit the request to the target in the next epoch."""

    move: str  # its pages; empty without
    why: str


@dataclass(frozen=True, slots=True)
class EndSource:
    """Send Release and Abort to the source."""

    move: str
    handle: int
    why: str


@dataclass(frozen=True, slots=True)
class CommitNotAccepted:
    """The target did not accept the committed request."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded:
    """The move has ended."""

    move: str
    outcome: Outcome
    code: str
    why: str
    num_bytes: int = 0
    stall_s: float | None = None  # from the last token of the source to the first of the target


Action = ToSource | ToTarget | Warm | Commit | EndSource | CommitNotAccepted | MoveEnded
