"""KV transfer between two ranks over TCP: arrival, refusals, and no writes to forgotten pages."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx_api.moves import MoveOut, PageAddress, Prepared
from phalanx_runtime.core.migration.page_orders import (
    DiskChanged,
    Expecting,
    ExpectPages,
    FetchPages,
    ForgetMove,
    Forgotten,
    PageCopy,
    PagesFetched,
    PagesReceived,
    PagesSent,
    PeerRefused,
    ReceiveFailed,
    Report,
    SendFailed,
    StopPages,
)
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import DraftPages, PageAccess, Pages, open_pages
from phalanx_runtime.rank.tiers.host_pages import NO_HOST_PAGES, NO_ROWS
from phalanx_runtime.rank.transfer import page_wire
from phalanx_runtime.rank.transfer.server import KvTransferServer, LocalReports, RemoteReports, ReportSink
from phalanx_runtime.rank.transfer.transport import GroupPageTransport, TransferReports
from tests.certificates import Authority
from tests.polling import wait_until
from tests.runtime.corrupting import CorruptingProxy
from tests.runtime.page_ranks import KEY, NUM_PAGES, PAGE_SIZE, SECRET, Rank, check_arrival, make_caches, send


@pytest.fixture
def source() -> Iterator[Rank]:
    with Rank(make_caches(1)) as rank:
        yield rank


@pytest.fixture
def target() -> Iterator[Rank]:
    with Rank(make_caches(2)) as rank:
        yield rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pages_arrive_bit_by_bit_round_after_round(dtype: torch.dtype) -> None:
    with Rank(make_caches(1, dtype)) as source, Rank(make_caches(2, dtype)) as target:
        check_arrival(source, target)


@pytest.mark.parametrize(
    ("source_draft", "target_draft", "lost", "is_moved"),
    [
        (b"d", b"d", "", True), (b"d", b"e", "", False), (b"d", None, "", False), (None, b"d", "", False),
        (b"d", b"d", "source", False), (b"d", b"d", "target", False),
    ],
    ids=["the same", "another", "missing at the target", "missing at the source", "lost at the source", "lost at the target"],
)  # fmt: skip
def test_draft_layers_move_only_to_the_same_draft(
    source_draft: bytes | None, target_draft: bytes | None, lost: str, is_moved: bool
) -> None:
    def rank(seed: int, name: bytes | None) -> tuple[Rank, list[LayerCache]]:
        caches, layers = make_caches(seed), make_caches(seed + 10, heads=1)
        return Rank(caches, name and DraftPages(name, partial(open_pages, [*caches, *layers]))), layers  # type: ignore[arg-type]

    (source, from_layers), (target, to_layers) = rank(1, source_draft), rank(2, target_draft)
    if lost:
        (source if lost == "source" else target).draft = None
    with source, target:
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[9, 7], step=0))
        source.server.execute(send(target.address, 0, [0, 4], 2 * PAGE_SIZE, num_drafted=PAGE_SIZE + 1))
        received = [(one.num_computed, one.num_drafted) for one in target.wait(PagesReceived) if isinstance(one, PagesReceived)]
        assert received == [(2 * PAGE_SIZE, is_moved * (PAGE_SIZE + 1))]
        source.wait(PagesSent)
        assert source.has_same(target, [(0, 9), (4, 7)])
        moved = [torch.equal(a.k[0], b.k[9]) and torch.equal(a.v[4], b.v[7]) for a, b in zip(from_layers, to_layers, strict=True)]
        assert moved == [is_moved] * 3


def test_nothing_left_to_copy_is_a_transfer_too(source: Rank, target: Rank) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=2, pages=[5], step=0))
    source.server.execute(send(target.address, 2, [], 8))
    assert target.wait(PagesReceived) == [PagesReceived("m1", 0, 8)]


@pytest.mark.parametrize("case", ["wrong key", "unknown move", "used", "nonsense", "silence"])
def test_unknown_connection_is_closed_and_counted(source: Rank, target: Rank, case: str) -> None:
    before = [cache.k.clone() for cache in target.caches]
    if case in ("wrong key", "used"):
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5], step=0))
    if case == "used":
        source.server.execute(send(target.address, 0, [], None))
        source.wait(PagesSent)
    if case in ("nonsense", "silence"):
        with socket.create_connection(("localhost", target.server.port)) as connection:
            if case == "nonsense":
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    else:
        with Rank(make_caches(3)) as other:
            other.server.execute(send(target.address, 0, [1], 4, key=b"x" * page_wire.KEY_BYTES if case == "wrong key" else KEY))
            assert isinstance(failed := other.wait(SendFailed)[0], SendFailed)
            assert failed.code == "target_lost"
    reasons = {"wrong key": "key", "unknown move": "unknown", "used": "used", "nonsense": "malformed", "silence": "silent"}
    assert target.wait(PeerRefused) == [PeerRefused(reasons[case])]
    assert all(torch.equal(old, cache.k) for old, cache in zip(before, target.caches, strict=True))


def test_slow_unknown_connection_is_closed_like_a_silent_one() -> None:
    reports: list[Report] = []
    pages = PageAccess(page_size=PAGE_SIZE, open=lambda: open_pages(make_caches(1)))
    server = KvTransferServer(0, SECRET, pages, LocalReports(reports.append), hello_timeout_s=0.1)
    try:
        with socket.create_connection(("localhost", server.port)) as connection, pytest.raises(OSError):
            for at in range(1000):  # one byte at a time, faster than the timeout
                connection.sendall((page_wire.MAGIC + b"x" * 1000)[at : at + 1])
                time.sleep(0.02)
    finally:
        server.close()


@pytest.mark.parametrize("at", [200, 1000, 1800])
def test_a_changed_byte_ends_the_transfer_on_both_sides(source: Rank, target: Rank, at: int) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5, 6, 7], step=0))
    proxy = CorruptingProxy(target.server.port, at)
    source.server.execute(send(proxy.address, 0, [1, 2, 3], 12))
    assert isinstance(failed := target.wait(ReceiveFailed)[0], ReceiveFailed)
    assert failed.code in ("checksum", "malformed", "incompatible")
    assert source.wait(SendFailed)
    assert not [one for one in target.reports if isinstance(one, PagesReceived)]


@pytest.mark.parametrize(
    ("first", "pages", "tokens", "code"),
    [(0, [1, 2, 3], None, "no_room"), (1, [1], 8, "malformed"), (0, [1], 8, "malformed"), (0, [1], 6, "malformed")],
    ids=["more than reserved", "a page missing before", "a page missing after", "a partial page missing after"],
)
def test_positions_that_do_not_fit_end_the_transfer(
    source: Rank, target: Rank, first: int, pages: list[int], tokens: int | None, code: str
) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5, 6], step=0))
    source.server.execute(send(target.address, first, pages, tokens))
    assert isinstance(failed := target.wait(ReceiveFailed)[0], ReceiveFailed)
    assert failed.code == code


def test_pages_of_another_size_are_incompatible(target: Rank) -> None:
    with Rank(make_caches(1, heads=1)) as source:
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5, 6], step=0))
        source.server.execute(send(target.address, 0, [1], 4))
        assert isinstance(failed := source.wait(SendFailed)[0], SendFailed)
    assert failed.code == "incompatible"


def test_forgotten_move_writes_no_page(source: Rank, target: Rank) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=list(range(NUM_PAGES)), step=0))
    order = send(target.address, 0, [0] * NUM_PAGES, bytes_per_s=20_000.0)
    source.server.execute(order)
    while source.has_same(target, [(0, 0)]) is False:
        time.sleep(0.001)
    target.server.execute(ForgetMove("m1"))
    assert target.reports[-1] == Forgotten("m1")
    kept = [cache.k.clone() for cache in target.caches]
    source.wait(SendFailed)
    assert all(torch.equal(old, cache.k) for old, cache in zip(kept, target.caches, strict=True))
    assert not source.has_same(target, [(0, NUM_PAGES - 1)])


class SlowRank(Rank):
    """Writes a page once `may_write` is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_writing, self.may_write = threading.Event(), threading.Event()

    def open(self) -> Pages:
        return SlowPages(self, super().open())


