"""A real HTTP server for an app, on a free port."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp


def _server(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(app, log_level="critical", log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=5)
    )


def _listener() -> socket.socket:
    """Returns a socket that queues connections until the server has started."""
    return socket.create_server(("127.0.0.1", 0))


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Yields the URL of the app, served in the test's event loop."""
    listener, server = _listener(), _server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield _url(listener)
    finally:
        server.should_exit = True
        await serving
        listener.close()


@contextmanager
def served_in_thread(app: ASGIApp) -> Iterator[str]:
    """Yields the URL of the app, served in a thread with its own event loop, for fixtures of a module."""
    listener, server = _listener(), _server(app)
    url = _url(listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
