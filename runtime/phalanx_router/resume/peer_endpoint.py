"""Where other routers bring copies of their journals, and ask for those of streams that began elsewhere."""

import asyncio
import hmac
import logging

import msgspec
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api.wire.versions import CLOSE_WRONG_VERSION, PEER
from phalanx_frontend.websocket import receive_binary
from phalanx_router.resume import peer_wire
from phalanx_router.resume.journal_store import PeerCopies

log = logging.getLogger(__name__)

CLOSE_BAD_FRAME = 4400
GREETING_S = 5.0


class UnknownVersion(Exception):
    """The other router speaks no version that this one does."""


class PeerDoor:
    """The endpoint at `peer_wire.PEER_PATH`, behind the service token."""

    def __init__(self, token: str, copies: PeerCopies) -> None:
        self._expected = b"Bearer " + token.encode()
        self._copies = copies

    def route(self) -> WebSocketRoute:
        """The route to add to the router's application."""
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
            if PEER.agreed(greeting.version, greeting.oldest_version) is None:
                raise UnknownVersion(f"this router speaks version {PEER} among routers, {greeting.router} {greeting.version}")
            while True:
                match peer_wire.decode(await receive_binary(websocket)):
                    case peer_wire.Changes() as changes:
                        sender.take(changes)
                    case peer_wire.Wanted(ids):
                        await websocket.send_bytes(peer_wire.encode(peer_wire.Told(self._copies.find(ids))))
                    case frame:
                        raise msgspec.DecodeError(f"{type(frame).__name__} is not understood here")
        except msgspec.DecodeError as error:
            log.warning("a router sent what it must not", extra={"why": str(error)})
            await websocket.close(CLOSE_BAD_FRAME, "no frame between routers")
        except UnknownVersion as error:
            log.warning("a router was refused", extra={"why": str(error)})
            await websocket.close(CLOSE_WRONG_VERSION, str(error)[:120])
        except (WebSocketDisconnect, TimeoutError):
            pass
        finally:
            sender.lost()
