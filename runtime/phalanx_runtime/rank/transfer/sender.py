"""Pages that go out for moves: a thread for each, which sends what it is ordered, round by round, over one connection.

Pages are read while steps go on: full ones do not change, and the last one is sent only after its request was frozen. A page
that was given to another request meanwhile is sent wrong, and no harm comes of it: without the last round nobody uses it, and its
leader orders no last round for a request that lost its pages.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_runtime.core.migration.page_orders import PagesSent, Report, SendFailed, SendPages
from phalanx_runtime.rank.memory.page_memory import DraftPages, Pages, no_draft
from phalanx_runtime.rank.transfer import page_wire as say

CONNECT_S = 2.0
ANSWER_S = 5.0
"""A target that takes nothing, or does not answer, for so long is lost."""
ASK_BYTES, ASK_S = 16 << 20, 0.5
"""The target is asked whether all is well after so many bytes, or so long."""


@dataclass(slots=True, eq=False)
class _SendPath:
    """One move on its way out. None in `orders` ends it."""

    orders: queue.SimpleQueue[SendPages | None] = field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)
    link: socket.socket | None = None
    last: list[memoryview] = field(default_factory=list)


class Sender:
    """Sends pages of this rank. `wait_for` returns when the rank has computed a step; `tell` reports, from any thread.

    draft: how pages are read with the layers of a draft, while it can draft. They go to who has the same one.
    """

    def __init__(
        self,
        open_pages: Callable[[], Pages],
        wait_for: Callable[[int], None],
        tell: Callable[[Report], None],
        draft: Callable[[], DraftPages | None] = no_draft,
    ) -> None:
        self._open_pages = open_pages
        self._draft = draft
        self._wait_for = wait_for
        self._tell = tell
        self._ways: dict[str, _SendPath] = {}

    def send(self, order: SendPages) -> None:
        """Sends these pages after those ordered before. The first order of a move opens its connection."""
        way = self._ways.get(order.move)
        if way is None:
            way = self._ways[order.move] = _SendPath()
            threading.Thread(target=self._run, args=(order, way), name="pages-out", daemon=True).start()
        way.orders.put(order)

    def stop(self, move: str) -> None:
        """Sends nothing more of a move, and does not wait for what is being sent. An unknown one is no error."""
        way = self._ways.pop(move, None)
        if way is None:
            return
        way.stopped.set()
        way.orders.put(None)
        link = way.link
        if link is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # closed already

    def _run(self, first: SendPages, way: _SendPath) -> None:
        move = first.move
        try:
            with socket.create_connection((first.address.host, first.address.port), CONNECT_S) as link:
                way.link = link
                link.settimeout(ANSWER_S)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._send_all(move, first, way, link)
        except say.BadTransfer as bad:
            code = bad.code if bad.code != "malformed" else "target_lost"
            self._fail(move, way, code, str(bad))
        except OSError as error:
            self._fail(move, way, "target_lost", f"{first.address.host}:{first.address.port}: {error}")

    def _send_all(self, move: str, first: SendPages, way: _SendPath, link: socket.socket) -> None:
        """Introduces itself and obeys orders to the last. Raises BadTransfer, OSError."""
        pages = self._open_pages()
        say.send_hello(link, say.PageHello(move, first.key, pages.page_bytes))
        draft = self._draft()
        if say.read_answer(link) and draft is not None:
            with_draft = draft.open()
            say.send_draft(link, with_draft.page_bytes, draft.name)
            pages = with_draft if say.read_answer(link) else pages
        while not way.stopped.is_set():
            order = way.orders.get()
            if order is None:
                return
            self._wait_for(order.step)
            self._send(order, way, link, pages)
            if order.num_computed is not None:
                return

    def _send(self, order: SendPages, way: _SendPath, link: socket.socket, pages: Pages) -> None:
        """One round, no faster than it may be. Raises BadTransfer, OSError."""
        began = asked = time.monotonic()
        sent = told = 0
        for place, page in enumerate(order.pages):
            way.last = pages.read(page)
            say.send_page(link, order.first + place, way.last)
            sent += pages.page_bytes
            if order.bytes_per_s is not None:
                way.stopped.wait(max(0.0, began + sent / order.bytes_per_s - time.monotonic()))
            if way.stopped.is_set():
                return
            now = time.monotonic()
            if sent - told >= ASK_BYTES or now - asked >= ASK_S:
                self._ask(order, link, place + 1, sent - told, asked)
                told, asked = sent, time.monotonic()
        if order.num_computed is None:
            self._ask(order, link, len(order.pages), sent - told, asked)
            return
        say.send_last(link, order.num_computed, say.digest(way.last), order.num_drafted)
        say.read_answer(link)
        self._tell(PagesSent(order.move, order.first + len(order.pages), sent - told, time.monotonic() - asked))

    def _ask(self, order: SendPages, link: socket.socket, count: int, num_bytes: int, since: float) -> None:
        """Asks the target whether all pages so far came well, and tells."""
        say.send_round(link)
        say.read_answer(link)
        self._tell(PagesSent(order.move, order.first + count, num_bytes, time.monotonic() - since))

    def _fail(self, move: str, way: _SendPath, code: str, why: str) -> None:
        """Tells of the failure, unless the move was stopped."""
        if not way.stopped.is_set():
            self._tell(SendFailed(move, code, why))
