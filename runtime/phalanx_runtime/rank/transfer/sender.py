"""Sends the pages of moves: one thread and connection per move, round by round, concurrently with steps.

A frame has one page or one part; there is no smaller unit. Full pages do not change; the last page is sent once
its request is frozen. A request that lost pages gets no last round.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from phalanx_api.moves import PageAddress
from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective.secure import PeerSocket, dial_securely
from phalanx_runtime.core.migration.page_orders import NO_ROW, PageCopy, PagesSent, Report, SendEnded, SendFailed, SendPages
from phalanx_runtime.core.scheduling.prefix_holds import NO_SLOT
from phalanx_runtime.core.window_parts import NO_PART
from phalanx_runtime.rank.memory.page_memory import PageAccess, Pages, StateRows
from phalanx_runtime.rank.transfer import page_wire

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
"""After it the target is lost."""
ACK_BYTES, ACK_INTERVAL_S = 16 << 20, 0.5
"""An ACK is requested after this many bytes or seconds."""


class StateLost(Exception):
    """A row no longer has the state that is to be sent."""


@dataclass(slots=True, eq=False)
class _OutgoingMove:
    orders: queue.SimpleQueue[SendPages | None] = field(default_factory=queue.SimpleQueue)
    """An empty entry ends the thread."""
    stopped: threading.Event = field(default_factory=threading.Event)
    connection: PeerSocket | None = None
    last: list[memoryview] = field(default_factory=list)
    """The page sent last."""


class PageSender:
    """Sends pages of this rank, with a draft's layers if the target has the same draft. `report`: thread-safe."""

    def __init__(self, pages: PageAccess, report: Callable[[Report], None], certificate: Certificate | None = None) -> None:
        self._pages = pages
        self._report = report
        self._certificate = certificate
        self._moves: dict[str, _OutgoingMove] = {}

    def send(self, order: SendPages) -> None:
        """Queues an order; a move's first one opens the connection."""
        outgoing = self._moves.get(order.move)
        if outgoing is None:
            outgoing = self._moves[order.move] = _OutgoingMove()
            threading.Thread(target=self._run, args=(order, outgoing), name="pages-out", daemon=True).start()
        outgoing.orders.put(order)

    def stop(self, move: str) -> None:
        """Ends sending, without waiting for the thread."""
        outgoing = self._moves.pop(move, None)
        if outgoing is None:
            return
        outgoing.stopped.set()
        outgoing.orders.put(None)
        connection = outgoing.connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # closed already

    def _run(self, first: SendPages, outgoing: _OutgoingMove) -> None:
        move, address = first.move, first.address
        try:
            with closing(self._dial(address)) as connection:
                outgoing.connection = connection
                connection.settimeout(ANSWER_TIMEOUT_S)
                self._send_all(move, first, outgoing, connection)
        except page_wire.TransferError as error:
            code = error.code if error.code != "malformed" else "target_lost"
            self._fail(move, outgoing, code, str(error))
        except OSError as error:
            self._fail(move, outgoing, "target_lost", f"{address.host}:{address.port}: {error}")
        except StateLost as error:
            self._fail(move, outgoing, "preempted", f"the state of the request is another one: {error}")
        finally:
            self._report(SendEnded(move))

    def _dial(self, address: PageAddress) -> PeerSocket:
        connection = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if self._certificate is None else dial_securely(connection, self._certificate)

    def _send_all(self, move: str, first: SendPages, outgoing: _OutgoingMove, connection: PeerSocket) -> None:
        pages, parts = self._pages.open(), self._pages.open_parts()
        page_wire.send_hello(connection, page_wire.PageHello(move, first.key, pages.page_bytes))
        draft = None if first.copy.slots else self._pages.open_draft()  # host memory has no layers of a draft
        if page_wire.read_ack(connection) and draft is not None:
            draft_pages = draft.open()
            page_wire.send_draft(connection, draft_pages.page_bytes, draft.name)
            pages = draft_pages if page_wire.read_ack(connection) else pages
        while not outgoing.stopped.is_set():
            order = outgoing.orders.get()
            if order is None:
                return
            self._pages.wait_for(order.copy.step)
            self._send_round(order, outgoing, connection, pages, parts)
            if order.copy.num_computed is not None:
                return

    def _send_round(
        self, order: SendPages, outgoing: _OutgoingMove, connection: PeerSocket, pages: Pages, parts: Pages | None
    ) -> None:
        copy, start = order.copy, time.monotonic()
        acked_at = start
        sent = acked = 0
        for place in range(len(copy.pages)):
            outgoing.last = self._read(copy, place, pages)
            page_wire.send_page(connection, copy.first + place, outgoing.last)
            sent += pages.page_bytes
            part = None if parts is None else self._read_part(copy, place, parts)
            if part is not None:
                page_wire.send_page(connection, copy.first + place, part, page_wire.PART)
                sent += sum(map(len, part))
            _pace(order, outgoing, start, sent)
            if outgoing.stopped.is_set():
                return
            now = time.monotonic()
            if sent - acked >= ACK_BYTES or now - acked_at >= ACK_INTERVAL_S:
                self._request_ack(order, connection, place + 1, sent - acked, acked_at)
                acked, acked_at = sent, time.monotonic()
        if copy.num_computed is None:
            self._request_ack(order, connection, len(copy.pages), sent - acked, acked_at)
            return
        if copy.row != NO_ROW and self._pages.states is not None:
            states = _read_states(self._pages.states, copy.row, copy.num_computed)
            page_wire.send_page(connection, copy.num_computed, [states], page_wire.STATE)
            sent += len(states)
            _pace(order, outgoing, start, sent)
        page_wire.send_last(connection, copy.num_computed, page_wire.digest(outgoing.last), copy.num_drafted)
        page_wire.read_ack(connection)
        end = copy.first + len(copy.pages)
        self._report(PagesSent(order.move, end, sent - acked, time.monotonic() - acked_at))

    def _read(self, copy: PageCopy, place: int, pages: Pages) -> list[memoryview]:
        if not copy.slots or copy.slots[place] == NO_SLOT:
            return pages.read(copy.pages[place])
        assert self._pages.host is not None, "rank 0 knows whether ranks have host memory"
        return self._pages.host.read(copy.slots[place])

    def _read_part(self, copy: PageCopy, place: int, parts: Pages) -> list[memoryview] | None:
        """Returns the part of a page, if it is sent."""
        if copy.part_slots and copy.part_slots[place] != NO_SLOT:
            assert self._pages.host_parts is not None, "rank 0 knows whether ranks have host memory"
            return self._pages.host_parts.read(copy.part_slots[place])
        return parts.read(copy.parts[place]) if copy.parts and copy.parts[place] != NO_PART else None

    def _request_ack(self, order: SendPages, connection: PeerSocket, count: int, num_bytes: int, since: float) -> None:
        """Waits until the target has verified `count` pages of the order."""
        page_wire.send_round(connection)
        page_wire.read_ack(connection)
        self._report(PagesSent(order.move, order.copy.first + count, num_bytes, time.monotonic() - since))

    def _fail(self, move: str, outgoing: _OutgoingMove, code: str, why: str) -> None:
        if not outgoing.stopped.is_set():
            self._report(SendFailed(move, code, why))


def _pace(order: SendPages, outgoing: _OutgoingMove, start: float, sent: int) -> None:
    """Waits until `sent` bytes since `start` are no more than the order allows."""
    if order.bytes_per_s is not None:
        outgoing.stopped.wait(max(0.0, start + sent / order.bytes_per_s - time.monotonic()))


def _read_states(states: StateRows, row: int, num_tokens: int) -> memoryview:
    try:
        return memoryview(states.read(row, num_tokens))
    except ValueError as error:
        raise StateLost(str(error)) from error
