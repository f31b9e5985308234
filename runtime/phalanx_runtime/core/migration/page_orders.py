"""Orders of rank 0 to the ranks that send and receive pages, and their reports. Records only; `rank.transfer` executes them.

    source: SendPages (per round) -> PagesSent or SendFailed; StopPages
    target: ExpectPages -> Expecting, then PagesReceived or ReceiveFailed; ForgetMove -> Forgotten

Position i of a request is its i-th page. A rank confirms ForgetMove when nothing writes the pages any more, so they can be
reused. `step`: the rank reads or writes pages only after it has computed this step, because it may lag behind rank 0.
"""

import msgspec

from phalanx_api.moves import PageAddress


class ExpectPages(msgspec.Struct, frozen=True, array_like=True, tag="expect", kw_only=True):
    """Receive positions from `first` on into these pages, once, from a sender with this key."""

    move: str
    key: bytes
    first: int
    pages: list[int]
    step: int


class ForgetMove(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Receive nothing more for this move, known or not."""

    move: str


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send", kw_only=True):
    """Send positions from `first` on from these pages. With `num_computed` they are the last ones, for that many tokens, of which
    the draft model has computed `num_drafted`."""

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
    """The target has verified all positions before `end`; `num_bytes` and `wall_s` are since the last report."""

    move: str
    end: int
    num_bytes: int
    wall_s: float


class SendFailed(msgspec.Struct, frozen=True, array_like=True, tag="send_failed"):
    """The copy failed. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class Expecting(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """This rank accepts the pages of this move from now on; only then may the source learn its address."""

    move: str


class PagesReceived(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """Pages arrived with correct checksums; with `num_computed` all pages of a request with that many tokens.

    num_drafted: they include the layers of this rank's draft model, computed for the first `num_drafted` tokens.
    """

    move: str
    num_bytes: int
    num_computed: int | None = None
    num_drafted: int = 0


class ReceiveFailed(msgspec.Struct, frozen=True, array_like=True, tag="come_failed"):
    """Receiving failed, or the sender disconnected. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """Nothing writes the pages of this move any more."""

    move: str


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A connection was rejected: a wrong or used key, or invalid frames."""

    why: str


Order = ExpectPages | ForgetMove | SendPages | StopPages
Report = PagesSent | SendFailed | Expecting | PagesReceived | ReceiveFailed | Forgotten | PeerRefused
