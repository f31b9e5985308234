"""Connects a rank to all others of its group; each peer proves the group's token.

A rank dials the lower ranks of other pods and accepts the higher ones. The dialler sends its rank and a nonce, the listener
answers with a nonce and its proof, the dialler sends its own proof. A connection without a proof occupies a thread for at most
`HANDSHAKE_S` and does not reach the exchange.
"""

import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass

from phalanx_runtime.collective import proof
from phalanx_runtime.collective.links import Links
from phalanx_runtime.collective.own import DirectCollective
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.collective.shared import SharedMemory, SharedPod, has_futex
from phalanx_runtime.errors import PeerLost

HANDSHAKE_S = 5.0
RETRY_S = 0.05
_HELLO = struct.Struct("<8sI16s")
_MAGIC = b"phalanx1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Identity of a rank and the addresses of its group."""

    rank: int
    world_size: int
    near: range
    """Ranks of this pod."""
    addresses: list[tuple[str, int]]
    """Listening address of each rank."""
    token: bytes
    incarnation: int
    pod_name: str
    """Equal for the ranks of one pod and of no other."""


def connect(place: RankPlace, timeout_s: float, listener: socket.socket | None = None) -> Collective:
    """Collective over all ranks. Raises PeerLost when one of them has not connected after `timeout_s`."""
    if place.world_size == 1:
        return SoloCollective()
    near = place.near if has_futex() else range(place.rank, place.rank + 1)
    far = [rank for rank in range(place.world_size) if rank not in near]
    deadline = time.monotonic() + timeout_s
    links = Links(_meet(place, far, deadline, listener)) if far else None
    try:
        pod = SharedPod(ranks=near, rank=place.rank, name=place.pod_name, token=place.token, incarnation=place.incarnation)
        shared = SharedMemory(pod, max(deadline - time.monotonic(), 0.0)) if len(near) > 1 else None
    except BaseException:
        if links:
            links.close()
        raise
    return DirectCollective(range(place.world_size), place.rank, shared, links)


def listen(port: int) -> socket.socket:
    """Listening socket on every address of this pod, IPv6 included where available. Port 0 selects a free port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
        except OSError:  # IPv6 is compiled in but disabled on this machine
            pass
    return socket.create_server(("", port), backlog=64)


def _meet(place: RankPlace, far: list[int], deadline: float, listener: socket.socket | None) -> dict[int, socket.socket]:
    """Proven connections to the ranks in `far`."""
    found: dict[int, socket.socket] = {}
    own = listener or listen(place.addresses[place.rank][1])
    listening = _Listener(place, own, {rank for rank in far if rank > place.rank})
    try:
        for rank in far:
            if rank < place.rank:
                found[rank] = _dial(place, rank, deadline)
        while len(found) < len(far):
            rank, link = listening.next_connection(deadline)
            found[rank] = link
    except BaseException:
        for link in found.values():
            link.close()
        raise
    finally:
        listening.close()
    return found


class _Listener:
    """Accepts the expected ranks, each in its own thread so that a silent connection delays no other."""

    def __init__(self, place: RankPlace, listener: socket.socket, expected: set[int]) -> None:
        self._place = place
        self._listener = listener
        self._expected = expected
        self._connections: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept, name="collective-accept", daemon=True)
        self._closed = False
        listener.settimeout(0.2)
        self._thread.start()

    def next_connection(self, deadline: float) -> tuple[int, socket.socket]:
        """The next rank that has proved the token. Raises PeerLost at the deadline."""
        try:
            rank, link = self._connections.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            raise PeerLost(f"ranks {sorted(self._expected)} have not connected to rank {self._place.rank}") from None
        if rank not in self._expected:
            link.close()
            return self.next_connection(deadline)
        self._expected.discard(rank)
        return rank, link

    def close(self) -> None:
        """Stops accepting."""
        self._closed = True
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # The caller closed, or no file descriptor is free: try the next. Missing ranks show at the deadline.
                time.sleep(RETRY_S)
                continue
            threading.Thread(target=self._greet, args=(link,), name="collective-greet", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        link.settimeout(HANDSHAKE_S)
        try:
            magic, rank, theirs = _HELLO.unpack(_read(link, _HELLO.size))
            ranks, mine = (self._place.rank, rank), proof.make_nonce()
            if magic != _MAGIC or rank not in self._expected:
                raise ConnectionRefusedError(f"not one of the ranks expected: {rank}")
            link.sendall(mine + _proof(self._place, "listen", ranks, theirs + mine))
            if not proof.is_equal_proof(_read(link, proof.PROOF_BYTES), _proof(self._place, "dial", ranks, theirs + mine)):
                raise ConnectionRefusedError(f"rank {rank} did not prove the token")
            link.sendall(_MAGIC)
        except OSError:
            # No proof, or a peer that died: reject it. Missing ranks show at the deadline.
            link.close()
            return
        self._connections.put((rank, link))


def _dial(place: RankPlace, rank: int, deadline: float) -> socket.socket:
    """Proven connection to a lower rank, retried until it succeeds. Raises PeerLost at the deadline."""
    while True:
        link = None
        try:
            link = socket.create_connection(place.addresses[rank], timeout=HANDSHAKE_S)
            _introduce(place, rank, link)
            return link
        except OSError as error:
            if link is not None:
                link.close()
            if time.monotonic() >= deadline:
                host, port = place.addresses[rank]
                raise PeerLost(f"rank {rank} at {host}:{port} does not let rank {place.rank} in: {error}") from error
        time.sleep(RETRY_S)


def _introduce(place: RankPlace, rank: int, link: socket.socket) -> None:
    ranks, mine = (rank, place.rank), proof.make_nonce()
    link.sendall(_HELLO.pack(_MAGIC, place.rank, mine))
    answer = _read(link, proof.NONCE_BYTES + proof.PROOF_BYTES)
    nonces = mine + answer[: proof.NONCE_BYTES]
    if not proof.is_equal_proof(answer[proof.NONCE_BYTES :], _proof(place, "listen", ranks, nonces)):
        raise ConnectionRefusedError(f"the listener of rank {rank} did not prove the token")
    link.sendall(_proof(place, "dial", ranks, nonces))
    _read(link, len(_MAGIC))  # admitted


def _proof(place: RankPlace, role: str, ranks: tuple[int, int], nonces: bytes) -> bytes:
    return proof.proof(place.token, role, place.incarnation, ranks, nonces)


def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = link.recv(size - len(data))
        if not got:
            raise ConnectionResetError("closed during the handshake")
        data += got
    return data
