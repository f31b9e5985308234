"""Proxies that change one byte of a connection, or end it in the middle."""

import socket
import threading

from phalanx_api.moves import PageAddress


class CorruptingProxy:
    """Forwards one connection to `port` and changes the byte at offset `at`."""

    def __init__(self, port: int, at: int) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.address = PageAddress("localhost", self._listener.getsockname()[1])
        self._port, self._at = port, at
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        try:
            with client, socket.create_connection(("localhost", self._port)) as server:
                threading.Thread(target=self._forward_answers, args=(server, client), daemon=True).start()
                offset = 0
                while data := bytearray(client.recv(1 << 16)):
                    if offset <= self._at < offset + len(data):
                        data[self._at - offset] ^= 1
                    offset += len(data)
                    server.sendall(data)
        except OSError:
            return

    def _forward_answers(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            return


class CuttingProxy:
    """Forwards one connection to `port`, and closes both sides after `at` bytes of the client or `answers_at` of the server."""

    def __init__(self, port: int, at: int | None = None, answers_at: int | None = None) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.address = PageAddress("localhost", self._listener.getsockname()[1])
        self._port, self._at, self._answers_at = port, at, answers_at
        self.sent = self.answered = 0
        """Bytes of the client and of the server."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        with client, socket.create_connection(("localhost", self._port)) as server:
            answers = threading.Thread(target=self._forward_answers, args=(server, client), daemon=True)
            answers.start()
            while data := _received(client, self._at, self.sent):
                self.sent += len(data)
                _forward(server, data)
            _end(server)
            _end(client)
            answers.join()

    def _forward_answers(self, server: socket.socket, client: socket.socket) -> None:
        while data := _received(server, self._answers_at, self.answered):
            self.answered += len(data)
            _forward(client, data)
        _end(client)
        _end(server)


def _received(connection: socket.socket, at: int | None, offset: int) -> bytes:
    """The next bytes before `at`; nothing at the end."""
    try:
        return connection.recv(1 << 12 if at is None else min(1 << 12, at - offset))
    except OSError:
        return b""


def _forward(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return  # the other thread has ended the connection


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # ended already
