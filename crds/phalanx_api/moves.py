"""Frames of a move: a running request migrates to another group, and its pages are copied from rank to rank.

    router                 target leader            source leader
      | Prepare(move, request) ->|                        |        pages reserved, those found in its cache held
      |<- Prepared               |                        |
      | MoveOut ------------------------------------------>|       full pages are copied while it decodes, round by round
      |                          |<== pages, rank to rank =|
      |<- Tokens up to n, then Frozen(n) ------------------|       no further step; the last pages follow
      |<- Arrived(n)             |                         |
      commit: the epoch rises
      | Submit(request at n, move) ->|                     |       starts at n with the pages that arrived
      | Release ------------------------------------------>|
    before the commit: Thaw to the source and Cancel to the target undo all; after it a lost target is a replay

The router that owns the stream commits the move: a target never starts without its Submit, and a frozen source continues only
after Thaw, or ends after Release. Whatever is lost, the router's journal suffices to continue anywhere. `move` names a move: the
router's name and a number.
"""

from typing import Literal

import msgspec

MoveMode = Literal["stop", "precopy"]
"""stop: freeze, then copy all pages. precopy: copy full pages while the source decodes, freeze when little is left."""


class PageAddress(msgspec.Struct, frozen=True, array_like=True):
    """Host and TCP port where a rank of the target receives pages. Rank i of the source sends to rank i of the target."""

    host: str
    port: int


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared", kw_only=True):
    """The target reserved pages: `held_tokens` of the request are in its cache and need no copy.

    `key` is valid for one transfer to each address, within the lease.
    """

    move: str
    held_tokens: int
    addresses: list[PageAddress]
    key: bytes
    room_tokens: int = 0
    """Tokens that the reserved pages hold, cached ones included; 0: unknown. The source freezes before it exceeds them."""


class MoveOut(msgspec.Struct, frozen=True, array_like=True, tag="move_out", kw_only=True):
    """To the source: send this request's pages. `bytes_per_s` bounds all its ranks together."""

    move: str
    handle: int
    epoch: int
    prepared: Prepared
    mode: MoveMode = "precopy"
    bytes_per_s: float | None = None


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen", kw_only=True):
    """From the source, after the last token: the request has `num_output` output tokens, computes no more, and keeps its pages.

    `num_computed`: prompt and output tokens in the pages that it sends. `tail_s`: expected time of the remaining pages.
    """

    move: str
    epoch: int
    num_output: int
    num_computed: int
    tail_s: float = 0.0


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """From the target: every rank has verified pages of `num_computed` tokens; `num_bytes` came over the network."""

    move: str
    num_computed: int
    num_bytes: int = 0


class MoveFailed(msgspec.Struct, frozen=True, array_like=True, tag="move_failed"):
    """From either side: the move failed here, and its reservation or copy is freed. A source continues.

    `code` is machine-readable: no_room, ended, preempted, not_converging, lease, target_lost, source_lost, checksum,
    incompatible, replaced, unknown.
    """

    move: str
    code: str
    why: str


class Thaw(msgspec.Struct, frozen=True, array_like=True, tag="thaw"):
    """To the source: the move is cancelled, continue."""

    move: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """To the source: the request runs at the target; its pages become cached ones."""

    move: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """To the target: the move is off, the reservation is void."""

    move: str


class AskRescue(msgspec.Struct, frozen=True, array_like=True, tag="ask_rescue"):
    """From a leader: pages run out within `within_s`; these requests would be preempted, the first one first."""

    handles: list[int]
    within_s: float
