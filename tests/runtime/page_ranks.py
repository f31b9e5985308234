"""Ranks with a transfer server and small pages, and orders between them."""

from dataclasses import dataclass, field
from typing import Self

import torch

from phalanx_api.moves import PageAddress
from phalanx_frontend.tls import Certificate
from phalanx_runtime.core.migration.page_orders import (
    NO_ROW,
    ExpectPages,
    PageCopy,
    PagesReceived,
    PagesSent,
    PeerRefused,
    ReceiveFailed,
    Report,
    SendPages,
)
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import DraftPages, PageAccess, Pages, StateRows, open_pages
from phalanx_runtime.rank.transfer import page_wire
from phalanx_runtime.rank.transfer.server import KvTransferServer, LocalReports, Secret
from tests.polling import wait_until

PAGE_SIZE, NUM_PAGES = 4, 12
KEY = b"k" * page_wire.KEY_BYTES
SECRET = Secret(b"token", 1)


def make_caches(seed: int, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> list[LayerCache]:
    torch.manual_seed(seed)
    shape = (NUM_PAGES, heads, PAGE_SIZE, 8)
    return [LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(3)]


@dataclass
class Rank:
    """One rank with a transfer server."""

    caches: list[LayerCache]
    draft: DraftPages | None = None
    step: int = 0
    certificate: Certificate | None = None
    reports: list[Report] = field(default_factory=list)
    states: StateRows | None = None

    def __post_init__(self) -> None:
        pages = PageAccess(
            page_size=PAGE_SIZE, open=self.open, open_draft=lambda: self.draft, wait_for=self.wait_for, states=self.states
        )
        self.server = KvTransferServer(0, SECRET, pages, LocalReports(self.reports.append), certificate=self.certificate)

    def open(self) -> Pages:
        return open_pages(self.caches)

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.step >= step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    @property
    def address(self) -> PageAddress:
        return PageAddress("localhost", self.server.port)

    def wait(self, kind: type[Report], count: int = 1) -> list[Report]:
        wait_until(lambda: len(self.reports_of(kind)) >= count)
        return self.reports_of(kind)

    def reports_of(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]

    def has_same(self, other: "Rank", pages: list[tuple[int, int]]) -> bool:
        return all(
            torch.equal(left.k[a], right.k[b]) and torch.equal(left.v[a], right.v[b])
            for a, b in pages
            for left, right in zip(self.caches, other.caches, strict=True)
        )


def send(
    address: PageAddress,
    first: int,
    pages: list[int],
    num_computed: int | None = None,
    *,
    key: bytes = KEY,
    step: int = 0,
    bytes_per_s: float | None = None,
    num_drafted: int = 0,
    row: int = NO_ROW,
) -> SendPages:
    copy = PageCopy(first=first, pages=pages, step=step, num_computed=num_computed, num_drafted=num_drafted, row=row)
    return SendPages(move="m1", address=address, key=key, copy=copy, bytes_per_s=bytes_per_s)


def check_arrival(source: Rank, target: Rank) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=1, pages=[9, 7, 5, 3], step=0))
    source.server.execute(send(target.address, 1, [0, 4]))
    assert [(one.end, one.num_bytes) for one in source.wait(PagesSent) if isinstance(one, PagesSent)] == [
        (3, 2 * open_pages(source.caches).page_bytes)
    ]
    source.server.execute(send(target.address, 3, [2], 14))
    assert [one.num_computed for one in target.wait(PagesReceived, 2) if isinstance(one, PagesReceived)] == [None, 14]
    source.wait(PagesSent, 2)
    assert source.has_same(target, [(0, 9), (4, 7), (2, 5)])
    assert not source.has_same(target, [(2, 3)])
    assert not [one for one in target.reports if isinstance(one, PeerRefused | ReceiveFailed)]