@dataclass
class SlowPages:
    rank: SlowRank
    pages: Pages

    @property
    def page_bytes(self) -> int:
        return self.pages.page_bytes

    def read(self, page: int) -> list[memoryview]:
        return self.pages.read(page)

    def write(self, page: int, data: memoryview) -> None:
        self.rank.is_writing.set()
        assert self.rank.may_write.wait(10)
        self.pages.write(page, data)


def test_move_is_forgotten_after_the_page_being_written(source: Rank) -> None:
    with SlowRank(make_caches(2)) as target:
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5], step=0))
        source.server.execute(send(target.address, 0, [1], PAGE_SIZE))
        assert target.is_writing.wait(10)
        forget = threading.Thread(target=target.server.execute, args=(ForgetMove("m1"),))
        forget.start()
        forget.join(0.3)
        forgotten_during_write = target.reports_of(Forgotten)
        target.may_write.set()
        target.wait(Forgotten)
        assert source.has_same(target, [(1, 5)]) and not forgotten_during_write
        forget.join()


class LostStates:
    """Rows that another request has."""

    row_bytes = 4

    def read(self, row: int, num_tokens: int) -> bytes:
        raise ValueError(f"row {row} has the state of 3 tokens, not of {num_tokens}")

    def write(self, row: int, num_tokens: int, data: memoryview) -> None:
        raise AssertionError("no state arrives")


