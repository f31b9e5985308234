"""WebSocket endpoint of the link at `wire.LINK_PATH` of the leader's HTTP port, one connection per router.

The upgrade request carries the token, the first frame is Hello; `server.link.connection` serves the link after that.
"""

import asyncio
import hmac
import logging
from collections import Counter

import msgspec
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api import wire
from phalanx_frontend.websocket import receive_binary
from phalanx_runtime.server.link.connection import CLOSE_BAD_FRAME, LinkConnection, LinkSettings, Peer
from phalanx_runtime.server.link.gateway import EngineGateway
from phalanx_runtime.server.link.orphans import Orphan, Orphans

log = logging.getLogger(__name__)

CLOSE_BUG = 1011
"""Close code: internal error of this leader, with details in its log."""


class LinkEndpoint:
    """The endpoint. `routers`: number of open links; `turned_away`: refused connections by reason."""

    def __init__(self, gateway: EngineGateway, settings: LinkSettings) -> None:
        self.routers = 0
        self.turned_away: Counter[str] = Counter()
        self._gateway = gateway
        self._settings = settings
        self._orphans = Orphans(gateway, settings.orphan_s, settings.max_kept_bytes)
        self._links: set[LinkConnection] = set()
        self._expected = b"Bearer " + settings.token.encode()

    def route(self) -> WebSocketRoute:
        """The route to add to the leader's application."""
        return WebSocketRoute(wire.LINK_PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one router until its link ends."""
        offered = websocket.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(offered, self._expected):
            self.turned_away["token"] += 1
            log.warning("link refused: wrong token")
            await websocket.send_denial_response(PlainTextResponse("the service token is wrong\n", status_code=401))
            return
        await websocket.accept()
        hello = await self._hello(websocket)
        if hello is None:
            return
        self.routers += 1
        log.info("link opened", extra={"router": hello.router})
        peer = Peer(hello.router, hello.instance)
        link = LinkConnection(websocket, self._gateway, self._settings, peer, orphans=self._orphans, find=self._find)
        self._links.add(link)
        self._orphans.router_reconnected(link.router)
        try:
            why = await link.run()
        except Exception:
            why = "internal error of the leader"
            log.exception("link failed", extra={"router": hello.router})
            await websocket.close(CLOSE_BUG, why)
        finally:
            self._links.discard(link)
            self.routers -= 1
        log.info("link ended", extra={"router": hello.router, "why": why})

    def _find(self, id: str, tenant: str) -> Orphan | None:
        """Takes over the request of this id and tenant from another link (whose router may be lost undetected) or the orphans."""
        for link in self._links:
            if (kept := link.release_request(id, tenant)) is not None:
                return kept
        return self._orphans.adopt(id, tenant)

    async def _hello(self, websocket: WebSocket) -> wire.Hello | None:
        """Returns the router's first frame, or None after closing the connection with the reason."""
        code, reason = CLOSE_BAD_FRAME, "expected Hello as the first frame"
        try:
            async with asyncio.timeout(self._settings.hello_s):
                frame = wire.decode_to_leader(await receive_binary(websocket))
            if isinstance(frame, wire.Hello):
                if frame.protocol_version == wire.PROTOCOL_VERSION:
                    return frame
                code = wire.CLOSE_WRONG_VERSION
                reason = f"this leader supports link version {wire.PROTOCOL_VERSION}, the router {frame.protocol_version}"
        except TimeoutError:
            reason = f"no Hello within {self._settings.hello_s:g} s"
        except msgspec.DecodeError:
            reason = "the first frame is no frame of the link"
        except WebSocketDisconnect:
            return None
        self.turned_away["version" if code == wire.CLOSE_WRONG_VERSION else "hello"] += 1
        log.warning("link refused", extra={"why": reason})
        await websocket.close(code, reason)
        return None
