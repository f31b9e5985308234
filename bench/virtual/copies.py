"""KV transfer between groups in virtual time: pages are read when sent, checked on arrival, protected by a one-time key."""

import asyncio
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from bench.virtual.disk import DiskReader
from phalanx_api.moves import MoveOut, PageAddress, SendPrefix
from phalanx_runtime.core.migration.page_orders import (
    Expecting,
    ExpectPages,
    FetchPages,
    Forgotten,
    PageCopy,
    PagesReceived,
    PagesSent,
    PeerRefused,
    ReceiveFailed,
    Report,
    SendFailed,
)

if TYPE_CHECKING:
    from bench.virtual.group import Group

Slots = list[int | None]
BATCH = 2
"""Pages per message."""
LATENCY_S = 0.001


def _sum(slots: Slots) -> int:
    return zlib.crc32(repr(slots).encode())


class CopyTap(Protocol):
    """Decides the fate of pages in transfer."""

    def fate_of_pages(self, source: "Group", target: "Group") -> tuple[str, float]: ...


class VirtualCarrier:
    """Implements `phalanx_runtime.engine.ports.Carrier` for all ranks of one group, on the runner's pages."""

    def __init__(self, group: "Group", rng: random.Random) -> None:
        self.verifies_checksums = True
        self.tap: CopyTap | None = None
        self.groups: Mapping[str, Group] = {}
        self._group = group
        self._rng = rng
        self._wake: Callable[[], None] = lambda: None
        self._reports: list[tuple[int, Report]] = []
        self._keys: dict[bytes, str] = {}
        self._receiving: dict[str, tuple[int, list[int]]] = {}
        self._open: set[str] = set()
        """Moves with an accepted sender."""
        self._targets: dict[str, Group] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._reader = DiskReader(group.disk, group.runner, rng, group.shape.num_ranks, self._report_of)

    @property
    def addresses(self) -> Sequence[PageAddress]:
        """One address per rank, with the leader's host."""
        return [PageAddress("", rank) for rank in range(self._group.shape.num_ranks)]

    def has_moves(self) -> bool:
        return bool(self._keys or self._receiving or self._open)

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def end(self) -> None:
        for task in self._sending.values():
            task.cancel()

    def reports(self) -> Sequence[tuple[int, Report]]:
        reports, self._reports = self._reports, []
        return reports

    def _report_of(self, rank: int, report: Report) -> None:
        self._reports.append((rank, report))
        self._wake()

    def _report(self, report: Report) -> None:
        self._reports += [(rank, report) for rank in range(self._group.shape.num_ranks)]
        self._wake()

    # The source

    def send(self, order: MoveOut | SendPrefix, copy: PageCopy) -> None:
        previous = self._sending.get(order.move)
        self._sending[order.move] = asyncio.create_task(self._send(order, copy, previous))

    def stop(self, move: str) -> None:
        task = self._sending.pop(move, None)
        if task is not None:
            task.cancel()
        target = self._targets.pop(move, None)
        if target is not None:
            target.carrier.connection_lost(move)

    async def _send(
        self,
        order: MoveOut | SendPrefix,
        copy: PageCopy,
        previous: "asyncio.Task[None] | None",
    ) -> None:
        group, move, started = self._group, order.move, asyncio.get_running_loop().time()
        if previous is not None:
            await asyncio.wait([previous])
        target = self._targets.get(move)
        if target is None:
            await asyncio.sleep(LATENCY_S)
            target = self.groups.get(order.prepared.addresses[0].host)
            if target is None or not target.is_alive or not target.carrier.accept(order.prepared.key):
                self._report(SendFailed(move, "target_lost", "the target accepts no sender"))
                return
            self._targets[move] = target
        for start in range(0, len(copy.pages), BATCH):
            part = copy.pages[start : start + BATCH]
            await asyncio.sleep(len(part) / group.shape.pages_per_s)
            await group.awake()
            batch = {copy.first + start + i: group.runner.page(page) for i, page in enumerate(part)}
            if not await self._transfer(target, move, batch):
                return
        if not await self._transfer(target, move, {}, copy.num_computed):
            return
        await asyncio.sleep(LATENCY_S)
        await group.awake()
        self._report(PagesSent(move, copy.first + len(copy.pages), len(copy.pages), asyncio.get_running_loop().time() - started))

    async def _transfer(self, target: "Group", move: str, batch: dict[int, Slots], num_computed: int | None = None) -> bool:
        """Sends one message; returns whether the target took it."""
        sums = {position: _sum(slots) for position, slots in batch.items()}
        kind, delay_s = self.tap.fate_of_pages(self._group, target) if self.tap is not None else ("delivered", 0.0)
        await asyncio.sleep(LATENCY_S + delay_s)
        if kind == "corrupted" and batch:
            batch[min(batch)] = [(slot or 0) + 1 for slot in batch[min(batch)]]
        await target.awake_or_dead()
        if kind in ("lost", "closed") or not target.is_alive:
            target.carrier.connection_lost(move)
            self._report(SendFailed(move, "target_lost", "the connection was lost"))
            return False
        code = target.carrier.take(move, batch, sums, num_computed)
        if code is not None:
            self._report(SendFailed(move, code, "the target closed the connection"))
        return code is None

    # The target

    def fetch(self, order: FetchPages) -> None:
        """Reads pages from disk."""
        self._reader.fetch(order)

    def stored(self) -> None:
        """Writes what the last step stored to disk."""
        if self._group.shape.num_host_pages:
            self._reader.stored()

    def expect(self, order: ExpectPages) -> None:
        """Accepts one sender with this key."""
        self._keys[order.key] = order.move
        self._receiving[order.move] = (order.first, list(order.pages))
        asyncio.get_running_loop().call_later(LATENCY_S, self._report, Expecting(order.move))

    def forget(self, move: str) -> None:
        """Stops receiving for this move."""
        self._keys = {key: name for key, name in self._keys.items() if name != move}
        self._receiving.pop(move, None)
        self._open.discard(move)
        asyncio.get_running_loop().call_later(LATENCY_S, self._report, Forgotten(move))

    def accept(self, key: bytes) -> bool:
        move = self._keys.pop(key, None)
        if move is None:
            self._report(PeerRefused("a wrong or spent key"))
            return False
        self._open.add(move)
        return True

    def take(self, move: str, batch: dict[int, Slots], sums: dict[int, int], num_computed: int | None) -> str | None:
        """Writes pages; returns the code with which the connection is closed, if any."""
        if move not in self._open:
            return "target_lost"
        first, pages = self._receiving[move]
        if self.verifies_checksums and any(_sum(slots) != sums[position] for position, slots in batch.items()):
            self._open.discard(move)
            self._report(ReceiveFailed(move, "checksum", "a page is corrupt"))
            return "checksum"
        for position, slots in batch.items():
            self._group.runner.put(pages[position - first], list(slots))
        self._report(PagesReceived(move, len(batch), num_computed))
        return None

    def connection_lost(self, move: str) -> None:
        if self._group.is_alive and move in self._open:
            self._open.discard(move)
            self._report(ReceiveFailed(move, "source_lost", "the sender disconnected"))
