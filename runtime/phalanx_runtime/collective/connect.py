"""Connects a rank to all others of its group, authenticated by the group's token.

Ranks dial lower ranks and accept higher ones. Handshake: rank and nonce; nonce and proof; proof.
"""

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective import proof
from phalanx_runtime.collective.direct import DirectCollective
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.collective.secure import PeerSocket, SecureSocket, accept_securely, dial_securely
from phalanx_runtime.collective.shared import SharedPod, has_futex, open_pod_memory
from phalanx_runtime.collective.sockets import PeerSockets, set_keepalive
from phalanx_runtime.errors import PeerLost

Connected = socket.socket | SecureSocket
HANDSHAKE_S = 5.0
"""Bound on an unauthenticated connection."""
RETRY_S = 0.05
_HELLO = struct.Struct("<8sI16s")
_MAGIC = b"phalanx1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank and the addresses of its group."""

    rank: int
    world_size: int
    pod_ranks: range
    addresses: list[tuple[str, int]]
    """Listening address of each rank."""
    token: bytes
    incarnation: int
    pod_name: str
    """Unique to the ranks of one pod."""
    certificate: Certificate | None = None
    """Of the pod: ranks of other pods are reached by mutual TLS."""


def connect(place: RankPlace, timeout_s: float, listener: socket.socket | None = None) -> Collective:
    """Joins the direct collective of all ranks. Raises PeerLost after `timeout_s`."""
    if place.world_size == 1:
        return SoloCollective()
    local = place.pod_ranks if has_futex() else range(place.rank, place.rank + 1)
    remote = [rank for rank in range(place.world_size) if rank not in local]
    deadline = time.monotonic() + timeout_s
    sockets = PeerSockets(_connect_remote(place, remote, deadline, listener) if remote else {})
    try:
        pod = SharedPod(ranks=local, rank=place.rank, name=place.pod_name, token=place.token, incarnation=place.incarnation)
        memory = open_pod_memory(pod, max(deadline - time.monotonic(), 0.0))
    except BaseException:
        sockets.close()
        raise
    return DirectCollective(range(place.world_size), place.rank, memory, sockets)


def listen(port: int) -> socket.socket:
    """Listens on all addresses, with IPv6 where available. Port 0: any free port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
        except OSError:  # IPv6 is disabled on this machine
            pass
    return socket.create_server(("", port), backlog=64)


def _connect_remote(place: RankPlace, remote: list[int], deadline: float, listener: socket.socket | None) -> dict[int, Connected]:
    connections: dict[int, Connected] = {}
    own_listener = listener or listen(place.addresses[place.rank][1])
    acceptor = _Acceptor(place, own_listener, {rank for rank in remote if rank > place.rank})
    try:
        for rank in remote:
            if rank < place.rank:
                connections[rank] = _dial(place, rank, deadline)
        while len(connections) < len(remote):
            rank, connection = acceptor.next_connection(deadline)
            connections[rank] = connection
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        acceptor.close()
    return connections


class _Acceptor:
    """Accepts ranks, each in a thread."""

    def __init__(self, place: RankPlace, listener: socket.socket, expected: set[int]) -> None:
        self._place = place
        self._listener = listener
        self._expected = expected
        self._connections: queue.SimpleQueue[tuple[int, Connected]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept, name="collective-accept", daemon=True)
        self._closed = False
        listener.settimeout(0.2)
        self._thread.start()

    def next_connection(self, deadline: float) -> tuple[int, Connected]:
        try:
            rank, connection = self._connections.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            raise PeerLost(f"ranks {sorted(self._expected)} have not connected to rank {self._place.rank}") from None
        if rank not in self._expected:
            connection.close()
            return self.next_connection(deadline)
        self._expected.discard(rank)
        return rank, connection

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue  # `close` may have been called
            except OSError:
                # The peer closed, or no file descriptor is free.
                time.sleep(RETRY_S)
                continue
            threading.Thread(target=self._authenticate, args=(connection,), name="collective-authenticate", daemon=True).start()

    def _authenticate(self, accepted: socket.socket) -> None:
        accepted.settimeout(HANDSHAKE_S)
        connection: Connected = accepted
        try:
            connection = _secured(accepted, self._place.certificate, accept_securely)
            magic, rank, peer_nonce = _HELLO.unpack(_read(connection, _HELLO.size))
            ranks, nonce = (self._place.rank, rank), proof.make_nonce()
            if magic != _MAGIC or rank not in self._expected:
                raise ConnectionRefusedError(f"not one of the ranks expected: {rank}")
            nonces = peer_nonce + nonce
            connection.sendall(nonce + _proof(self._place, "listen", ranks, nonces))
            received = _read(connection, proof.PROOF_BYTES)
            if not proof.is_equal_proof(received, _proof(self._place, "dial", ranks, nonces)):
                raise ConnectionRefusedError(f"rank {rank} did not prove the token")
            connection.sendall(_MAGIC)
            connection.settimeout(None)
        except OSError:
            connection.close()
            return
        self._connections.put((rank, connection))


def _secured(
    connection: socket.socket, certificate: Certificate | None, secure: Callable[[socket.socket, Certificate], SecureSocket]
) -> Connected:
    """Returns the connection by TLS, if there is a certificate. Raises OSError."""
    if certificate is None:
        return connection
    secured = secure(connection, certificate)
    set_keepalive(connection)
    connection.settimeout(HANDSHAKE_S)
    return secured


def _dial(place: RankPlace, rank: int, deadline: float) -> Connected:
    """Connects with retries. Raises PeerLost at the deadline."""
    while True:
        connection: Connected | None = None
        try:
            dialled = socket.create_connection(place.addresses[rank], timeout=HANDSHAKE_S)
            connection = dialled
            connection = _secured(dialled, place.certificate, dial_securely)
            _prove_rank(place, rank, connection)
            connection.settimeout(None)
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() >= deadline:
                host, port = place.addresses[rank]
                raise PeerLost(f"rank {rank} at {host}:{port} does not admit rank {place.rank}: {error}") from error
        time.sleep(RETRY_S)


def _prove_rank(place: RankPlace, rank: int, connection: PeerSocket) -> None:
    ranks, nonce = (rank, place.rank), proof.make_nonce()
    connection.sendall(_HELLO.pack(_MAGIC, place.rank, nonce))
    response = _read(connection, proof.NONCE_BYTES + proof.PROOF_BYTES)
    nonces = nonce + response[: proof.NONCE_BYTES]
    if not proof.is_equal_proof(response[proof.NONCE_BYTES :], _proof(place, "listen", ranks, nonces)):
        raise ConnectionRefusedError(f"the listener of rank {rank} did not prove the token")
    connection.sendall(_proof(place, "dial", ranks, nonces))
    _read(connection, len(_MAGIC))


def _proof(place: RankPlace, role: str, ranks: tuple[int, int], nonces: bytes) -> bytes:
    return proof.proof(place.token, role, place.incarnation, ranks, nonces)


def _read(connection: PeerSocket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("closed during the handshake")
        view = view[count:]
    return bytes(buffer)
