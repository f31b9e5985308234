"""Receives the pages of moves, in a thread per connection.

A move has one key and one connection; others are closed without an answer. Bytes are verified before a page is written.
"""

import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_runtime.collective.secure import PeerSocket
from phalanx_runtime.core.migration.page_orders import NO_ROW, ExpectPages, PagesReceived, ReceiveFailed, Report
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.window_parts import NO_PART
from phalanx_runtime.rank.memory.page_memory import DraftPages, PageAccess, Pages, StateRows
from phalanx_runtime.rank.transfer import page_wire
from phalanx_runtime.rank.transfer.page_wire import FrameHeader, PageHello, TransferError

CLOSE_TIMEOUT_S = 1.0
"""For a sender to read its error."""
IDLE_TIMEOUT_S = 20.0
"""Ends the thread of a lost sender; its leader has shorter timeouts."""


@dataclass(slots=True, eq=False, kw_only=True)
class _IncomingMove:
    order: ExpectPages
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Guards the pages, written only before `is_over`."""
    is_over: bool = False
    is_used: bool = False
    """A sender presented the key."""
    connection: PeerSocket | None = None
    received: set[int] = field(default_factory=set)
    """Positions of the received pages."""
    with_parts: set[int] = field(default_factory=set)
    """Positions of the received parts."""
    state_tokens: int = 0
    """Tokens that the received states include."""

    def write(self, pages: Pages, page: int, data: memoryview) -> None:
        """Fills a page. Raises TransferError once the move is over."""
        with self.writing:
            if self.is_over:
                raise TransferError("lease", "the move is over")
            pages.write(page, data)


class PageReceiver:
    """Receives pages on this rank. `report`: thread-safe.

    Pages include a draft's layers if the sender has the same draft; else plans backfill them.
    """

    def __init__(self, pages: PageAccess, report: Callable[[Report], None]) -> None:
        self._pages = pages
        self._report = report
        self._lock = threading.Lock()
        self._expected: dict[str, _IncomingMove] = {}

    def expect(self, order: ExpectPages) -> None:
        """Accepts the pages of a move."""
        with self._lock:
            self._expected[order.move] = _IncomingMove(order=order)

    def forget(self, move: str) -> None:
        """Ends reception; afterwards nothing writes the move's pages."""
        with self._lock:
            incoming = self._expected.pop(move, None)
        if incoming is not None:
            with incoming.writing:
                incoming.is_over = True
            if incoming.connection is not None:
                _shut_down(incoming.connection)

    def serve(self, connection: PeerSocket, on_proved: Callable[[], None]) -> str | None:
        """Receives pages after the magic. Returns the reason of a refusal. `on_proved`: called once the key is verified."""
        try:
            hello = page_wire.read_hello(connection)
            incoming, why = self._admit(hello, connection)
        except TransferError as error:
            return error.code
        except OSError:
            return "silent"
        if incoming is None:
            return why
        on_proved()
        move = incoming.order.move
        try:
            connection.settimeout(IDLE_TIMEOUT_S)
            self._receive(incoming, connection, hello.page_bytes)
        except TransferError as error:
            _close_with_error(connection, error.code)
            self._fail(incoming, error.code, str(error))
        except ssl.SSLError as error:
            # TLS writes no more either, so the sender gets no code and reports a lost target.
            self._fail(incoming, "checksum", f"TLS rejects what the sender of move {move} sent: {error}")
        except OSError as error:
            self._fail(incoming, "source_lost", f"the sender of move {move} is lost: {error}")
        return None

    def _admit(self, hello: PageHello, connection: PeerSocket) -> tuple[_IncomingMove | None, str]:
        """Returns the move, or why the sender is refused."""
        with self._lock:
            incoming = self._expected.get(hello.move)
            key = b"" if incoming is None else incoming.order.key
            has_key = hmac.compare_digest(hello.key, key.ljust(page_wire.KEY_BYTES, b"\0"))
            if incoming is None or not has_key:
                return None, "unknown" if incoming is None else "key"
            if incoming.is_used:
                return None, "used"
            incoming.is_used, incoming.connection = True, connection
            return incoming, ""

    def _receive(self, incoming: _IncomingMove, connection: PeerSocket, page_bytes: int) -> None:
        pages, parts, draft = self._pages.open(), self._pages.open_parts(), self._pages.open_draft()
        if page_bytes != pages.page_bytes:
            raise TransferError("incompatible", f"a page has {page_bytes} bytes there and {pages.page_bytes} here")
        page_wire.send_ack(connection, int(draft is not None))
        staging = memoryview(bytearray(pages.page_bytes))
        self._pages.wait_for(incoming.order.step)
        unreported, has_page, has_draft = 0, False, False
        while True:
            header = page_wire.read_header(connection)
            match header.kind:
                case page_wire.DRAFT if draft is not None and not incoming.received:
                    draft_pages = _agree_on_draft(draft, connection, header.length)
                    has_draft = draft_pages is not None
                    pages = draft_pages or pages
                    staging = memoryview(bytearray(pages.page_bytes))
                case page_wire.PAGE:
                    self._receive_page(incoming, connection, header, pages, staging)
                    unreported, has_page = unreported + header.length, True
                case page_wire.PART if parts is not None and incoming.order.parts:
                    self._receive_part(incoming, connection, header, parts)
                    unreported += header.length
                case page_wire.STATE if self._pages.states is not None and incoming.order.row != NO_ROW:
                    _receive_state(incoming, connection, header, self._pages.states)
                    unreported += header.length
                case page_wire.ROUND:
                    page_wire.send_ack(connection)
                    self._report(PagesReceived(incoming.order.move, unreported))
                    unreported = 0
                case page_wire.LAST:
                    digest = page_wire.read_exactly(connection, page_wire.DIGEST_BYTES)
                    self._check_complete(incoming, header.position, digest, [staging] if has_page else [])
                    page_wire.send_ack(connection)
                    num_drafted = header.checksum if has_draft else 0
                    self._report(PagesReceived(incoming.order.move, unreported, header.position, num_drafted))
                    return
                case _:
                    raise TransferError("malformed", f"frame {header.kind} is not part of a transfer")

    def _receive_page(
        self, incoming: _IncomingMove, connection: PeerSocket, header: FrameHeader, pages: Pages, staging: memoryview
    ) -> None:
        place = _place(incoming.order, header, pages, incoming.received)
        _read_verified(connection, header, staging)
        incoming.write(pages, incoming.order.pages[place], staging)
        incoming.received.add(header.position)

    def _receive_part(self, incoming: _IncomingMove, connection: PeerSocket, header: FrameHeader, parts: Pages) -> None:
        """Receives a part, also one that no token at the target reads."""
        place = _place(incoming.order, header, parts, incoming.with_parts)
        staging = memoryview(bytearray(parts.page_bytes))
        _read_verified(connection, header, staging)
        if incoming.order.parts[place] != NO_PART:
            incoming.write(parts, incoming.order.parts[place], staging)
            incoming.with_parts.add(header.position)

    def _check_complete(self, incoming: _IncomingMove, num_computed: int, digest: bytes, last: list[memoryview]) -> None:
        """Checks that all pages and parts arrived. Raises TransferError."""
        if not hmac.compare_digest(digest, page_wire.digest(last)):
            raise TransferError("checksum", "the last page has a wrong digest")
        order, size = incoming.order, self._pages.page_size
        end = -(-num_computed // size)
        readable = max(order.first, PageWindow(order.window, size).first_page(num_computed)) if order.window else order.first
        missing = len(set(range(order.first if order.parts else readable, end)) - incoming.received)
        if order.parts:
            missing += len(set(range(readable, end)) - incoming.with_parts)
        if missing:
            raise TransferError("malformed", f"{missing} pages before position {end} are missing")
        if self._pages.states is not None and order.row != NO_ROW and incoming.state_tokens != num_computed:
            raise TransferError("malformed", f"the states are those of {incoming.state_tokens} tokens, not of {num_computed}")

    def _fail(self, incoming: _IncomingMove, code: str, why: str) -> None:
        if not incoming.is_over:
            self._report(ReceiveFailed(incoming.order.move, code, why))


def _place(order: ExpectPages, header: FrameHeader, pages: Pages, received: set[int]) -> int:
    """Returns the index of the frame's page in the order. Raises TransferError."""
    place = header.position - order.first
    if header.length != pages.page_bytes:
        raise TransferError("malformed", f"a page of {header.length} bytes; {pages.page_bytes} were announced")
    if place < 0 or header.position in received:
        raise TransferError("malformed", f"position {header.position} was not expected")
    if place >= len(order.pages):
        raise TransferError("no_room", f"position {header.position} is past the {len(order.pages)} pages reserved")
    return place


def _receive_state(incoming: _IncomingMove, connection: PeerSocket, header: FrameHeader, states: StateRows) -> None:
    """Receives the states of the request. Raises TransferError."""
    if header.length != states.row_bytes:
        raise TransferError("incompatible", f"states of {header.length} bytes there and {states.row_bytes} here")
    staging = memoryview(bytearray(header.length))
    _read_verified(connection, header, staging)
    with incoming.writing:
        if incoming.is_over:
            raise TransferError("lease", "the move is over")
        states.write(incoming.order.row, header.position, staging)
    incoming.state_tokens = header.position


def _read_verified(connection: PeerSocket, header: FrameHeader, staging: memoryview) -> None:
    """Reads the bytes of a page or part. Raises TransferError."""
    page_wire.read_into(connection, staging)
    if page_wire.has_checksums(connection) and page_wire.checksum(connection, [staging]) != header.checksum:
        raise TransferError("checksum", f"position {header.position} has a wrong checksum")


def _agree_on_draft(draft: DraftPages, connection: PeerSocket, page_bytes: int) -> Pages | None:
    """Answers DRAFT. Returns the pages with the draft's layers if the drafts are equal."""
    pages = draft.open()
    draft_digest = page_wire.read_exactly(connection, page_wire.DIGEST_BYTES)
    is_same = page_wire.is_draft(draft_digest, draft.name) and page_bytes == pages.page_bytes
    page_wire.send_ack(connection, int(is_same))
    return pages if is_same else None


def _close_with_error(connection: PeerSocket, code: str) -> None:
    """Sends the error and reads data in flight: closing with unread data would discard the error."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    try:
        page_wire.send_error(connection, code)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(CLOSE_TIMEOUT_S)
        unread = memoryview(bytearray(1 << 16))
        while connection.recv_into(unread) and time.monotonic() < deadline:
            pass
    except OSError:
        return  # the sender disconnected


def _shut_down(connection: PeerSocket) -> None:
    """Ends reads in other threads."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already
