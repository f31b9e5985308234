"""Further listening sockets of a uvicorn server, and who may call which path of a server with mutual TLS."""

import asyncio
import socket
from collections.abc import Collection, Mapping

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from phalanx_frontend.connections import BoundedHttpProtocol
from phalanx_frontend.tls import Certificate, peer_role

PROBES = frozenset(("/healthz", "/readyz"))
_ROLE = "peer_role"


class VerifiedPeerProtocol(BoundedHttpProtocol):
    """Passes the role in the client's certificate on to the application, for HTTP and WebSockets."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reads the role once: a connection has one certificate."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, _ROLE: peer_role(transport.get_extra_info("ssl_object"))}


class RoleMiddleware:
    """ASGI middleware: answers 403 to clients whose certificate has another role."""

    def __init__(self, app: ASGIApp, roles: Collection[str], by_path: Mapping[str, Collection[str]]) -> None:
        """roles: of all paths that are not in `by_path`."""
        self._app = app
        self._roles = roles
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        role = scope["state"].get(_ROLE, "")
        if role in self._by_path.get(scope["path"], self._roles):
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse(f"the role {role or 'without a name'} may not call this path\n", status_code=403)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)


class ProbesOnly:
    """ASGI middleware: answers probes of the kubelet, and 404 to everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""
        if scope["type"] == "http" and scope["path"] in PROBES and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(PlainTextResponse("", status_code=404))
        else:
            await PlainTextResponse("only probes are answered here\n", status_code=404)(scope, receive, send)


async def add_listener(server: uvicorn.Server, config: uvicorn.Config) -> int:
    """Lets a started server also listen as `config` says, until it shuts down; returns the port. Raises OSError."""
    config.load()
    protocol = config.http_protocol_class
    assert not isinstance(protocol, str)

    def connect() -> asyncio.Protocol:
        return protocol(config=config, server_state=server.server_state, app_state=server.lifespan.state)  # type: ignore[call-arg]

    added = await asyncio.get_running_loop().create_server(
        connect, config.host, config.port, ssl=config.ssl, backlog=config.backlog
    )
    server.servers.append(added)
    listening: socket.socket = added.sockets[0]
    return int(listening.getsockname()[1])


def mutual_tls(config: uvicorn.Config, certificate: Certificate) -> uvicorn.Config:
    """Returns the configuration with mutual TLS; its application finds the client's role in the state of a request."""
    config.http = VerifiedPeerProtocol
    config.ssl_context_factory = lambda _config, _default: certificate.context
    return config
