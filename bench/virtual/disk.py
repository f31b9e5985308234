"""The disk of a group's machine in virtual time: reads and writes take a while, a slow one much longer; pages may be lost."""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from phalanx_runtime.core.migration.page_orders import DiskChanged, FetchPages, PagesFetched, Report

MAX_PAGES = 150
READ_S, WRITE_S = 0.003, 0.02
"""Of a page, of the pages of a step."""


class Pages(Protocol):
    """What of a runner the disk reads and writes."""

    last_step: int

    def put_host(self, slot: int, slots: list[int | None]) -> None:
        """Writes a slot of host memory."""


class Disk:
    """Pages by key. It survives the group, unless its machine is lost."""

    def __init__(self) -> None:
        self.pages: dict[bytes, list[int | None]] = {}
        self.delay_s = 0.0
        """Of each read and write, while the disk is slow."""
        self.loses_pages = False
        """Whether a read may find that pages are gone."""


class DiskReader:
    """The threads of all ranks that read and write one disk. Reports what they did."""

    def __init__(
        self, disk: Disk, runner: Pages, rng: random.Random, num_ranks: int, report: Callable[[int, Report], None]
    ) -> None:
        self._disk, self._runner, self._rng = disk, runner, rng
        self._num_ranks = num_ranks
        self._report = report
        self._known = set(disk.pages)
        """As reported."""
        self._writes_at: float | None = None
        if self._known:
            for rank in range(num_ranks):
                report(rank, DiskChanged(sorted(self._known), []))

    def stored(self) -> None:
        """Writes the pages of a step, and reports them later."""
        if self._writes_at is None and len(self._disk.pages) != len(self._known):
            delay_s = WRITE_S + self._disk.delay_s
            self._writes_at = asyncio.get_running_loop().time() + delay_s
            asyncio.get_running_loop().call_later(delay_s, self._written)

    def _written(self) -> None:
        self._writes_at = None
        pages = self._disk.pages
        for key in list(pages)[: max(0, len(pages) - MAX_PAGES)]:
            del pages[key]
        added, dropped = sorted(pages.keys() - self._known), sorted(self._known - pages.keys())
        self._known = set(pages)
        for rank in range(self._num_ranks):
            self._report(rank, DiskChanged(added, dropped))

    def fetch(self, order: FetchPages) -> None:
        """Reads pages after the step of the order."""
        delay_s = READ_S * len(order.keys) + self._disk.delay_s
        asyncio.get_running_loop().call_later(delay_s, self._read, order)

    def _read(self, order: FetchPages) -> None:
        if self._runner.last_step < order.step:  # a copy of the step may use the slots
            asyncio.get_running_loop().call_later(READ_S, self._read, order)
            return
        pages = self._disk.pages
        if self._disk.loses_pages and self._rng.random() < 0.5:
            pages.pop(order.keys[self._rng.randrange(len(order.keys))], None)
        count = next((i for i, key in enumerate(order.keys) if key not in pages), len(order.keys))
        counts = [count] * self._num_ranks
        if self._disk.loses_pages:  # each rank has its own share of a page
            counts = [self._rng.randint(0, count) for _ in counts]
        for key, slot in zip(order.keys[: min(counts)], order.slots, strict=False):
            self._runner.put_host(slot, list(pages[key]))
        for rank, found in enumerate(counts):
            self._report(rank, PagesFetched(order.number, found))
