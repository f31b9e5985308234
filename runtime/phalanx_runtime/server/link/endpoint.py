"""WebSocket endpoint of the link. The upgrade request carries the token, the first frame is Hello.

Routers of other services have a token for cached pages only (`wire.holders`).
"""

import asyncio
import logging
from collections import Counter

import msgspec
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api import wire
from phalanx_api.wire.holders import holder_token
from phalanx_frontend.auth.service_token import is_bearer
from phalanx_frontend.connections import receive_binary
from phalanx_runtime.server.link.connection import CLOSE_BAD_FRAME, LinkConnection, LinkSettings, Peer
from phalanx_runtime.server.link.gateway import DeclaredAdapters, EngineGateway
from phalanx_runtime.server.link.orphans import LinkRecords, Orphans, RequestRecord, TakenOver

log = logging.getLogger(__name__)

CLOSE_INTERNAL_ERROR = 1011
"""Close code; see the leader's log."""


class LinkEndpoint:
    """Authenticates routers and runs their links."""

    def __init__(self, gateway: EngineGateway, settings: LinkSettings, adapters: DeclaredAdapters | None = None) -> None:
        """`adapters`: null if none can be loaded."""
        self.refusals: Counter[str] = Counter()
        """By reason: token, version, hello."""
        self._gateway = gateway
        self._settings = settings
        self._adapters = adapters
        self._orphans = Orphans(gateway, settings.orphan_s, settings.max_kept_bytes)
        self._links = dict[LinkConnection, LinkRecords]()

    @property
    def num_routers(self) -> int:
        """Open links."""
        return len(self._links)

    def route(self) -> WebSocketRoute:
        """Route of the application."""
        return WebSocketRoute(wire.LINK_PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one router."""
        authorization = websocket.headers.get("authorization", "").encode("latin-1", "replace")
        tokens = self._settings.token.accepted
        for_pages = is_bearer(authorization, map(holder_token, tokens))
        if not for_pages and not is_bearer(authorization, tokens):
            self.refusals["token"] += 1
            log.warning("link refused: wrong token")
            await websocket.send_denial_response(PlainTextResponse("the service token is wrong\n", status_code=401))
            return
        await websocket.accept()
        hello = await self._receive_hello(websocket)
        if hello is None:
            return
        log.info("link opened", extra={"router": hello.router, "for_pages": for_pages})
        peer = Peer(hello.router, hello.instance, for_pages, hello.reads_adapter_changes)
        records = LinkRecords(self._orphans, (hello.router, hello.instance))
        link = LinkConnection(
            websocket,
            self._gateway,
            self._settings,
            peer,
            records=records,
            take_over=self._take_over,
            adapters=self._adapters,
        )
        self._links[link] = records
        if not for_pages:
            self._orphans.router_reconnected(link.router)
        try:
            why = await link.run()
        except Exception:
            why = "internal error of the leader"
            log.exception("link failed", extra={"router": hello.router})
            await websocket.close(CLOSE_INTERNAL_ERROR, why)
        finally:
            self._links.pop(link, None)
        log.info("link ended", extra={"router": hello.router, "why": why})

    def _take_over(self, id: str, tenant: str) -> TakenOver | None:
        """Takes a request from another link, where the loss of the router may be undetected, or from the orphans.

        One that the stream of this id shares stays at its link, or where it has ended.
        """
        handed = (link.hand_over(id, tenant) for link in self._links)
        record = next((record for record in handed if record is not None), None)
        record = record or self._orphans.adopt(id, tenant) or self._orphans.adopt_shared(id, tenant)
        if record is not None:
            return TakenOver(record.request(), record.finish, None if record.handle is None else record)
        shared = self._find_shared(id, tenant)
        return None if shared is None else TakenOver(shared.shared(id), shared.finish)

    def _find_shared(self, id: str, tenant: str) -> RequestRecord | None:
        found = (records.find_shared(id, tenant) for records in self._links.values())
        return next((record for record in found if record is not None), None) or self._orphans.find_shared(id, tenant)

    async def _receive_hello(self, websocket: WebSocket) -> wire.Hello | None:
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
        self.refusals["version" if code == wire.CLOSE_WRONG_VERSION else "hello"] += 1
        log.warning("link refused", extra={"why": reason})
        await websocket.close(code, reason)
        return None
