"""Frames of a move: a running request goes from one group to another, and its pages go from rank to rank.

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

The router that owns the stream is the commit authority: a target never starts without its Submit, and a source that was frozen
goes on only after Thaw, or ends after Release. Whatever is lost, the journal at the router suffices to go on anywhere.
Moves are named by `move`, unique for the router: its name and a number.
"""

from typing import Literal

import msgspec

MoveMode = Literal["stop", "precopy"]
"""stop: freeze, then copy all. precopy: copy full pages while the source decodes, freeze when little is left."""


class PageAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank of the target takes pages in: host and TCP port. Rank i of the source sends to rank i of the target."""

    host: str
    port: int


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared"):
    """The target has room: `held_tokens` of the request lie in its pages already and need not come.

    `key` is good for one transfer to each address, within the lease.
    """

    move: str
    held_tokens: int
    addresses: list[PageAddress]
    key: bytes
    room_tokens: int = 0
    """Tokens that the reserved pages hold, those held already included; 0: not told. The source freezes before it passes them."""


class MoveOut(msgspec.Struct, frozen=True, array_like=True, tag="move_out"):
    """To the source: send this request's pages. `bytes_per_s` bounds all its ranks together; None is no bound."""

    move: str
    handle: int
    epoch: int
    prepared: Prepared
    mode: MoveMode = "precopy"
    bytes_per_s: float | None = None


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen"):
    """From the source, after the last token: the request has `num_output` output tokens, computes no more, and keeps its pages.

    `num_computed` tokens of it, prompt and output together, are in the pages that it sends. `tail_s`: how long the pages that
    are still to come should take.
    """

    move: str
    epoch: int
    num_output: int
    num_computed: int
    tail_s: float = 0.0


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """From the target: every rank has the pages of `num_computed` tokens, checked. `num_bytes` of them came over the network."""

    move: str
    num_computed: int
    num_bytes: int = 0


class MoveFailed(msgspec.Struct, frozen=True, array_like=True, tag="move_failed"):
    """From either: this move comes to nothing here, and its reservation or copy is gone. A source goes on as before.

    `code` is machine-readable: no_room, ended, preempted, not_converging, lease, target_lost, source_lost, checksum,
    incompatible, replaced, unknown.
    """

    move: str
    code: str
    why: str


class Thaw(msgspec.Struct, frozen=True, array_like=True, tag="thaw"):
    """To the source: the move is off, go on."""

    move: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """To the source: the request runs elsewhere now; its pages become cached ones."""

    move: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """To the target: the move is off, the reservation is void."""

    move: str


class AskRescue(msgspec.Struct, frozen=True, array_like=True, tag="ask_rescue"):
    """From a leader: pages run out within `within_s`; these requests would be preempted, the first one first."""

    handles: list[int]
    within_s: float
