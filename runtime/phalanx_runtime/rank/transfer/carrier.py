"""Rank 0's hand on the pages of all ranks: orders go to each, reports come back. Implements `engine.ports.Carrier`.

Beside the steps: nothing here waits for a step, and no step waits for anything here.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from phalanx_api.moves import MoveOut, PageAddress
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.migration.page_orders import ExpectPages, ForgetMove, Order, Report, SendPages, StopPages
from phalanx_runtime.rank.memory.page_memory import open_pages
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.transfer.server import KvTransferServer, Secret, dial, read_report, send_order
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)


class TransferReports:
    """What ranks told that was not read yet. Any thread adds; `wake` is called after each."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, Report]] = deque()
        self._wake: Callable[[], None] | None = None

    def add(self, rank: int, report: Report) -> None:
        """Keeps a report until `take`."""
        self._told.append((rank, report))
        if self._wake is not None:
            self._wake()

    def start(self, wake: Callable[[], None]) -> None:
        """Calls `wake` after each report from now on."""
        self._wake = wake

    def take(self) -> list[tuple[int, Report]]:
        """All that was told since, in order for each rank."""
        taken = []
        while self._told:
            taken.append(self._told.popleft())
        return taken


class PageCarrier:
    """The ranks of this group as those who send and take pages. `hosts[r]` and `ports[r]` are where rank r is reached.

    An address without a host is of a rank in the leader's pod: whoever tells it knows how the leader is reached.
    """

    def __init__(
        self,
        own: KvTransferServer,
        reports: TransferReports,
        hosts: Sequence[str],
        ports: Sequence[int],
        near: range,
        secret: Secret,
    ) -> None:
        self._own = own
        self._reports = reports
        self._links: dict[int, socket.socket] = {}
        for rank in range(1, len(ports)):
            self._links[rank] = dial("localhost" if rank in near else hosts[rank], ports[rank], rank, secret)
            threading.Thread(target=self._listen, args=(rank,), name="page-reports", daemon=True).start()
        self._addresses = [
            PageAddress("" if rank in near else host, port) for rank, (host, port) in enumerate(zip(hosts, ports, strict=True))
        ]

    @property
    def addresses(self) -> list[PageAddress]:
        """Where each rank takes pages in."""
        return self._addresses

    def start(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, from any thread, after each report."""
        self._reports.start(wake)

    def expect(self, move: str, key: bytes, first: int, pages: list[int], step: int) -> None:
        """Every rank takes positions from `first` on into these pages, from who knows the key."""
        for rank in range(len(self._addresses)):
            self._order(rank, ExpectPages(move=move, key=key, first=first, pages=pages, step=step))

    def forget(self, move: str) -> None:
        """No rank takes more for this move; each says Forgotten once it writes nothing."""
        for rank in range(len(self._addresses)):
            self._order(rank, ForgetMove(move))

    def send(
        self, asked: MoveOut, first: int, pages: list[int], step: int, num_computed: int | None, num_drafted: int = 0
    ) -> None:
        """Every rank sends positions from `first` on, which lie in these pages."""
        prepared, size = asked.prepared, len(self._addresses)
        rate = None if asked.bytes_per_s is None else asked.bytes_per_s / size
        for rank, address in enumerate(prepared.addresses):
            self._order(
                rank,
                SendPages(
                    move=asked.move,
                    address=address,
                    key=prepared.key,
                    first=first,
                    pages=pages,
                    step=step,
                    num_computed=num_computed,
                    bytes_per_s=rate,
                    num_drafted=num_drafted,
                ),
            )

    def stop(self, move: str) -> None:
        """No rank sends more of this move."""
        for rank in range(len(self._addresses)):
            self._order(rank, StopPages(move))

    def reports(self) -> list[tuple[int, Report]]:
        """What the ranks told since the last call, each with its rank."""
        return self._reports.take()

    def close(self) -> None:
        """Lets go of the other ranks."""
        for link in self._links.values():
            link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _order(self, rank: int, order: Order) -> None:
        link = self._links.get(rank)
        try:
            if link is None:
                self._own.obey(order)
            else:
                send_order(link, order)
        except OSError as error:  # the rank is gone: the steps will see it too, and end the incarnation
            log.error("rank %d takes no orders about pages: %s", rank, error)

    def _listen(self, rank: int) -> None:
        link = self._links[rank]
        try:
            while True:
                self._reports.add(rank, read_report(link))
        except OSError:
            return


def secret_of(spec: RankSpec) -> Secret:
    """What the ranks of this incarnation prove to one another."""
    return Secret(bytes.fromhex(spec.token), spec.incarnation)


def open_transfer_server(
    spec: RankSpec, runner: ModelRunner, reports: TransferReports, collective: Collective, device: torch.device
) -> tuple[KvTransferServer, list[int]]:
    """This rank's port for pages, and those of all ranks. All ranks call it together. Raises PeerLost."""
    tell = None if spec.rank else partial(reports.add, 0)
    pages, size = partial(open_pages, runner.caches), runner.pool.page_size
    door = KvTransferServer(
        spec.rank,
        secret_of(spec),
        page_size=size,
        open_pages=pages,
        wait_for=runner.wait_for,
        tell=tell,
        draft=runner.draft_pages,
    )
    ports = collective.all_gather(torch.tensor([door.port], device=device), 0)
    return door, [int(port) for port in ports]
