"""TLS over a blocking socket between ranks, with the certificates of the service.

Python's `SSLSocket` allows no reads while another thread writes, no `sendmsg` and no flags; this class does, over a TLS state
that has no socket. Both sides prove the role of a group.
"""

import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Protocol

from phalanx_api import labels
from phalanx_frontend.tls import Certificate, peer_role

READ_BYTES = 1 << 18
SEND_BYTES = 1 << 18
"""Plaintext that is encrypted by one call, without the GIL: 16 records. A call per piece of a page costs a third more CPU."""


class PeerSocket(Protocol):
    """A socket, or TLS over one."""

    def sendall(self, data: bytes, /) -> None:
        """See `socket`."""
        ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Sends the first bytes of these buffers; returns their number."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """See `socket`."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """See `socket`."""
        ...

    def shutdown(self, how: int, /) -> None:
        """See `socket`."""
        ...

    def close(self) -> None:
        """See `socket`."""
        ...


class SecureSocket:
    """An open TLS connection. One thread may read while another one writes."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        """server_name: of the other side; null at a server. Raises OSError, which `ssl.SSLError` is."""
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_name is None, server_name)
        self._state = threading.Lock()
        """Of the TLS state. No thread waits while it has this lock."""
        self._writing = threading.Lock()
        self._received = bytearray(READ_BYTES)
        self._gathered = memoryview(bytearray(SEND_BYTES))
        self._handshake()

    def _handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._feed(0)
            except ssl.SSLError:
                self._send_alert()
                raise
            else:
                self._socket.sendall(self._outgoing.read())
                return

    def _send_alert(self) -> None:
        """Sends the reason of a TLS error, unless the connection takes no bytes."""
        try:
            self._socket.send(self._outgoing.read(), socket.MSG_DONTWAIT)
        except OSError:
            pass  # the other side has closed, or does not read

    def _feed(self, flags: int) -> None:
        """Receives ciphertext. Raises BlockingIOError, or ConnectionResetError at the end."""
        size = self._socket.recv_into(self._received, 0, flags)
        if not size:
            raise ConnectionResetError("closed by the peer")
        with self._state:
            self._incoming.write(memoryview(self._received)[:size])

    @property
    def role(self) -> str:
        """Role in the certificate of the other side."""
        return peer_role(self._tls)

    @property
    def has_input(self) -> bool:
        """Whether received bytes wait to be read."""
        return self._tls.pending() > 0 or self._incoming.pending > 0

    def fileno(self) -> int:
        """File descriptor, to wait for ciphertext."""
        return self._socket.fileno()

    def start_send(self, pieces: Iterable[bytes | memoryview]) -> memoryview:
        """Encrypts the pieces and sends without blocking; returns the ciphertext that `send_more` has to send."""
        return self.send_more(memoryview(self._encrypted(b"".join(pieces))))

    def send_more(self, unsent: memoryview) -> memoryview:
        """Sends ciphertext without blocking; returns what is left."""
        try:
            return unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return unsent

    def receive_into(self, view: memoryview, is_blocking: bool) -> int:
        """Reads at least one byte, or none without blocking.

        Raises ConnectionResetError at the end, ssl.SSLError for a bad record, which the other side gets as an alert.
        """
        while True:
            try:
                with self._state:
                    size = self._tls.read(len(view), view)
                if not size:
                    raise ConnectionResetError("closed by the peer")
                return int(size)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                self._send_alert()
                raise
            try:
                self._feed(0 if is_blocking else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0

    def sendall(self, data: bytes | memoryview, /) -> None:
        """See `socket`."""
        self.sendmsg([memoryview(data)])

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Sends all buffers; returns the number of their bytes."""
        total = used = 0
        with self._writing:
            for buffer in buffers:
                rest = buffer.cast("B")
                total += len(rest)
                while rest:
                    size = min(len(rest), SEND_BYTES - used)
                    self._gathered[used : used + size] = rest[:size]
                    used, rest = used + size, rest[size:]
                    if used == SEND_BYTES:
                        self._send_gathered(used)
                        used = 0
            self._send_gathered(used)
        return total

    def _send_gathered(self, size: int) -> None:
        self._socket.sendall(self._encrypted(self._gathered[:size]))

    def _encrypted(self, data: bytes | memoryview) -> bytes:
        rest = memoryview(data)
        with self._state:
            while rest:
                rest = rest[self._tls.write(rest) :]
            return self._outgoing.read()

    def recv_into(self, buffer: memoryview, /) -> int:
        """Reads at least one byte; 0 at the end."""
        try:
            return self.receive_into(buffer, is_blocking=True)
        except (ConnectionResetError, ssl.SSLZeroReturnError):
            return 0

    def settimeout(self, value: float | None, /) -> None:
        """See `socket`."""
        self._socket.settimeout(value)

    def shutdown(self, how: int, /) -> None:
        """Ends the connection, also for a thread that waits for it."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """See `socket`."""
        self._socket.close()


def dial_securely(connection: socket.socket, certificate: Certificate) -> SecureSocket:
    """Returns TLS to a rank's listener, which proves its role. Closes the connection if it fails. Raises OSError."""
    try:
        certificate.refresh()
        return SecureSocket(connection, certificate.client_context, certificate.peer_name(labels.GROUP_ROLE))
    except BaseException:
        connection.close()
        raise


def accept_securely(connection: socket.socket, certificate: Certificate) -> SecureSocket:
    """Returns TLS from a rank, which proves its role. Closes the connection if it fails. Raises OSError."""
    try:
        certificate.refresh()
        secured = SecureSocket(connection, certificate.context, None)
        if secured.role != labels.GROUP_ROLE:
            raise ConnectionRefusedError(f"the certificate of the other side is of the role {secured.role or 'without a name'}")
        return secured
    except BaseException:
        connection.close()
        raise
