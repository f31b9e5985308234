"""Exchanges fragments between pods over TCP, with an 8-byte header each."""

import select
import socket
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from phalanx_runtime.collective.secure import SecureSocket
from phalanx_runtime.collective.shared import FRAGMENT_BYTES
from phalanx_runtime.errors import PeerLost

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


class _PlainSocket:
    """The methods of `SecureSocket` that exchange fragments, without TLS: nothing is copied."""

    __slots__ = ("_socket",)
    has_input = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def start_send(self, pieces: list[bytes | memoryview]) -> memoryview:
        header, data = pieces
        try:
            sent = self._socket.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < HEADER_BYTES:
            return memoryview(bytes(header) + bytes(data))[sent:]
        return memoryview(data)[sent - HEADER_BYTES :]

    def send_more(self, unsent: memoryview) -> memoryview:
        return unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]

    def receive_into(self, view: memoryview, is_blocking: bool) -> int:
        size = self._socket.recv_into(view, 0, socket.MSG_WAITALL if is_blocking else socket.MSG_DONTWAIT)
        if size == 0:
            raise ConnectionResetError("closed by the peer")
        return size

    def close(self) -> None:
        self._socket.close()


class _Receiver:
    """Receives one fragment at a time."""

    __slots__ = ("_buffer", "_bytes", "_view", "due_bytes", "has_more", "received_bytes")

    def __init__(self) -> None:
        self._buffer = bytearray(HEADER_BYTES + FRAGMENT_BYTES)
        self._view = memoryview(self._buffer)
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self.start(0)

    def start(self, expected_bytes: int) -> None:
        """`expected_bytes`, if known, allows a single read."""
        self.received_bytes, self.has_more = 0, False
        self.due_bytes = HEADER_BYTES + expected_bytes

    def receive(self, connection: _PlainSocket | SecureSocket, is_blocking: bool) -> bool:
        self.received_bytes += connection.receive_into(self._view[self.received_bytes : self.due_bytes], is_blocking)
        if self.received_bytes < HEADER_BYTES:
            return False
        length, has_more = _HEADER.unpack_from(self._buffer)
        if length > FRAGMENT_BYTES or HEADER_BYTES + length < self.received_bytes:
            body_bytes = self.received_bytes - HEADER_BYTES
            raise ConnectionResetError(f"fragment of {length} bytes, expected {body_bytes} or more")
        self.due_bytes, self.has_more = HEADER_BYTES + length, bool(has_more)
        return self.received_bytes == self.due_bytes

    @property
    def fragment(self) -> Tensor:
        """The received bytes, valid until the next `start`."""
        return self._bytes[HEADER_BYTES : self.due_bytes]


class PeerSockets:
    """Connections to ranks of other pods, by rank; may be empty."""

    def __init__(self, sockets: Mapping[int, socket.socket | SecureSocket]) -> None:
        self._sockets = {rank: _PlainSocket(each) if isinstance(each, socket.socket) else each for rank, each in sockets.items()}
        self._receivers = {rank: _Receiver() for rank in sockets}
        for connection in sockets.values():
            if isinstance(connection, socket.socket):
                set_keepalive(connection)

    @property
    def peers(self) -> list[int]:
        """Connected ranks."""
        return list(self._sockets)

    def send(self, ranks: Iterable[int], fragment: Tensor, has_more: bool) -> dict[int, memoryview]:
        """Sends a uint8 fragment without blocking; returns unsent bytes by rank. fragment: [bytes]. Raises PeerLost."""
        data = memoryview(fragment.numpy().data)
        header = _HEADER.pack(fragment.numel(), has_more)
        unsent = {}
        for rank in ranks:
            try:
                left = self._sockets[rank].start_send([header, data])
            except OSError as error:
                raise _peer_lost(rank, error) from error
            if left:
                unsent[rank] = left
        return unsent

    def receive(self, ranks: Iterable[int], expected_bytes: int, unsent: dict[int, memoryview]) -> dict[int, tuple[Tensor, bool]]:
        """Returns each rank's next fragment and whether more follows. Sends `unsent` concurrently.

        Fragments: uint8 [bytes], valid until the next call. Raises PeerLost.
        """
        for rank in ranks:
            self._receivers[rank].start(expected_bytes)
        if unsent:
            self._send_and_receive(set(ranks), unsent)
        else:
            for rank in ranks:
                self._receive_fragment(rank)
        return {rank: (self._receivers[rank].fragment, self._receivers[rank].has_more) for rank in ranks}

    def close(self) -> None:
        """Closes every connection."""
        for connection in self._sockets.values():
            connection.close()

    def _receive_fragment(self, rank: int) -> None:
        try:
            while not self._receivers[rank].receive(self._sockets[rank], is_blocking=True):
                pass
        except OSError as error:
            raise _peer_lost(rank, error) from error

    def _send_and_receive(self, due: set[int], unsent: dict[int, memoryview]) -> None:
        while due or unsent:
            readers, writers = {self._sockets[rank]: rank for rank in due}, {self._sockets[rank]: rank for rank in unsent}
            wait_s = 0.0 if any(connection.has_input for connection in readers) else None
            readable, writable, _ = select.select(list(readers), list(writers), [], wait_s)
            for connection in {*readable, *(each for each in readers if each.has_input)}:
                rank = readers[connection]
                try:
                    if self._receivers[rank].receive(connection, is_blocking=False):
                        due.discard(rank)
                except OSError as error:
                    raise _peer_lost(rank, error) from error
            for connection in writable:
                rank = writers[connection]
                try:
                    unsent[rank] = connection.send_more(unsent[rank])
                except OSError as error:
                    raise _peer_lost(rank, error) from error
                if not unsent[rank]:
                    del unsent[rank]


def set_keepalive(connection: socket.socket) -> None:
    """Disables Nagle's algorithm. An idle connection fails about 15 s after its machine.

    No TCP_USER_TIMEOUT: it would also end connections to a rank in a long computation.
    """
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _peer_lost(rank: int, error: OSError) -> PeerLost:
    return PeerLost(f"the connection to rank {rank} is lost: {error}")
