"""The leader's HTTP process in virtual time: the real links and the real engine client, joined to an engine without a socket."""

from collections.abc import Callable
from typing import Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError

from bench.virtual.net import Socket
from phalanx_api import wire
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.meter import EngineMeter
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint

ORPHAN_S = 3.0
TOKEN = "service"


class _WebSocket:
    """What a link needs of a WebSocket."""

    def __init__(self, socket: Socket, host: str) -> None:
        self.headers = {"authorization": f"Bearer {TOKEN}"}
        self.scope = {"server": (host, 0)}
        self._socket = socket

    async def accept(self) -> None:
        """Nothing is to be done."""

    async def receive(self) -> dict[str, Any]:
        """The next message, or that there is none any more."""
        try:
            return {"type": "websocket.receive", "bytes": await self._socket.recv()}
        except ConnectionClosedError:
            return {"type": "websocket.disconnect", "code": 1006}

    async def send_bytes(self, message: bytes) -> None:
        """Sends a message."""
        try:
            await self._socket.send(message)
        except ConnectionClosedError:
            raise WebSocketDisconnect(1006) from None

    async def close(self, code: int, reason: str) -> None:
        """Ends the connection."""
        self._socket.close()


class _Client(EngineClient):
    """Hands frames to the engine by a call."""

    def __init__(self, meter: EngineMeter, put: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        super().__init__(meter, clock)
        self._put = put

    def _send(self, frame: wire.ToEngine) -> None:
        self._put(wire.encode(frame))

    def _send_order(self, frame: wire.ToEngine) -> None:
        self._send(frame)

    def start(self, assets: wire.Assets, incarnation: int, served: wire.Served) -> None:
        """Takes requests from now on."""
        self._assets = assets
        self._change(wire.State(serving=True, incarnation=incarnation, served=served))


class _NoMeter:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told: None


class Leader:
    """Links and client. `hear` takes what the engine says."""

    def __init__(self, name: str, put: Callable[[bytes], None], clock: Callable[[], float], page_size: int) -> None:
        self._name = name
        self.client = _Client(cast(EngineMeter, _NoMeter()), put, clock)
        settings = LinkSettings(token=TOKEN, group=name, revision="r1", page_size=page_size, tick_s=0.5, orphan_s=ORPHAN_S)
        self._door = LinkEndpoint(self.client, settings)

    async def serve(self, socket: Socket) -> None:
        """Serves one router."""
        await self._door.serve(cast(WebSocket, _WebSocket(socket, self._name)))
        socket.close()
