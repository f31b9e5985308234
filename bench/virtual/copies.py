"""Pages on their way from group to group in virtual time: read when sent, checked when they come, under a one-time key."""

import asyncio
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from phalanx_api.moves import MoveOut, PageAddress
from phalanx_runtime.core.migration.page_orders import (
    Expecting,
    Forgotten,
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
"""Pages sent at once."""
SOON_S = 0.001


def _sum(slots: Slots) -> int:
    return zlib.crc32(repr(slots).encode())


class CopyTap(Protocol):
    """Says what becomes of pages on their way."""

    def copied(self, source: "Group", target: "Group") -> tuple[str, float]:
        """Kind as in `net.Fate`, and seconds of delay."""
        ...


class VirtualCarrier:
    """Implements `phalanx_runtime.engine.ports.Carrier`: the ranks of one group, whose pages are the runner's."""

    def __init__(self, group: "Group", chance: random.Random) -> None:
        self.checks = True
        self.tap: CopyTap | None = None
        self.groups: Mapping[str, Group] = {}
        self._group = group
        self._chance = chance
        self._wake: Callable[[], None] = lambda: None
        self._reports: list[tuple[int, Report]] = []
        self._keys: dict[bytes, str] = {}
        self._taking: dict[str, tuple[int, list[int]]] = {}
        self._open: set[str] = set()
        """Moves of which a sender was let in."""
        self._targets: dict[str, Group] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    @property
    def addresses(self) -> Sequence[PageAddress]:
        """One for each rank, reached where the leader is."""
        return [PageAddress("", rank) for rank in range(self._group.shape.num_ranks)]

    def remembers(self) -> bool:
        """Whether a move is still known."""
        return bool(self._keys or self._taking or self._open)

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` is called after each report."""
        self._wake = wake

    def end(self) -> None:
        """Ends what is being sent."""
        for task in self._sending.values():
            task.cancel()

    def reports(self) -> Sequence[tuple[int, Report]]:
        """What was told since the last call."""
        told, self._reports = self._reports, []
        return told

    def _tell(self, report: Report) -> None:
        """Every rank says so."""
        self._reports += [(rank, report) for rank in range(self._group.shape.num_ranks)]
        self._wake()

    # The source

    def send(
        self, asked: MoveOut, first: int, pages: list[int], step: int, num_computed: int | None, num_drafted: int = 0
    ) -> None:
        """Begins to send, after what is being sent of this move."""
        before = self._sending.get(asked.move)
        self._sending[asked.move] = asyncio.create_task(self._send(asked, first, pages, num_computed, before))

    def stop(self, move: str) -> None:
        """Sends no more of this move."""
        task = self._sending.pop(move, None)
        if task is not None:
            task.cancel()
        target = self._targets.pop(move, None)
        if target is not None:
            target.carrier.closed(move)

    async def _send(
        self, asked: MoveOut, first: int, pages: list[int], num_computed: int | None, before: "asyncio.Task[None] | None"
    ) -> None:
        group, move, began = self._group, asked.move, asyncio.get_running_loop().time()
        if before is not None:
            await asyncio.wait([before])
        target = self._targets.get(move)
        if target is None:
            await asyncio.sleep(SOON_S)
            target = self.groups.get(asked.prepared.addresses[0].host)
            if target is None or not target.is_alive or not target.carrier.accept(asked.prepared.key):
                self._tell(SendFailed(move, "target_lost", "the target lets nobody in"))
                return
            self._targets[move] = target
        for start in range(0, len(pages), BATCH):
            part = pages[start : start + BATCH]
            await asyncio.sleep(len(part) / group.shape.pages_per_s)
            await group.awake()
            if not await self._carry(target, move, {first + start + i: group.runner.page(page) for i, page in enumerate(part)}):
                return
        if not await self._carry(target, move, {}, num_computed):
            return
        await asyncio.sleep(SOON_S)
        await group.awake()
        self._tell(PagesSent(move, first + len(pages), len(pages), asyncio.get_running_loop().time() - began))

    async def _carry(self, target: "Group", move: str, batch: dict[int, Slots], num_computed: int | None = None) -> bool:
        """Whether the target took these pages."""
        sums = {position: _sum(slots) for position, slots in batch.items()}
        kind, delay_s = self.tap.copied(self._group, target) if self.tap is not None else ("goes", 0.0)
        await asyncio.sleep(SOON_S + delay_s)
        if kind == "damaged" and batch:
            batch[min(batch)] = [(slot or 0) + 1 for slot in batch[min(batch)]]
        await target.awake_or_dead()
        if kind in ("lost", "breaks") or not target.is_alive:
            target.carrier.closed(move)
            self._tell(SendFailed(move, "target_lost", "the connection broke"))
            return False
        code = target.carrier.take(move, batch, sums, num_computed)
        if code is not None:
            self._tell(SendFailed(move, code, "the target closed the connection"))
        return code is None

    # The target

    def expect(self, move: str, key: bytes, first: int, pages: list[int], step: int) -> None:
        """Lets a sender in that has the key, once."""
        self._keys[key] = move
        self._taking[move] = (first, list(pages))
        asyncio.get_running_loop().call_later(SOON_S, self._tell, Expecting(move))

    def forget(self, move: str) -> None:
        """Takes nothing more for this move."""
        self._keys = {key: name for key, name in self._keys.items() if name != move}
        self._taking.pop(move, None)
        self._open.discard(move)
        asyncio.get_running_loop().call_later(SOON_S, self._tell, Forgotten(move))

    def accept(self, key: bytes) -> bool:
        """Whether a sender is let in."""
        move = self._keys.pop(key, None)
        if move is None:
            self._tell(PeerRefused("a wrong or spent key"))
            return False
        self._open.add(move)
        return True

    def take(self, move: str, batch: dict[int, Slots], sums: dict[int, int], num_computed: int | None) -> str | None:
        """None when the pages were taken, else why the connection is closed."""
        if move not in self._open:
            return "target_lost"
        first, pages = self._taking[move]
        if self.checks and any(_sum(slots) != sums[position] for position, slots in batch.items()):
            self._open.discard(move)
            self._tell(ReceiveFailed(move, "checksum", "a page is damaged"))
            return "checksum"
        for position, slots in batch.items():
            self._group.runner.put(pages[position - first], list(slots))
        self._tell(PagesReceived(move, len(batch), num_computed))
        return None

    def closed(self, move: str) -> None:
        """The sender is gone."""
        if self._group.is_alive and move in self._open:
            self._open.discard(move)
            self._tell(ReceiveFailed(move, "source_lost", "the sender is gone"))
