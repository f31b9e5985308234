"""A router with a console over leaders that move streams, and a client of it."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from phalanx_api import wire
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.root_path import below_root
from tests.frontend.fakes import plain_tokens, tiny_assets
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import Leaders, Script, make_settings
from tests.router.moves.moving_leaders import MoveScript, MovingLeader

KEYS = (
    ApiKey("alice", "sk-alice"),
    ApiKey("bob", "sk-bob"),
    ApiKey("root", "sk-root", may_write_console=True),
)
SERVED = wire.Served("model-1", "tp2 bf16 16", 500)
"""500 bytes a page: a move of a fake leader has two pages."""


def draw(request: wire.Request, index: int) -> int:
    """A printable token that depends on prompt and index."""
    digest = hashlib.sha256(repr((request.prompt, index)).encode()).digest()
    return plain_tokens()[int.from_bytes(digest[:4], "big") % len(plain_tokens())]


def leaders(*holds_at: int | None, assets: wire.Assets | None = None) -> list[MovingLeader]:
    """Leaders named a, b, ... with a real tokenizer. Each computes up to the given number of steps until it is released."""
    peers: list[MovingLeader] = []
    for name, hold_at in zip("abcdefgh", holds_at, strict=False):
        script = Script(hold_at=hold_at, assets=assets or tiny_assets(), draw=draw)
        MovingLeader(name, peers, script, MoveScript(served=SERVED))
    return peers


@dataclass(slots=True)
class RunningConsole:
    """A router with a client of its console."""

    http: httpx.AsyncClient
    fleet: RouterBackend
    leaders: Sequence[MovingLeader]

    async def get(self, path: str, key: str = "", **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=headers | bearing(key))

    async def post(self, name: str, body: object, key: str = "") -> httpx.Response:
        return await self.http.post(f"/ui/api/{name}", json=body, headers=bearing(key))

    async def data(self, name: str, key: str = "") -> Any:
        """Reads one endpoint."""
        response = await self.get(f"/ui/api/{name}", key)
        assert response.status_code == 200, response.text
        return response.json()

    async def complete(self, prompt: str, key: str = "", name: str = "", max_tokens: int = 12) -> str:
        """Returns the streamed lines of a completion. `name`: the request id."""
        headers = bearing(key) | ({"x-request-id": name} if name else {})
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.text

    async def until_delivered(self, count: int) -> int:
        """Waits until a stream has `count` tokens. Returns its number."""

        def delivered() -> list[int]:
            return [s.number for s in self.fleet.sessions if len(s.stream.journal.delivered) >= count]

        await until(delivered)
        return delivered()[0]


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def running_console(
    *known: MovingLeader, keys: Sequence[ApiKey] = (), has_console: bool = True, root: str = ""
) -> AsyncIterator[RunningConsole]:
    """Serves a router over these leaders, also below `root`."""
    async with AsyncExitStack() as stack:
        for leader in known:
            await leader.start()
            stack.push_async_callback(leader.stop)
        source = Leaders(*(leader.endpoint() for leader in known))
        app, fleet = make_router(make_settings(tick_s=0.05), source, RouterOptions(keys=keys, has_console=has_console))
        address = await stack.enter_async_context(http_server(below_root(app, root)))
        client = httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=20)
        http = await stack.enter_async_context(client)
        await until(lambda: fleet.links.num_ready == len(known))
        yield RunningConsole(http, fleet, known)
