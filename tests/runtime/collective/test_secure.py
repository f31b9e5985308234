"""Collectives between pods over mutual TLS: equal results, long messages in both directions, and who is rejected."""

import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective.connect import connect
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.collective.secure import accept_securely, dial_securely
from phalanx_runtime.collective.shared import FRAGMENT_BYTES
from phalanx_runtime.errors import PeerLost
from tests.certificates import Authority
from tests.runtime.ranks import in_threads, make_places, with_group

FRAGMENT = FRAGMENT_BYTES // 4
SIZES = [1, 576, FRAGMENT + 1, 3 * FRAGMENT + 7]


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Authority().certificate(tmp_path / "own", "group")


@pytest.mark.parametrize("pods", [[1, 1], [2, 1], [1, 1, 1]], ids=str)
def test_operations_equal_those_without_tls(pods: list[int], certificate: Certificate) -> None:
    def work(own: Collective) -> list[torch.Tensor]:
        results = []
        for size in SIZES:
            mine = torch.randn(size, generator=torch.Generator().manual_seed(own.rank))
            results += [own.all_reduce(mine.clone()), own.all_gather(mine.view(1, -1), 0)]
        message = own.broadcast(b"\x01" * (5 * FRAGMENT_BYTES + 3) if own.rank == 0 else None)
        return [*results, torch.frombuffer(bytearray(message), dtype=torch.uint8)]

    for plain, secure in zip(with_group(pods, work), with_group(pods, work, certificate), strict=True):
        assert all(torch.equal(left, right) for left, right in zip(plain, secure, strict=True))


@pytest.mark.parametrize("role", ["router", "stranger", "none"])
def test_rank_without_the_role_of_a_group_is_rejected(role: str, certificate: Certificate, tmp_path: Path) -> None:
    """It knows the token."""
    other = {"router": Authority, "stranger": Authority}.get(role)
    wrong = other().certificate(tmp_path / "other", "group" if role == "stranger" else role) if other else None
    (first, listener), (second, other_listener) = make_places([1, 1], certificate=certificate)

    def join(index: int) -> str:
        place, own = (first, listener) if index == 0 else (replace(second, certificate=wrong), other_listener)
        try:
            connect(place, 0.7, own).close()
        except PeerLost as error:
            return str(error)
        return ""

    reasons = in_threads([lambda: join(0), lambda: join(1)])
    assert "have not connected to rank 0" in reasons[0] and "does not admit rank 1" in reasons[1]


def test_both_directions_move_at_the_same_time(certificate: Certificate) -> None:
    """Each side has a reading and a writing thread, as the orders and reports of page transfers."""
    left, right = socket.socketpair()
    secured = in_threads([lambda: accept_securely(left, certificate), lambda: dial_securely(right, certificate)])
    message = bytes(range(256)) * 40_000
    received: list[bytes] = []

    def receive(side: int) -> None:
        data = bytearray(len(message))
        view = memoryview(data)
        while view:
            view = view[secured[side].recv_into(view) :]
        received.append(bytes(data))

    threads = [threading.Thread(target=receive, args=(side,)) for side in (0, 1)]
    threads += [threading.Thread(target=secured[side].sendall, args=(message,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == [message, message]
    secured[0].close()
    assert secured[1].recv_into(memoryview(bytearray(8))) == 0, "the end of the connection"
    secured[1].close()


def test_a_changed_record_is_reported_to_its_sender(certificate: Certificate) -> None:
    ends = socket.socketpair()
    left, right = in_threads([lambda: dial_securely(ends[0], certificate), lambda: accept_securely(ends[1], certificate)])
    try:
        right.settimeout(20.0)
        ends[0].sendall(b"\x17\x03\x03\x00\x20" + b"\x00" * 32)  # a record that no key encrypted
        with pytest.raises(ssl.SSLError, match="bad record mac"):
            right.receive_into(memoryview(bytearray(8)), is_blocking=True)
        left.settimeout(20.0)
        with pytest.raises(ssl.SSLError, match="alert bad record mac"):
            left.receive_into(memoryview(bytearray(8)), is_blocking=True)
    finally:
        left.close()
        right.close()


def test_renewed_certificate_is_used_by_the_next_connection(tmp_path: Path) -> None:
    authority = Authority()
    certificate = authority.certificate(tmp_path, "group")

    def connected() -> None:
        left, right = socket.socketpair()
        for side in in_threads([lambda: accept_securely(left, certificate), lambda: dial_securely(right, certificate)]):
            side.close()

    connected()
    former = certificate.current
    authority.add()
    authority.pairs.pop()
    authority.mount(tmp_path, "group")
    connected()
    assert certificate.current is not former and certificate.failure == ""
