"""The leader's HTTP process in virtual time: real links and engine client, connected to an engine in this process."""

from collections.abc import Callable
from typing import cast

from starlette.websockets import WebSocket

from bench.virtual.net import Socket
from bench.virtual.websocket import VirtualWebSocket
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.open_requests import EngineMeter
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint

ORPHAN_S = 3.0
TOKEN = "service"


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
        return _ignore


def _ignore(*arguments: object) -> None:
    """Does nothing."""


class Leader:
    def __init__(
        self, name: str, put: Callable[[bytes], None], clock: Callable[[], float], page_size: int, orphan_s: float = ORPHAN_S
    ) -> None:
        self._name = name
        self.client = EngineClient(cast(EngineMeter, _NoMeter()), _CallSocket(put), clock)
        settings = LinkSettings(
            token=ServiceToken([TOKEN]), group=name, revision="r1", page_size=page_size, tick_s=0.5, orphan_s=orphan_s
        )
        self._endpoint = LinkEndpoint(self.client, settings)

    async def serve(self, socket: Socket) -> None:
        await self._endpoint.serve(cast(WebSocket, VirtualWebSocket(socket, self._name, TOKEN)))
        socket.close()
