"""Orders of rank 0 to the ranks that send and receive pages (`rank.transfer`), and their reports.

    source: SendPages (per round) -> PagesSent or SendFailed; StopPages; SendEnded at the end
    target: ExpectPages -> Expecting, then PagesReceived or ReceiveFailed; ForgetMove -> Forgotten
    disk:   FetchPages -> PagesFetched; DiskChanged whenever its keys change; for parts of pages the same, marked `is_part`

Position i of a request is its i-th page. A rank, which may lag behind rank 0, uses pages only after it has computed `step`.
"""

import msgspec

from phalanx_api.moves import PageAddress

NO_ROW = -1
"""No layer keeps a state per request, or it is not sent."""


class ExpectPages(msgspec.Struct, frozen=True, array_like=True, tag="expect", kw_only=True):
    """Receive positions from `first` on, once, from a sender with this key."""

    move: str
    key: bytes
    first: int
    pages: list[int]
    step: int
    window: int = 0
    """If set, pages (with `parts`: only parts) before the window of the tokens at the source need not arrive."""
    parts: list[int] = []
    """By page, if pages have parts; `NO_PART`: not read at the target."""
    row: int = NO_ROW
    """Row for the request's states, if layers keep some."""


class ForgetMove(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Stop receiving for this move, known or not."""

    move: str


class PageCopy(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What each rank sends in one round, positions from `first` on."""

    first: int
    pages: list[int]
    step: int
    num_computed: int | None = None
    """Set in the last round of a move: the tokens at the target."""
    num_drafted: int = 0
    """Leading tokens with the draft model's KV in all sent pages."""
    parts: list[int] = []
    """By page, if pages have parts; `NO_PART`: not sent."""
    slots: list[int] = []
    """By page, if host memory has some; `NO_SLOT`: the page is on the device."""
    part_slots: list[int] = []
    """By page, if host memory has some of the parts; `NO_SLOT`: see `parts`."""
    row: int = NO_ROW
    """Row whose states follow the pages, in the last round of a move."""


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send", kw_only=True):
    """Send a round of pages."""

    move: str
    address: PageAddress
    key: bytes
    copy: PageCopy
    bytes_per_s: float | None = None


class StopPages(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Stop sending for this move, known or not."""

    move: str


class FetchPages(msgspec.Struct, frozen=True, array_like=True, tag="fetch", kw_only=True):
    """Read pages from disk into slots of host memory, in chain order."""

    number: int
    keys: list[bytes]
    slots: list[int]
    step: int
    is_part: bool = False
    """Whether they are parts of the pages with these keys, whose slots are others."""


class PagesFetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The first `count` pages of a fetch were read and verified. Slots of others are unused from now on."""

    number: int
    count: int
    is_part: bool = False


class DiskChanged(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """Keys that the disk of this rank gained and lost; counts are since the last report."""

    added: list[bytes]
    dropped: list[bytes]
    compacted_bytes: int = 0
    """Written by compaction."""
    reclaimed_bytes: int = 0
    """Of segments that were removed."""
    is_part: bool = False
    unwritten: int = 0
    """Pages since the last report that are not on disk because too many waited, or a write failed."""
    has_more: bool = False
    """Whether the next report has the rest of the change: a report has a bounded number of keys."""


class PagesSent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """The target verified all positions before `end`. `num_bytes` and `wall_s`: since the last report."""

    move: str
    end: int
    num_bytes: int
    wall_s: float


class SendFailed(msgspec.Struct, frozen=True, array_like=True, tag="send_failed"):
    """Sending failed. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class SendEnded(msgspec.Struct, frozen=True, array_like=True, tag="send_ended"):
    """This rank reads no more pages of the move, whether it sent all, failed or was stopped."""

    move: str


class Expecting(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """This rank accepts the pages of this move, so the source may get its address."""

    move: str


class PagesReceived(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """Pages arrived with correct checksums."""

    move: str
    num_bytes: int
    num_computed: int | None = None
    """Set with the last pages: the tokens in all."""
    num_drafted: int = 0
    """Leading tokens with the draft model's KV."""


class ReceiveFailed(msgspec.Struct, frozen=True, array_like=True, tag="come_failed"):
    """Receiving failed, or the sender disconnected. `code` as in `moves.MoveFailed`."""

    move: str
    code: str
    why: str


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """The rank no longer writes pages of this move, so they can be reused."""

    move: str


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A connection with a bad key or bad frames was rejected."""

    why: str


Order = ExpectPages | ForgetMove | SendPages | StopPages | FetchPages
DiskReport = PagesFetched | DiskChanged
MoveReport = PagesSent | SendFailed | SendEnded | Expecting | PagesReceived | ReceiveFailed | Forgotten | PeerRefused
Report = MoveReport | DiskReport
