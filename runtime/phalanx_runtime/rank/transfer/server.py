"""KV transfer server of a rank: one TCP port for pages from other groups and orders of rank 0.

    sender of another group   magic of `page_wire`, then the key of a move           -> `PageReceiver`
    rank 0 of this group      magic of orders, then mutual proof of the token        -> orders in, reports out

Each connection has a thread. At most `MAX_UNPROVEN` are open without key or proof, each for `HELLO_TIMEOUT_S`.
"""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective import proof
from phalanx_runtime.collective.connect import listen
from phalanx_runtime.collective.secure import PeerSocket, accept_securely, dial_securely
from phalanx_runtime.core.migration.page_orders import (
    Expecting,
    ExpectPages,
    FetchPages,
    ForgetMove,
    Forgotten,
    Order,
    PagesFetched,
    PeerRefused,
    Report,
    SendPages,
    StopPages,
)
from phalanx_runtime.rank.memory.page_memory import PageAccess
from phalanx_runtime.rank.transfer import page_wire
from phalanx_runtime.rank.transfer.receiver import PageReceiver
from phalanx_runtime.rank.transfer.sender import PageSender

log = logging.getLogger(__name__)

ORDERS_MAGIC = b"phxorder"
HELLO_TIMEOUT_S = 5.0
MAX_UNPROVEN = 64
MAX_FRAME_BYTES = 16 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


@dataclass(frozen=True, slots=True)
class Secret:
    """Shared by the ranks of an incarnation."""

    token: bytes
    incarnation: int

    def proof(self, role: str, rank: int, nonces: bytes) -> bytes:
        """Proves the token in this role."""
        return proof.proof(self.token, f"pages {role}", self.incarnation, (rank, 0), nonces)


class ReportSink(Protocol):
    """Sends reports to rank 0; thread-safe."""

    def send(self, report: Report) -> None:
        """Sends a report."""
        ...

    def attach(self, connection: PeerSocket) -> None:
        """Rank 0 opened this connection."""
        ...


class LocalReports:
    """Of rank 0 itself."""

    def __init__(self, add: Callable[[Report], None]) -> None:
        self.send = add

    def attach(self, connection: PeerSocket) -> None:
        """Does nothing."""


class RemoteReports:
    """Uses the connection of rank 0's orders. Keeps reports until it opens, such as the keys on disk; later ones are dropped."""

    def __init__(self) -> None:
        self._sending = threading.Lock()
        self._connection: PeerSocket | None = None
        self._early: list[Report] | None = []

    def attach(self, connection: PeerSocket) -> None:
        """Uses this connection from now on."""
        with self._sending:
            self._connection = connection
            early, self._early = self._early or [], None
            for report in early:
                self._send(report)

    def send(self, report: Report) -> None:
        """Sends a report, if connected, or once connected."""
        with self._sending:
            if self._early is not None:
                self._early.append(report)
            else:
                self._send(report)

    def _send(self, report: Report) -> None:
        if self._connection is not None:
            try:
                send_frame(self._connection, _encode(report))
            except OSError:
                self._connection = None


