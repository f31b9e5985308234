"""KV transfer of a group: rank 0 sends orders to every rank and collects reports."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from phalanx_api.moves import MoveOut, PageAddress, SendPrefix
from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.collective.secure import PeerSocket
from phalanx_runtime.core.migration.page_orders import (
    ExpectPages,
    FetchPages,
    ForgetMove,
    Order,
    PageCopy,
    Report,
    SendPages,
    StopPages,
)
from phalanx_runtime.rank.memory.page_memory import PageAccess
from phalanx_runtime.rank.transfer.server import (
    KvTransferServer,
    LocalReports,
    RemoteReports,
    Secret,
    dial,
    read_report,
    send_order,
)
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)


class TransferReports:
    """Unread reports; thread-safe."""

    def __init__(self) -> None:
        self._unread: deque[tuple[int, Report]] = deque()
        self._wake: Callable[[], None] = _no_wake

    def add(self, rank: int, report: Report) -> None:
        """Queues a report."""
        self._unread.append((rank, report))
        self._wake()

    def start(self, wake: Callable[[], None]) -> None:
        """Sets the function called after each report, and calls it if there are reports."""
        self._wake = wake
        if self._unread:
            wake()

    def take(self) -> list[tuple[int, Report]]:
        """Removes and returns all reports."""
        taken = []
        while self._unread:
            taken.append(self._unread.popleft())
        return taken


def _no_wake() -> None:
    """The engine loop has not started."""


class GroupPageTransport:
    """Implements `engine.ports.PageTransport`. `local_ranks`: in the leader's pod."""

    def __init__(
        self,
        own: KvTransferServer,
        reports: TransferReports,
        hosts: Sequence[str],
        ports: Sequence[int],
        local_ranks: range,
        secret: Secret,
        certificate: Certificate | None = None,
    ) -> None:
        self._own = own
        self._reports = reports
        self._connections: dict[int, PeerSocket] = {}
        for rank in range(1, len(ports)):
            host = "localhost" if rank in local_ranks else hosts[rank]
            self._connections[rank] = dial(host, ports[rank], rank, secret, certificate)
            threading.Thread(target=self._read_reports, args=(rank,), name="page-reports", daemon=True).start()
        self._addresses = [
            PageAddress("" if rank in local_ranks else host, port)
            for rank, (host, port) in enumerate(zip(hosts, ports, strict=True))
        ]

    @property
    def addresses(self) -> list[PageAddress]:
        """Where each rank receives pages; an empty host is the leader's pod."""
        return self._addresses

    def start(self, wake: Callable[[], None]) -> None:
        """Sets the function called after each report."""
        self._reports.start(wake)

    def expect(self, order: ExpectPages) -> None:
        """Lets every rank receive."""
        for rank in range(len(self._addresses)):
            self._order(rank, order)

    def forget(self, move: str) -> None:
        """Ends reception."""
        for rank in range(len(self._addresses)):
            self._order(rank, ForgetMove(move))

    def send(self, order: MoveOut | SendPrefix, copy: PageCopy) -> None:
        """Lets every rank send; they share `bytes_per_s` equally."""
        prepared, size = order.prepared, len(self._addresses)
        rate = None if order.bytes_per_s is None else order.bytes_per_s / size
        for rank, address in enumerate(prepared.addresses):
            self._order(rank, SendPages(move=order.move, address=address, key=prepared.key, copy=copy, bytes_per_s=rate))

    def stop(self, move: str) -> None:
        """Ends sending."""
        for rank in range(len(self._addresses)):
            self._order(rank, StopPages(move))

    def fetch(self, order: FetchPages) -> None:
        """Lets every rank read pages from its disk."""
        for rank in range(len(self._addresses)):
            self._order(rank, order)

    def reports(self) -> list[tuple[int, Report]]:
        """Reports since the last call, with ranks."""
        return self._reports.take()

    def close(self) -> None:
        """Disconnects from the other ranks."""
        for connection in self._connections.values():
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _order(self, rank: int, order: Order) -> None:
        connection = self._connections.get(rank)
        try:
            if connection is None:
                self._own.execute(order)
            else:
                send_order(connection, order)
        except OSError as error:  # the next step loses the peer too, and ends the incarnation
            log.error("rank accepts no KV transfer orders", extra={"rank": rank, "why": str(error)})

    def _read_reports(self, rank: int) -> None:
        connection = self._connections[rank]
        try:
            while True:
                self._reports.add(rank, read_report(connection))
        except OSError:
            return


def make_secret(spec: RankSpec) -> Secret:
    """Secret of the incarnation."""
    return Secret(bytes.fromhex(spec.token), spec.incarnation)


def open_transfer_server(
    spec: RankSpec,
    pages: PageAccess,
    reports: TransferReports,
    collective: Collective,
    certificate: Certificate | None = None,
) -> tuple[KvTransferServer, list[int]]:
    """Opens the server of this rank and returns it with all ranks' ports; collective. Raises PeerLost."""
    sink = RemoteReports() if spec.rank else LocalReports(partial(reports.add, 0))
    server = KvTransferServer(spec.rank, make_secret(spec), pages, sink, certificate=certificate)
    return server, [port for (port,) in collective.all_gather_integers([server.port])]
