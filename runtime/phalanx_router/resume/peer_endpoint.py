"""WebSocket endpoint that receives journal copies of other routers and answers their queries for streams."""

import asyncio
import hmac
import logging

import msgspec
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api.wire import CLOSE_WRONG_VERSION, PROTOCOL_VERSION
from phalanx_frontend.websocket import receive_binary
from phalanx_router.resume import peer_wire
from phalanx_router.resume.journal_store import PeerCopies

log = logging.getLogger(__name__)

CLOSE_BAD_FRAME = 4400
GREETING_S = 5.0


class UnknownVersion(Exception):
    """The other router and this one share no protocol version."""


class PeerEndpoint:
    """Endpoint at `peer_wire.PEER_PATH`; requires the service token."""

    def __init__(self, token: str, copies: PeerCopies) -> None:
        self._expected = b"Bearer " + token.encode()
        self._copies = copies

    def route(self) -> WebSocketRoute:
        """Returns the route for the router's application."""
        return WebSocketRoute(peer_wire.PEER_PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one router until its connection ends."""
        offered = websocket.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(offered, self._expected):
            await websocket.send_denial_response(PlainTextResponse("the service token is wrong\n", status_code=401))
            return
        await websocket.accept()
        sender = self._copies.sender()
        try:
            async with asyncio.timeout(GREETING_S):
                greeting = peer_wire.decode(await receive_binary(websocket))
            if not isinstance(greeting, peer_wire.Greeting):
                raise msgspec.DecodeError("expected a Greeting")
            if greeting.version != PROTOCOL_VERSION:
                raise UnknownVersion(
                    f"this router supports peer version {PROTOCOL_VERSION}, {greeting.router} {greeting.version}"
                )
            while True:
                match peer_wire.decode(await receive_binary(websocket)):
                    case peer_wire.JournalChanges() as changes:
                        sender.take(changes)
                    case peer_wire.JournalQuery(ids):
                        await websocket.send_bytes(peer_wire.encode(peer_wire.JournalAnswer(self._copies.find(ids))))
                    case frame:
                        raise msgspec.DecodeError(f"expected JournalChanges or JournalQuery, got {type(frame).__name__}")
        except msgspec.DecodeError as error:
            log.warning("invalid frame from another router", extra={"why": str(error)})
            await websocket.close(CLOSE_BAD_FRAME, "invalid frame between routers")
        except UnknownVersion as error:
            log.warning("rejected another router", extra={"why": str(error)})
            await websocket.close(CLOSE_WRONG_VERSION, str(error)[:120])
        except (WebSocketDisconnect, TimeoutError):
            pass
        finally:
            sender.lost()
