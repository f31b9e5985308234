"""The engine's end of the socket between rank 0 and the HTTP process.

A zmq PAIR over ipc; the HTTP process binds it before it starts the rank. No high-water mark: the receiver bounds what it asks
for (requests and their lengths), and a full pipe would stop the engine for all requests because one reader is slow.
"""

import zmq


class ZmqChannel:
    """Frames to and from the HTTP process. Implements `ports.Channel`."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._owned = context is None
        self._context = context or zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def receive(self, block: bool) -> list[bytes] | None:
        """All messages that are there; with `block`, waits for one. None once the context was ended."""
        messages: list[bytes] = []
        try:
            if block:
                messages.append(self._socket.recv())
            while True:
                messages.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return messages
        except zmq.ContextTerminated:
            return None

    def send(self, message: bytes) -> None:
        """Queues one message; never waits. What cannot be sent is dropped: without the other side this process is ending."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except (zmq.Again, zmq.ContextTerminated):
            return

    def close(self) -> None:
        """Lets go of the socket, and of the context when it is ours."""
        self._socket.close()
        if self._owned:
            self._context.term()
