"""A proxy that changes one byte of a connection."""

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
        except OSError:
            return