def test_a_lost_state_ends_the_transfer(target: Rank) -> None:
    with Rank(make_caches(1), states=LostStates()) as source:
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5, 6], step=0, row=1))
        source.server.execute(send(target.address, 0, [1, 2], 8, row=0))
        assert isinstance(failed := source.wait(SendFailed)[0], SendFailed)
        assert (failed.code, failed.why) == (
            "preempted",
            "the state of the request is another one: row 0 has the state of 3 tokens, not of 8",
        )


def test_copy_obeys_its_rate_and_ends_when_stopped(source: Rank, target: Rank) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=list(range(NUM_PAGES)), step=0))
    size = open_pages(source.caches).page_bytes
    source.server.execute(send(target.address, 0, [1, 2, 3], bytes_per_s=size / 0.05))
    assert isinstance(sent := source.wait(PagesSent)[0], PagesSent)
    assert sent.wall_s >= 0.15
    source.server.execute(send(target.address, 3, [1] * 9, bytes_per_s=size / 5))
    source.server.execute(StopPages("m1"))
    assert target.wait(ReceiveFailed)
    assert len([one for one in source.reports if isinstance(one, PagesSent)]) == 1
    assert not [one for one in source.reports if isinstance(one, SendFailed)]


def test_pages_are_accessed_after_their_step(source: Rank, target: Rank) -> None:
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[5], step=3))
    source.server.execute(send(target.address, 0, [1], 4, step=2))
    time.sleep(0.05)
    assert not source.has_same(target, [(1, 5)])
    source.step = 2
    time.sleep(0.05)
    assert not source.has_same(target, [(1, 5)])
    target.step = 3
    target.wait(PagesReceived)
    assert source.has_same(target, [(1, 5)])


