"""Pages that come in for moves: what is expected, and the connection that brings it.

A move has one key and one connection for it. A wrong key, one that was used, a move that is not expected: the connection is
closed without a word. Bytes are checked before they touch a page. `forget` returns only when no thread writes pages of the move,
and none will: whoever reads on finds its move gone.
"""

import hmac
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_runtime.core.migration.page_orders import ExpectPages, PagesReceived, ReceiveFailed, Report
from phalanx_runtime.rank.memory.page_memory import DraftPages, Pages, no_draft
from phalanx_runtime.rank.transfer import page_wire as say

PART_S = 1.0
"""How long a sender may take to notice that its transfer is over."""
STALL_S = 20.0
"""A sender that sends nothing for so long is gone. Its leader keeps shorter times; this one only ends the thread."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Expected:
    """One move. `writing` guards its pages: they are written only while `is_over` is false."""

    order: ExpectPages
    writing: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    is_used: bool = False
    link: socket.socket | None = None
    came: set[int] = field(default_factory=set)


class Intake:
    """Takes pages in on this rank. `wait_for` returns when the rank has computed a step; `tell` reports, from any thread.

    draft: where pages lie that come with the layers of the same draft, while it can draft. Those that come without leave the
    draft's layers as they are: the request that they came for has them computed.
    """

    def __init__(
        self,
        page_size: int,
        open_pages: Callable[[], Pages],
        wait_for: Callable[[int], None],
        tell: Callable[[Report], None],
        draft: Callable[[], DraftPages | None] = no_draft,
    ) -> None:
        self._page_size = page_size
        self._open_pages = open_pages
        self._wait_for = wait_for
        self._tell = tell
        self._draft = draft
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}

    def expect(self, order: ExpectPages) -> None:
        """Lets the pages of a move in from now on."""
        with self._lock:
            self._expected[order.move] = _Expected(order=order)

    def forget(self, move: str) -> None:
        """Lets nothing in for this move any more. When it returns, nothing writes its pages."""
        with self._lock:
            expected = self._expected.pop(move, None)
        if expected is not None:
            with expected.writing:
                expected.is_over = True
            if expected.link is not None:
                _shut(expected.link)

    def serve(self, link: socket.socket, proved: Callable[[], None]) -> str | None:
        """Takes the pages that a connection brings, after its magic; why it was turned away at the door, if it was.

        proved: called once the connection's key was found good.
        """
        try:
            hello = say.read_hello(link)
            expected, why = self._admit(hello, link)
        except say.BadTransfer as bad:
            return bad.code
        except OSError:
            return "silent"
        if expected is None:
            return why
        proved()
        move = expected.order.move
        try:
            link.settimeout(STALL_S)
            self._take(expected, link, hello.page_bytes)
        except say.BadTransfer as bad:
            _part(link, bad.code)
            self._fail(expected, bad.code, str(bad))
        except OSError as error:
            self._fail(expected, "source_lost", f"the sender of move {move} is gone: {error}")
        return None

    def _admit(self, hello: say.PageHello, link: socket.socket) -> tuple[_Expected | None, str]:
        """The move that a sender has the key of, or why it has not."""
        with self._lock:
            expected = self._expected.get(hello.move)
            key = b"" if expected is None else expected.order.key
            is_right = hmac.compare_digest(hello.key, key.ljust(say.KEY_BYTES, b"\0"))
            if expected is None or not is_right:
                return None, "unknown" if expected is None else "key"
            if expected.is_used:
                return None, "used"
            expected.is_used, expected.link = True, link
            return expected, ""

    def _take(self, expected: _Expected, link: socket.socket, page_bytes: int) -> None:
        """Takes pages until the last. Raises BadTransfer, OSError."""
        pages, draft = self._open_pages(), self._draft()
        if page_bytes != pages.page_bytes:
            raise say.BadTransfer("incompatible", f"a page has {page_bytes} bytes there and {pages.page_bytes} here")
        say.send_answer(link, number=int(draft is not None))
        staging = memoryview(bytearray(pages.page_bytes))
        self._wait_for(expected.order.step)
        since, last = 0, False
        with_draft: Pages | None = None
        while True:
            head = say.read_head(link)
            match head.kind:
                case say.DRAFT if draft is not None and not expected.came:
                    with_draft = self._with_draft(draft, link, head.length)
                    pages = with_draft or pages
                    staging = memoryview(bytearray(pages.page_bytes))
                case say.PAGE:
                    self._take_page(expected, link, head, pages, staging)
                    since, last = since + head.length, True
                case say.ROUND:
                    say.send_answer(link)
                    self._tell(PagesReceived(expected.order.move, since))
                    since = 0
                case say.LAST:
                    theirs = say.read_exactly(link, say.DIGEST_BYTES)
                    self._finish(expected, head.position, theirs, [staging] if last else [])
                    say.send_answer(link)
                    num_drafted = 0 if with_draft is None else head.checksum
                    self._tell(PagesReceived(expected.order.move, since, head.position, num_drafted))
                    return
                case _:
                    raise say.BadTransfer("malformed", f"frame {head.kind} is none of a transfer")

    def _with_draft(self, draft: DraftPages, link: socket.socket, page_bytes: int) -> Pages | None:
        """The pages with the draft's layers, when the sender has the same draft; None when it has another."""
        pages = draft.open()
        is_same = say.is_draft(say.read_exactly(link, say.DIGEST_BYTES), draft.name) and page_bytes == pages.page_bytes
        say.send_answer(link, number=int(is_same))
        return pages if is_same else None

    def _take_page(
        self, expected: _Expected, link: socket.socket, head: say.FrameHeader, pages: Pages, staging: memoryview
    ) -> None:
        """Reads a page, checks it and writes it. Raises BadTransfer, OSError."""
        order, place = expected.order, head.position - expected.order.first
        if head.length != pages.page_bytes:
            raise say.BadTransfer("malformed", f"a page of {head.length} bytes; {pages.page_bytes} were announced")
        if place < 0 or head.position in expected.came:
            raise say.BadTransfer("malformed", f"position {head.position} was not to come")
        if place >= len(order.pages):
            raise say.BadTransfer("no_room", f"position {head.position} is past the {len(order.pages)} pages reserved")
        say.read_into(link, staging)
        if say.checksum([staging]) != head.checksum:
            raise say.BadTransfer("checksum", f"position {head.position} was changed on its way")
        with expected.writing:
            if expected.is_over:
                raise say.BadTransfer("lease", "the move is over")
            pages.write(order.pages[place], staging)
        expected.came.add(head.position)

    def _finish(self, expected: _Expected, num_computed: int, theirs: bytes, last: list[memoryview]) -> None:
        """Checks that all pages came. Raises BadTransfer."""
        if not hmac.compare_digest(theirs, say.digest(last)):
            raise say.BadTransfer("checksum", "the last page is not the one that was sent")
        end = -(-num_computed // self._page_size)
        missing = sum(position not in expected.came for position in range(expected.order.first, end))
        if missing:
            raise say.BadTransfer("malformed", f"{missing} pages before position {end} did not come")

    def _fail(self, expected: _Expected, code: str, why: str) -> None:
        """Tells of the failure, unless the move was forgotten."""
        if not expected.is_over:
            self._tell(ReceiveFailed(expected.order.move, code, why))


def _part(link: socket.socket, code: str) -> None:
    """Says why the transfer is over, and reads what is on its way: closing before would lose the answer too."""
    deadline = time.monotonic() + PART_S
    try:
        say.send_answer(link, code)
        link.shutdown(socket.SHUT_WR)
        link.settimeout(PART_S)
        while link.recv(1 << 16) and time.monotonic() < deadline:
            pass
    except OSError:
        return  # the sender is gone, and its own leader sees that


def _shut(link: socket.socket) -> None:
    """Ends what another thread waits for on this connection."""
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already