class _UnprovenConnection:
    """Takes a slot until it is proven or the timeout ends it."""

    def __init__(self, connection: PeerSocket, timeout_s: float, slots: threading.BoundedSemaphore) -> None:
        self._connection = connection
        self._slots = slots
        self._once = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._shut_down)
        self._timer.daemon = True
        self._timer.start()

    def release(self) -> None:
        """Frees the slot. Idempotent."""
        if self._once.acquire(blocking=False):
            self._timer.cancel()
            self._slots.release()

    def _shut_down(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already


class KvTransferServer:
    """Transfer server of one rank."""

    def __init__(
        self,
        rank: int,
        secret: Secret,
        pages: PageAccess,
        reports: ReportSink,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        certificate: Certificate | None = None,
    ) -> None:
        self._rank = rank
        self._certificate = certificate
        self._hello_timeout_s = hello_timeout_s
        self._secret = secret
        self._reports = reports
        self._receiver = PageReceiver(pages, reports.send)
        self._sender = PageSender(pages, reports.send, certificate)
        self._pages = pages
        for host in (pages.host, pages.host_parts):
            if host is not None and host.disk is not None:
                host.disk.start(reports.send)
        self._unproven_slots = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._listener = listen(0)
        threading.Thread(target=self._accept, name="pages", daemon=True).start()

    @property
    def port(self) -> int:
        """Its TCP port."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone does not end a blocked accept
        except OSError:
            pass  # no longer listening
        self._listener.close()

    def execute(self, order: Order) -> None:
        """Executes an order of rank 0; blocks at most while a page is written."""
        match order:
            case ExpectPages():
                self._receiver.expect(order)
                self._reports.send(Expecting(order.move))
            case ForgetMove(move):
                self._receiver.forget(move)
                self._reports.send(Forgotten(move))
            case SendPages():
                self._sender.send(order)
            case StopPages(move):
                self._sender.stop(move)
            case FetchPages():
                self._fetch(order)

    def _fetch(self, order: FetchPages) -> None:
        host = self._pages.host_parts if order.is_part else self._pages.host
        if host is None or host.disk is None:
            count = len(order.keys) if host is not None and not host.has_layers else 0
            self._reports.send(PagesFetched(order.number, count, order.is_part))
        else:
            host.disk.fetch(order, self._pages.wait_for, host.write, self._reports.send)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            if self._unproven_slots.acquire(blocking=False):
                threading.Thread(target=self._handle, args=(connection,), name="pages-in", daemon=True).start()
            else:
                connection.close()
                self._reports.send(PeerRefused("too many at once"))

    def _admitted(self, accepted: socket.socket) -> PeerSocket:
        """Returns the connection, by TLS if this rank has a certificate. Raises OSError."""
        accepted.settimeout(self._hello_timeout_s)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return accepted if self._certificate is None else accept_securely(accepted, self._certificate)

    def _handle(self, accepted: socket.socket) -> None:
        unproven = _UnprovenConnection(accepted, self._hello_timeout_s, self._unproven_slots)
        try:
            with closing(self._admitted(accepted)) as connection:
                magic = page_wire.read_exactly(connection, len(page_wire.MAGIC))
                why = self._serve(connection, magic, unproven.release)
        except OSError:
            why = "silent"
        except Exception:
            log.exception("a KV transfer connection failed")
            why = "error"
        finally:
            unproven.release()
        if why is not None:
            self._reports.send(PeerRefused(why))

    def _serve(self, connection: PeerSocket, magic: bytes, on_proved: Callable[[], None]) -> str | None:
        """Serves a connection. Returns the reason of a refusal. Raises OSError."""
        if magic == page_wire.MAGIC:
            return self._receiver.serve(connection, on_proved)
        if magic != ORDERS_MAGIC:
            return "malformed"
        peer_nonce, own_nonce = page_wire.read_exactly(connection, proof.NONCE_BYTES), proof.make_nonce()
        nonces = peer_nonce + own_nonce
        connection.sendall(own_nonce + self._secret.proof("listen", self._rank, nonces))
        peer_proof = page_wire.read_exactly(connection, proof.PROOF_BYTES)
        if not proof.is_equal_proof(peer_proof, self._secret.proof("dial", self._rank, nonces)):
            return "token"
        on_proved()
        connection.settimeout(None)
        self._reports.attach(connection)
        self._execute_all(connection)
        return None

    def _execute_all(self, connection: PeerSocket) -> None:
        while True:
            try:
                frame = read_frame(connection)
            except OSError:
                return
            self.execute(_decode_order(frame))


def dial(host: str, port: int, rank: int, secret: Secret, certificate: Certificate | None = None) -> PeerSocket:
    """Connects rank 0 to another rank, with mutual proof. Raises OSError."""
    dialled = socket.create_connection((host, port), HELLO_TIMEOUT_S)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection: PeerSocket = dialled if certificate is None else dial_securely(dialled, certificate)
    try:
        own_nonce = proof.make_nonce()
        connection.sendall(ORDERS_MAGIC + own_nonce)
        answer = page_wire.read_exactly(connection, proof.NONCE_BYTES + proof.PROOF_BYTES)
        nonces = own_nonce + answer[: proof.NONCE_BYTES]
        if not proof.is_equal_proof(answer[proof.NONCE_BYTES :], secret.proof("listen", rank, nonces)):
            raise ConnectionRefusedError(f"the peer at {host}:{port} did not prove the token of rank {rank}")
        connection.sendall(secret.proof("dial", rank, nonces))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def send_order(connection: PeerSocket, order: Order) -> None:
    """Raises OSError."""
    send_frame(connection, _encode(order))


def read_report(connection: PeerSocket) -> Report:
    """Raises OSError."""
    report: Report = _decode_report(read_frame(connection))
    return report


def send_frame(connection: PeerSocket, body: bytes) -> None:
    """Sends length and body. Raises OSError."""
    connection.sendall(len(body).to_bytes(4, "little") + body)


def read_frame(connection: PeerSocket) -> bytes:
    """Raises OSError."""
    size = int.from_bytes(page_wire.read_exactly(connection, 4), "little")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return page_wire.read_exactly(connection, size)
