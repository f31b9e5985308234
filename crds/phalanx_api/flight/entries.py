"""Records of the flight recorder. `at`: seconds of the writer's clock, at the end of what the record describes.

They hold counts, times, names of groups and ids of requests (`shown_id`); no prompt and no output.
"""

import re
from typing import Literal

import msgspec

_RANDOM_BITS = re.compile(r"(?<=[-~])([0-9a-f]{8})[0-9a-f]{24}$")


def shown_id(request: str) -> str:
    """Returns the id of a request without most of its random digits, of which all permit to resume its stream."""
    return _RANDOM_BITS.sub(r"\1", request)


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="rank_step", kw_only=True):
    """A rank computed its part of a step; with a device queue, `seconds` ends when the work is queued."""

    at: float
    step: int
    seconds: float
    tokens: int
    requests: int
    loads: int = 0  # pages, or parts, copied from host memory
    stores: int = 0  # pages, or parts, copied to host memory
    copies: int = 0  # pages, or parts, copied on write
    waited_s: float = 0.0  # for copies


class EngineStep(msgspec.Struct, frozen=True, array_like=True, tag="engine_step", kw_only=True):
    """A step of an engine, from the start of its plan, or the end of the step before if that is later, to its result."""

    at: float
    step: int
    seconds: float
    expected_s: float | None  # by the cost model
    decodes: int  # requests with a token to sample
    prefill_tokens: int
    draft_tokens: int
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    loaded_pages: int = 0  # by rank 0 from host memory
    load_s: float = 0.0


class Preemption(msgspec.Struct, frozen=True, array_like=True, tag="preemption", kw_only=True):
    """Running requests returned their pages to the pool."""

    at: float
    requests: list[str]  # ids
    free_pages: int  # after it


class PageTransfer(msgspec.Struct, frozen=True, array_like=True, tag="page_transfer", kw_only=True):
    """A group's part in a move or a pull."""

    at: float
    move: str  # id, equal at router, source and target
    phase: str


class Dispatch(msgspec.Struct, frozen=True, array_like=True, tag="dispatch", kw_only=True):
    """A router sent a request to a group."""

    at: float
    request: str  # id
    group: str
    reason: str
    cost_s: float  # of the chosen group, by the terms below
    first_token_s: float
    decode_s: float
    others_s: float
    pages_s: float
    prompt_tokens: int
    hit_tokens: int
    num_candidates: int
    waited_s: float  # in the router's queue


class HotspotChange(msgspec.Struct, frozen=True, array_like=True, tag="hotspot", kw_only=True):
    """A group became a hotspot, got another cause, or is none any more: an empty cause."""

    at: float
    group: str
    cause: str
    why: str


class MovePlan(msgspec.Struct, frozen=True, array_like=True, tag="move_plan", kw_only=True):
    """Balancing chose a stream to move, or a prefix to copy."""

    at: float
    request: str  # id
    source: str  # groups
    target: str
    rung: str
    transfer: str  # mode; `copy`: of a prefix
    why: str


class MoveRefusal(msgspec.Struct, frozen=True, array_like=True, tag="move_refusal", kw_only=True):
    """Balancing moves nothing from a group, for this reason."""

    at: float
    source: str  # group
    rung: str
    code: str
    why: str


class MoveEnd(msgspec.Struct, frozen=True, array_like=True, tag="move_end", kw_only=True):
    """A move ended."""

    at: float
    move: str  # id
    request: str  # id
    source: str  # groups
    target: str
    reason: str
    transfer: str
    outcome: str
    why: str
    seconds: float
    bytes: int = 0
    stall_s: float | None = None  # from the last token of the source to the first of the target


class Shedding(msgspec.Struct, frozen=True, array_like=True, tag="shedding", kw_only=True):
    """A router refused queued requests."""

    at: float
    requests: int
    why: str


class RequestEnd(msgspec.Struct, frozen=True, array_like=True, tag="request_end", kw_only=True):
    """A request that groups computed for this router ended, with what a simulation needs to repeat it."""

    at: float
    request: str  # id
    arrived_at: float  # on the same clock
    first_token_at: float | None
    prompt_tokens: int
    output_tokens: int
    block_tokens: int  # of each block
    blocks: list[int]  # of the prompt's beginning: equal numbers are equal text, from the first token on; a keyed hash
    moves: int
    replays: int


class GroupSize(msgspec.Struct, frozen=True, array_like=True, tag="group_size", kw_only=True):
    """Size and speed of a group, every 10 s."""

    at: float
    group: str
    total_pages: int
    page_size: int
    page_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_model: list[float]  # coefficients of `phalanx_api.cost.StepModel`; empty: not measured yet
    speed: float  # relative step time; more than 1 is slow
    copy_bytes_per_s: float


class ClockOffset(msgspec.Struct, frozen=True, array_like=True, tag="clock_offset", kw_only=True):
    """How far the Unix clock of a group's leader is ahead of the router's, with at most the delay of the link as error."""

    at: float
    group: str
    ahead_s: float


Entry = (
    RankStep
    | EngineStep
    | Preemption
    | PageTransfer
    | Dispatch
    | HotspotChange
    | MovePlan
    | MoveRefusal
    | MoveEnd
    | Shedding
    | RequestEnd
    | GroupSize
    | ClockOffset
)
ProcessKind = Literal["router", "rank"]


class TimedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry with its Unix time."""

    unix_s: float
    entry: Entry


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one process recorded, oldest first."""

    kind: ProcessKind
    pod: str
    group: str = ""
    rank: int = 0
    entries: list[TimedEntry] = []
    unknown: int = 0  # records of another version