def test_early_reports_reach_rank_0(source: Rank) -> None:
    """A rank reports the keys on its disk before rank 0 connects."""
    reports, sink, early = TransferReports(), RemoteReports(), DiskChanged([b"k" * 16], [])
    access = PageAccess(page_size=PAGE_SIZE, open=partial(open_pages, source.caches))
    sinks: list[ReportSink] = [LocalReports(partial(reports.add, 0)), sink]
    servers = [KvTransferServer(rank, SECRET, access, each) for rank, each in enumerate(sinks)]
    sink.send(early)
    transport = GroupPageTransport(servers[0], reports, ["", ""], [server.port for server in servers], range(2), SECRET)
    wait_until(lambda: (1, early) in transport.reports())
    transport.close()
    for server in servers:
        server.close()


def test_a_rank_without_such_layers_lacks_no_page() -> None:
    """Of a page it has its whole share, nothing: a request waits for the pages of the other stages."""
    reports = list[Report]()
    access = PageAccess(page_size=PAGE_SIZE, open=partial(open_pages, make_caches(1)), host=NO_ROWS, host_parts=NO_HOST_PAGES)
    server = KvTransferServer(0, SECRET, access, LocalReports(reports.append))
    for is_part in (False, True):
        server.execute(FetchPages(number=1, keys=[b"a" * 16, b"b" * 16], slots=[0, 1], step=0, is_part=is_part))
    server.close()
    assert reports == [PagesFetched(1, 2), PagesFetched(1, 0, True)], "without host memory it has no part"


@pytest.mark.parametrize("is_secure", [False, True], ids=["tcp", "tls"])
def test_rank_0_orders_all_ranks_and_collects_answers(source: Rank, target: Rank, tmp_path: Path, is_secure: bool) -> None:
    certificate = Authority().certificate(tmp_path, "group") if is_secure else None
    opened: list[KvTransferServer] = []

    def group(caches: list[list[LayerCache]]) -> GroupPageTransport:
        reports = TransferReports()
        sinks: list[ReportSink] = [LocalReports(partial(reports.add, 0)), RemoteReports()]
        servers = [
            KvTransferServer(
                rank, SECRET, PageAccess(page_size=PAGE_SIZE, open=partial(open_pages, own)), sink, certificate=certificate
            )
            for rank, (own, sink) in enumerate(zip(caches, sinks, strict=True))
        ]
        opened.extend(servers)
        return GroupPageTransport(
            servers[0], reports, ["", ""], [server.port for server in servers], range(2), SECRET, certificate
        )

    woken = threading.Event()
    sending = group([source.caches, make_caches(3)])
    receiving = group([target.caches, make_caches(4)])
    receiving.start(woken.set)
    receiving.expect(ExpectPages(move="m1", key=KEY, first=0, pages=[3], step=0))
    reports: list[tuple[int, Report]] = []
    while (1, Expecting("m1")) not in reports:  # a sender that connects before is refused
        assert woken.wait(10)
        woken.clear()
        reports += receiving.reports()
    reports.clear()
    addresses = [PageAddress("localhost", address.port) for address in receiving.addresses]
    sending.send(
        MoveOut(move="m1", handle=1, epoch=0, prepared=Prepared(move="m1", cached_tokens=0, addresses=addresses, key=KEY)),
        PageCopy(first=0, pages=[2], step=0, num_computed=4),
    )
    while len(reports) < 2:
        assert woken.wait(10)
        woken.clear()
        reports += receiving.reports()
    assert sorted(reports, key=lambda report: report[0]) == [(0, PagesReceived("m1", 768, 4)), (1, PagesReceived("m1", 768, 4))]
    receiving.forget("m1")
    while len(reports) < 4:
        reports += receiving.reports()
    assert sorted(rank for rank, report in reports if report == Forgotten("m1")) == [0, 1]
    for transport in (receiving, sending):
        transport.close()
    for server in opened:
        server.close()


def test_earlier_reports_wake_an_engine_that_starts() -> None:
    """A disk reports its keys before the engine does anything."""
    reports, woken = TransferReports(), list[bool]()
    reports.start(lambda: woken.append(True))
    assert woken == []
    reports.add(0, Forgotten("m"))
    reports.start(lambda: woken.append(True))
    assert len(woken) == 2
