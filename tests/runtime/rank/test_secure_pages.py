"""KV transfer between two ranks over mutual TLS: arrival, who is refused, and what a connection that ends causes."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx_frontend.tls import Certificate
from phalanx_runtime.core.migration.page_orders import (
    ExpectPages,
    ForgetMove,
    PagesReceived,
    PagesSent,
    PeerRefused,
    ReceiveFailed,
    SendFailed,
    StopPages,
)
from tests.certificates import Authority
from tests.polling import wait_until
from tests.runtime.corrupting import CorruptingProxy, CuttingProxy
from tests.runtime.page_ranks import KEY, Rank, check_arrival, make_caches, send

CUTS = 25
LAST_BYTES = 16
"""Fewer than the record that ends a transfer. Handshakes differ by a few bytes."""


@pytest.fixture(params=["TCP", "TLS"])
def certificate(request: pytest.FixtureRequest, tmp_path: Path) -> Certificate | None:
    return Authority().certificate(tmp_path / "own", "group") if request.param == "TLS" else None


@pytest.fixture
def source(certificate: Certificate | None) -> Iterator[Rank]:
    with Rank(make_caches(1), certificate=certificate) as rank:
        yield rank


@pytest.fixture
def target(certificate: Certificate | None) -> Iterator[Rank]:
    with Rank(make_caches(2), certificate=certificate) as rank:
        yield rank


def test_pages_arrive_bit_by_bit_over_tls(tmp_path: Path) -> None:
    authority = Authority()
    source_pod, target_pod = (authority.certificate(tmp_path / name, "group") for name in ("source", "target"))
    with Rank(make_caches(1), certificate=source_pod) as source, Rank(make_caches(2), certificate=target_pod) as target:
        check_arrival(source, target)


@pytest.mark.parametrize("role", [None, "router", "stranger"])
def test_sender_without_the_role_of_a_group_sends_nothing(tmp_path: Path, role: str | None) -> None:
    authority = Authority()
    certificate = None
    if role is not None:
        issuer = Authority() if role == "stranger" else authority
        certificate = issuer.certificate(tmp_path / "source", "group" if role == "stranger" else role)
    own = authority.certificate(tmp_path / "target", "group")
    with Rank(make_caches(1), certificate=certificate) as source, Rank(make_caches(2), certificate=own) as target:
        target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=[3], step=0))
        source.server.execute(send(target.address, 0, [2], 4))
        source.wait(SendFailed)
        target.wait(PeerRefused)
        assert not target.reports_of(PagesReceived) and not source.has_same(target, [(2, 3)])


def transferred(source: Rank, target: Rank, proxy: CuttingProxy) -> None:
    """Copies 8 pages through the proxy, until both ends report how it ended."""
    source.reports.clear()
    target.reports.clear()
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=list(range(8)), step=0))
    source.server.execute(send(proxy.address, 0, list(range(8)), 32))
    wait_until(lambda: source.reports_of(SendFailed) or source.reports_of(PagesSent))
    wait_until(lambda: ended(target) or target.reports_of(ReceiveFailed) or target.reports_of(PeerRefused))
    source.server.execute(StopPages("m1"))
    target.server.execute(ForgetMove("m1"))


def ended(target: Rank) -> bool:
    return any(one.num_computed is not None for one in target.reports if isinstance(one, PagesReceived))


@pytest.mark.parametrize("direction", ["pages", "answers"])
def test_cut_connection_gives_the_errors_of_tcp(
    source: Rank, target: Rank, direction: str, certificate: Certificate | None
) -> None:
    """The positions of the cuts are random, also within handshakes, frames and pages."""
    whole = CuttingProxy(target.server.port)
    transferred(source, target, whole)
    assert ended(target) and source.reports_of(PagesSent)
    is_answer = direction == "answers"
    total = (whole.answered if is_answer else whole.sent) - (LAST_BYTES if certificate else 0)
    for seed in range(CUTS):
        at = random.Random(seed).randrange(total)
        proxy = CuttingProxy(target.server.port, answers_at=at) if is_answer else CuttingProxy(target.server.port, at)
        transferred(source, target, proxy)
        assert {one.code for one in source.reports if isinstance(one, SendFailed)} == {"target_lost"}, (seed, at)
        assert is_answer or not ended(target), (seed, at)
        assert {one.code for one in target.reports if isinstance(one, ReceiveFailed)} <= {"source_lost"}, (seed, at)
        assert {one.why for one in target.reports if isinstance(one, PeerRefused)} <= {"silent"}, (seed, at)


@pytest.mark.parametrize("from_end", [100, 1000, 2000])
def test_changed_byte_of_a_page_is_never_written(
    source: Rank, target: Rank, from_end: int, certificate: Certificate | None
) -> None:
    whole = CuttingProxy(target.server.port)
    transferred(source, target, whole)
    former = [cache.k.clone() for cache in target.caches]
    target.reports.clear()
    source.reports.clear()
    target.server.execute(ExpectPages(move="m1", key=KEY, first=0, pages=list(range(8)), step=0))
    proxy = CorruptingProxy(target.server.port, whole.sent - from_end)
    source.server.execute(send(proxy.address, 0, list(range(8)), 32))
    assert [one.code for one in target.wait(ReceiveFailed) if isinstance(one, ReceiveFailed)] == ["checksum"]
    codes = [one.code for one in source.wait(SendFailed) if isinstance(one, SendFailed)]
    assert codes == ["target_lost" if certificate else "checksum"] and not ended(target)
    assert all(map(torch.equal, former, [cache.k for cache in target.caches])), (
        "a page has the bytes of the source, or its former ones"
    )
