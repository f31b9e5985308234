"""What rank 0 asks of the ranks that send and take pages, and what they tell it. Records only; `rank` acts on them.

    source: Send (round by round) -> Sent or SendFailed; Stop
    target: Expect -> Expecting, then Came or ComeFailed; Forget -> Forgotten

Position i of a request is its i-th page. Who forgets a move says so only when nothing writes its pages any more, so that they can
be given to others. `step`: the rank has computed it before it reads or writes a page, since it may lag behind rank 0.
"""

import msgspec

from phalanx_api.moves import PageAddress


class ExpectPages(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """Take positions from `first` on into these pages, from who knows the key; once."""

    move: str
    key: bytes
    first: int
    pages: list[int]
    step: int


class ForgetMove(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Take nothing more for this move, known or not."""

    move: str


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send positions from `first` on, which lie in these pages; with `num_computed` they are the last of so many tokens, and a
    draft model has computed `num_drafted` of the tokens in all pages that were sent."""

    move: str
    address: PageAddress
    key: bytes
    first: int
    pages: list[int]
    step: int
    num_computed: int | None = None
    bytes_per_s: float | None = None
    num_drafted: int = 0


class StopPages(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Send nothing more for this move, known or not."""

    move: str


class PagesSent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """The target has all positions before `end`, checked; so many bytes went since the last one, and they took so long."""

    move: str
    end: int
    num_bytes: int
    wall_s: float


class SendFailed(msgspec.Struct, frozen=True, array_like=True, tag="send_failed"):
    """The copy came to nothing. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class Expecting(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """From now on this rank lets the pages of this move in: nobody may be told where to send them before."""

    move: str


class PagesReceived(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """Pages came, and their checksums hold; with `num_computed` all of a request with so many tokens in them.

    num_drafted: they came with the layers of the draft model that this rank has, which computed so many of the first tokens.
    """

    move: str
    num_bytes: int
    num_computed: int | None = None
    num_drafted: int = 0


class ReceiveFailed(msgspec.Struct, frozen=True, array_like=True, tag="come_failed"):
    """What came was no good, or its sender left. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """Nothing writes the pages of this move any more."""

    move: str


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Somebody was turned away who wanted to send pages, or order about: a wrong or spent key, or nonsense."""

    why: str


Order = ExpectPages | ForgetMove | SendPages | StopPages
Report = PagesSent | SendFailed | Expecting | PagesReceived | ReceiveFailed | Forgotten | PeerRefused
