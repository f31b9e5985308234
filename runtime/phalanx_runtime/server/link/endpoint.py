"""The leader's side of the link: one WebSocket per router, at `wire.LINK_PATH` of the leader's HTTP port.

upgrade with the token -> Hello -> an open link (`server.open_link`) until it ends
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
from phalanx_api.wire.versions import CLOSE_WRONG_VERSION, LINK
from phalanx_frontend.websocket import receive_binary
from phalanx_runtime.server.link.connection import CLOSE_BAD_FRAME, LinkSettings, OpenLink, Peer
from phalanx_runtime.server.link.gateway import EngineGateway
from phalanx_runtime.server.link.orphans import Kept, Orphans

log = logging.getLogger(__name__)

CLOSE_BUG = 1011
"""Close code: this leader failed; what it says of itself is in its log."""


class LinkDoor:
    """The endpoint. `routers` counts open links; `turned_away` counts refused ones by reason."""

    def __init__(self, gateway: EngineGateway, settings: LinkSettings) -> None:
        self.routers = 0
        self.turned_away: Counter[str] = Counter()
        self._gateway = gateway
        self._settings = settings
        self._orphans = Orphans(gateway, settings.orphan_s, settings.max_kept_bytes)
        self._links: set[OpenLink] = set()
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
        agreed = await self._hello(websocket)
        if agreed is None:
            return
        hello, version = agreed
        self.routers += 1
        log.info("link opened", extra={"router": hello.router, "version": version})
        who = Peer(hello.router, hello.instance, version)
        link = OpenLink(websocket, self._gateway, self._settings, who, self._orphans, self._find)
        self._links.add(link)
        self._orphans.came_back(link.router)
        try:
            why = await link.run()
        except Exception:
            why = "a bug of this leader"
            log.exception("link failed", extra={"router": hello.router})
            await websocket.close(CLOSE_BUG, why)
        finally:
            self._links.discard(link)
            self.routers -= 1
        log.info("link ended", extra={"router": hello.router, "why": why})

    def _find(self, id: str, tenant: str) -> Kept | None:
        """The request of this id and tenant: an orphan, or one of a router that was lost and has not been missed yet."""
        for link in self._links:
            if (kept := link.give_up(id, tenant)) is not None:
                return kept
        return self._orphans.adopt(id, tenant)

    async def _hello(self, websocket: WebSocket) -> tuple[wire.Hello, int] | None:
        """The router's first frame and the version to speak, or None after the connection was closed with the reason."""
        code, reason = CLOSE_BAD_FRAME, "expected Hello as the first frame"
        try:
            async with asyncio.timeout(self._settings.hello_s):
                frame = wire.decode_to_leader(await receive_binary(websocket))
            if isinstance(frame, wire.Hello):
                version = LINK.agreed(frame.protocol_version, frame.oldest_version)
                if version is not None:
                    return frame, version
                code = CLOSE_WRONG_VERSION
                reason = f"this leader speaks link version {LINK}, the router {frame.protocol_version}"
        except TimeoutError:
            reason = f"no Hello within {self._settings.hello_s:g} s"
        except msgspec.DecodeError:
            reason = "the first frame is no frame of the link"
        except WebSocketDisconnect:
            return None
        self.turned_away["version" if code == CLOSE_WRONG_VERSION else "hello"] += 1
        log.warning("link refused", extra={"why": reason})
        await websocket.close(code, reason)
        return None
