"""Both ends of the zmq socket between rank 0 and the HTTP process, which binds it.

No high-water mark: one slow reader would block the engine.
"""

import asyncio
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

Context = zmq.Context[zmq.Socket[bytes]]


def _make_pair(context: Context) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


class ZmqChannel:
    """The engine's end: an `EngineChannel`."""

    def __init__(self, endpoint: str, context: Context) -> None:
        self._socket = _make_pair(context)
        self._socket.connect(endpoint)
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """As `EngineChannel.receive`; ends with the context."""
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
        """Queues a message; drops it if the peer has closed."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except (zmq.Again, zmq.ContextTerminated):
            return

    def wake(self) -> None:
        """Ends a blocking `receive`."""
        with self._wake_lock:
            if not self._socket.closed:
                os.eventfd_write(self._wake_fd, 1)

    def _wait(self, timeout_s: float | None) -> None:
        """Raises ContextTerminated."""
        for ready, _ in self._poller.poll(None if timeout_s is None else math.ceil(1e3 * timeout_s)):
            if ready == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Closes the socket."""
        with self._wake_lock:
            self._socket.close()
            os.close(self._wake_fd)


@contextmanager
def open_channel(endpoint: str) -> Iterator[ZmqChannel]:
    """A channel with its own context."""
    context: Context = zmq.Context(io_threads=1)
    channel = ZmqChannel(endpoint, context)
    try:
        yield channel
    finally:
        channel.close()
        context.term()


class EngineSocket:
    """The HTTP process's end, one socket per incarnation."""

    def __init__(self) -> None:
        self._context: Context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._unsent: deque[bytes] = deque()
        self._receive: Callable[[bytes], None]

    @property
    def is_open(self) -> bool:
        """Whether the socket is bound."""
        return self._socket is not None

    def bind(self, endpoint: str, receive: Callable[[bytes], None]) -> None:
        """Opens the socket of a new incarnation."""
        self.close()
        self._receive = receive
        socket = _make_pair(self._context)
        socket.bind(endpoint)
        self._socket = socket
        asyncio.get_running_loop().add_reader(socket.fileno(), self.drain)

    def send(self, message: bytes) -> None:
        """Sends a message once the engine has connected. The socket must be open."""
        assert self._socket is not None, "requests are open only between `bind` and `end_incarnation`"
        self._unsent.append(message)
        self._flush(self._socket)
        # The descriptor is edge-triggered, and sending may have consumed an edge.
        asyncio.get_running_loop().call_soon(self.drain)

    def drain(self) -> None:
        """Receives all pending messages and sends unsent ones."""
        while self._socket is not None:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                # recv detects a new peer, and may consume the edge for sending.
                if self._flush(self._socket):
                    continue
                return
            self._receive(message)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        has_sent = False
        try:
            while self._unsent:
                socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
                has_sent = True
        except zmq.Again:
            pass  # no peer yet
        return has_sent

    def close(self) -> None:
        """Closes the socket; drops unsent messages."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def terminate(self) -> None:
        """Closes permanently."""
        self.close()
        self._context.term()
