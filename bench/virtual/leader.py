"""The leader's HTTP process in virtual time: real links and engine client, connected to an engine in this process."""

from collections.abc import Callable
from typing import Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError

from bench.virtual.net import Socket
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.open_requests import EngineMeter
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint

ORPHAN_S = 3.0
TOKEN = "service"


class _WebSocket:
    """The part of a WebSocket that a link uses."""

    def __init__(self, socket: Socket, host: str) -> None:
        self.headers = {"authorization": f"Bearer {TOKEN}"}
        self.scope = {"server": (host, 0)}
        self._socket = socket

    async def accept(self) -> None:
        """Does nothing."""

    async def receive(self) -> dict[str, Any]:
        try:
            return {"type": "websocket.receive", "bytes": await self._socket.recv()}
        except ConnectionClosedError:
            return {"type": "websocket.disconnect", "code": 1006}

    async def send_bytes(self, message: bytes) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosedError:
            raise WebSocketDisconnect(1006) from None

    async def close(self, code: int, reason: str) -> None:
        self._socket.close()


class _CallSocket(EngineSocket):
    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    @property
    def is_open(self) -> bool:
        return True

    def send(self, message: bytes) -> None:
        self._put(message)


class _NoMeter:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Leader:
    def __init__(self, name: str, put: Callable[[bytes], None], clock: Callable[[], float], page_size: int) -> None:
        self._name = name
        self.client = EngineClient(cast(EngineMeter, _NoMeter()), _CallSocket(put), clock)
        settings = LinkSettings(token=TOKEN, group=name, revision="r1", page_size=page_size, tick_s=0.5, orphan_s=ORPHAN_S)
        self._endpoint = LinkEndpoint(self.client, settings)

    async def serve(self, socket: Socket) -> None:
        await self._endpoint.serve(cast(WebSocket, _WebSocket(socket, self._name)))
        socket.close()
