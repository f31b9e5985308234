"""Frames of a move, the migration of a running request to another group.

    router                 target leader            source leader
      | Prepare(move, request) ->|                        |        reserves pages
      |<- Prepared               |                        |
      | MoveOut ------------------------------------------>|       copies full pages while decoding
      |                          |<== pages, rank to rank =|
      |<- Tokens up to n, then Frozen(n) ------------------|       copies the last pages
      |<- Arrived(n)             |                         |
      commit: increments the epoch
      | Submit(request at n, move) ->|                     |       continues at n
      | Release ------------------------------------------>|       ends here
    before the commit Thaw and Cancel undo all; after it the loss of the target causes a replay

A pull fetches a cached prefix for a request that has not started; its source runs no such request:

    router                 target leader            holder's leader
      | Prepare, Prepared as above                    |
      | SendPrefix ----------------------------------->|       holds the cached pages until they are sent
      |                          |<== pages, rank to rank =|
      |<- Arrived(n)             |                         |
      | Submit(request, move) -->|                         |       computes from n on
      | Release ------------------------------------------>|
    until Arrived Thaw and Cancel undo all; then the request starts without the pages

Only the router that owns the stream commits. `move` is unique over routers.
"""

from typing import Literal

import msgspec

MoveMode = Literal["stop", "precopy"]
"""stop: freeze, then copy. precopy: copy while the source decodes, freeze when little is left."""


class PageAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank of the target receives pages."""

    host: str
    port: int


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared", kw_only=True):
    """From the target: pages are reserved."""

    move: str
    cached_tokens: int  # in the target's prefix cache
    addresses: list[PageAddress]
    key: bytes  # for one transfer to each address
    capacity_tokens: int = 0  # the source freezes before it exceeds them; 0: unknown


class MoveOut(msgspec.Struct, frozen=True, array_like=True, tag="move_out", kw_only=True):
    """To the source: send the request's pages."""

    move: str
    handle: int
    epoch: int
    prepared: Prepared
    mode: MoveMode = "precopy"
    bytes_per_s: float | None = None  # bound over all ranks
    answer_s: float = 0.0  # added to the time for which the request may be frozen: groups answer between steps


class SendPrefix(msgspec.Struct, frozen=True, array_like=True, tag="send_prefix", kw_only=True):
    """To the holder of a prefix: send its pages. Only to a leader with `Welcome.can_send_prefixes`."""

    move: str
    prepared: Prepared
    keys: list[bytes]  # `phalanx_api.prefix`, from the first page on, those that the target has included
    bytes_per_s: float | None = None  # bound over all ranks


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen", kw_only=True):
    """From the source, after its last token: the request computes no more."""

    move: str
    epoch: int
    num_output: int  # output tokens
    num_computed: int  # prompt and output tokens in the pages to send
    tail_s: float = 0.0  # expected time of the remaining copy


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """From the target: all ranks have verified pages of `num_computed` tokens."""

    move: str
    num_computed: int
    num_bytes: int = 0  # transferred


class MoveFailed(msgspec.Struct, frozen=True, array_like=True, tag="move_failed"):
    """From either side: the move failed; a source continues the request."""

    move: str
    code: str
    """no_room, ended, preempted, not_converging, lease, target_lost, source_lost, checksum, incompatible, replaced, evicted or
    unknown."""
    why: str


class Thaw(msgspec.Struct, frozen=True, array_like=True, tag="thaw"):
    """To the source: the move is cancelled; continue the request. To a holder: stop sending."""

    move: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """To the source: the request runs at the target. To a holder: its pages have arrived."""

    move: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """To the target: the move is cancelled."""

    move: str


TransferFrame = Prepared | MoveOut | SendPrefix | Frozen | Arrived | MoveFailed | Thaw | Release | Cancel
"""Frames with the id of one move."""


class RescueRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask_rescue"):
    """From a leader: these requests, in order, would be preempted in `within_s`."""

    handles: list[int]
    within_s: float
