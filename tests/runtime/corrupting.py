"""A connection that changes one byte on its way."""

import socket
import threading

from phalanx_api.moves import PageAddress


class Corrupting:
    """Between one sender and a taker on this machine: changes the byte at `at`."""

    def __init__(self, port: int, at: int) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.address = PageAddress("localhost", self._listener.getsockname()[1])
        self._port, self._at = port, at
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        link, _ = self._listener.accept()
        self._listener.close()
        try:
            with link, socket.create_connection(("localhost", self._port)) as further:
                threading.Thread(target=self._back, args=(further, link), daemon=True).start()
                passed = 0
                while data := bytearray(link.recv(1 << 16)):
                    if passed <= self._at < passed + len(data):
                        data[self._at - passed] ^= 1
                    passed += len(data)
                    further.sendall(data)
        except OSError:
            return

    def _back(self, further: socket.socket, link: socket.socket) -> None:
        try:
            while data := further.recv(1 << 16):
                link.sendall(data)
        except OSError:
            return
