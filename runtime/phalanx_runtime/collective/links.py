"""Fragments between ranks of different pods over TCP: one connection per pair, an 8-byte header before each fragment."""

import select
import socket
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx_runtime.collective.shared import FRAGMENT_BYTES
from phalanx_runtime.errors import PeerLost

_HEAD = struct.Struct("<II")
HEAD_BYTES = _HEAD.size


class _Incoming:
    """Received part of a peer's fragment. Reads no byte beyond the fragment."""

    __slots__ = ("_buffer", "_bytes", "_view", "filled", "more", "wanted")

    def __init__(self) -> None:
        self._buffer = bytearray(HEAD_BYTES + FRAGMENT_BYTES)
        self._view = memoryview(self._buffer)
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self.begin(0)

    def begin(self, expected: int) -> None:
        """Starts a new fragment. `expected`: its size, which allows one read; 0 if unknown."""
        self.filled, self.more = 0, False
        self.wanted = HEAD_BYTES + expected

    def receive(self, link: socket.socket, flags: int) -> bool:
        """Reads available bytes; returns true when the fragment is complete."""
        size = link.recv_into(self._view[self.filled : self.wanted], 0, flags)
        if size == 0:
            raise ConnectionResetError("closed by the peer")
        self.filled += size
        if self.filled < HEAD_BYTES:
            return False
        length, more = _HEAD.unpack_from(self._buffer)
        if length > FRAGMENT_BYTES or HEAD_BYTES + length < self.filled:
            raise ConnectionResetError(f"fragment of {length} bytes where {self.filled - HEAD_BYTES} or more were due")
        self.wanted, self.more = HEAD_BYTES + length, bool(more)
        return self.filled == self.wanted

    @property
    def fragment(self) -> Tensor:
        """Bytes of the fragment, valid until the next `begin`."""
        return self._bytes[HEAD_BYTES : self.wanted]


class Links:
    """Proven connections to ranks of other pods, by rank."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._incoming = {rank: _Incoming() for rank in sockets}
        for link in sockets.values():
            set_keepalive(link)

    @property
    def peers(self) -> list[int]:
        """Ranks at the other ends."""
        return list(self._sockets)

    def send(self, ranks: Iterable[int], fragment: Tensor, more: bool) -> dict[int, memoryview]:
        """Sends a uint8 fragment without blocking; returns the unsent rest by rank."""
        data = memoryview(fragment.numpy().data)
        head = _HEAD.pack(fragment.numel(), more)
        left = {}
        for rank in ranks:
            try:
                sent = self._sockets[rank].sendmsg([head, data], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise _lost(rank, error) from error
            if sent < HEAD_BYTES + len(data):
                left[rank] = memoryview(head + bytes(data))[sent:] if sent < HEAD_BYTES else data[sent - HEAD_BYTES :]
        return left

    def receive(self, ranks: Iterable[int], expected: int, left: dict[int, memoryview]) -> dict[int, tuple[Tensor, bool]]:
        """Receives the next fragment of each peer, with a flag for more to follow, and sends the rest in `left` concurrently.

        Two ranks that send large messages to each other therefore do not deadlock.
        """
        for rank in ranks:
            self._incoming[rank].begin(expected)
        if left:
            self._both_ways(set(ranks), left)
        else:
            for rank in ranks:
                self._receive_whole(rank)
        return {rank: (self._incoming[rank].fragment, self._incoming[rank].more) for rank in ranks}

    def close(self) -> None:
        """Closes every connection."""
        for link in self._sockets.values():
            link.close()

    def _receive_whole(self, rank: int) -> None:
        try:
            while not self._incoming[rank].receive(self._sockets[rank], socket.MSG_WAITALL):
                pass
        except OSError as error:
            raise _lost(rank, error) from error

    def _both_ways(self, due: set[int], left: dict[int, memoryview]) -> None:
        while due or left:
            reading, writing = {self._sockets[rank]: rank for rank in due}, {self._sockets[rank]: rank for rank in left}
            readable, writable, _ = select.select(list(reading), list(writing), [])
            for link in readable:
                rank = reading[link]
                try:
                    if self._incoming[rank].receive(link, socket.MSG_DONTWAIT):
                        due.discard(rank)
                except OSError as error:
                    raise _lost(rank, error) from error
            for link in writable:
                rank = writing[link]
                try:
                    left[rank] = left[rank][link.send(left[rank], socket.MSG_DONTWAIT) :]
                except OSError as error:
                    raise _lost(rank, error) from error
                if not left[rank]:
                    del left[rank]


def set_keepalive(link: socket.socket) -> None:
    """Sends without delay, and makes an idle connection fail about 15 s after the peer's machine vanished.

    No TCP_USER_TIMEOUT: a peer that computes longer than that without reading would count as lost. While data is in flight the
    supervisors detect the loss first by their pings.
    """
    link.setblocking(True)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _lost(rank: int, error: OSError) -> PeerLost:
    return PeerLost(f"the connection to rank {rank} is lost: {error}")
