"""The engine's end of the socket between rank 0 and the HTTP process.

A zmq PAIR over ipc; the HTTP process binds it before it starts the rank. No high-water mark: a full pipe would block the engine
for all requests because of one slow reader; the number and length of requests bound the queue instead.
"""

import math
import os
import threading

import zmq


class ZmqChannel:
    """Frames to and from the HTTP process. Implements `ports.EngineChannel`."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._owned = context is None
        self._context = context or zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._waking = threading.Lock()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._alarm, zmq.POLLIN)

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """All pending messages; with `block`, waits for a message, `wake` or the timeout. None once the context is terminated."""
        messages: list[bytes] = []
        try:
            if block:
                self._wait(timeout_s)
            while True:
                messages.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return messages
        except zmq.ContextTerminated:
            return None

    def send(self, message: bytes) -> None:
        """Queues one message; never blocks. Drops it if the peer has closed, since this process then ends too."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except (zmq.Again, zmq.ContextTerminated):
            return

    def wake(self) -> None:
        """Ends a blocking `receive`, or the next one. Thread-safe; a no-op after `close`."""
        with self._waking:
            if not self._socket.closed:
                os.eventfd_write(self._alarm, 1)

    def _wait(self, timeout_s: float | None) -> None:
        """Waits for a message, `wake` or the timeout. Raises ContextTerminated."""
        for ready, _ in self._poller.poll(None if timeout_s is None else math.ceil(1e3 * timeout_s)):
            if ready == self._alarm:
                os.eventfd_read(self._alarm)

    def close(self) -> None:
        """Closes the socket, and the context if owned."""
        with self._waking:
            self._socket.close()
            os.close(self._alarm)
        if self._owned:
            self._context.term()
