"""Memory of images over all requests of a process."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import Delta
from phalanx_frontend.images.budget import current_lease
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.source import DecodeSlots, ImageSource
from phalanx_frontend.limits import MemoryBudget
from tests.frontend.fakes import FakeBackend, Step, token_ids
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of
from tests.polling import until
from tests.reachable import texts

PIXELS = 8 * 8 * 3
KEYS = ApiKeys([ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2"), ApiKey("carol", "sk-3")])


class Fetcher:
    """Yields files, which it takes from the lease, or refuses."""

    def __init__(self) -> None:
        self.at_once = self.most_at_once = 0

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """See `ImageFetcher`."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if "broken" in url:
            raise ImageRefused(param, "broken", "image_unavailable")
        content = file_of(colour(len(url)))
        current_lease().take(len(content))
        return content


def message(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}]}


class Server:
    """An application with a budget, whose answers wait for `go`."""

    def __init__(self, num_images: int, keys: ApiKeys | None = None) -> None:
        self.go, self.fetcher = asyncio.Event(), Fetcher()

        def script(request: Any) -> Sequence[Step]:
            return [self.go, Delta(index=0, tokens=token_ids("a"), finish="stop")]

        self.backend = FakeBackend(script, assets=image_assets())
        self.images = ImageSource(fetcher=self.fetcher, budget=MemoryBudget(num_images * PIXELS))
        self.app = create_app(self.backend, images=self.images, keys=keys)

    async def post(self, *urls: str, key: str = "sk-1") -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=message(*urls), headers=headers)


DATA = url_of(file_of(colour(255)))


async def test_images_of_open_requests_are_bounded_and_released() -> None:
    server = Server(2)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(server.post(DATA)) for _ in range(2))
        await until(lambda: len(server.backend.requests) == 2)
        assert server.images.budget.num_bytes == 2 * PIXELS
        refused = await server.post(DATA)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "image_memory_full")
        assert int(refused.headers["retry-after"]) > 0
        server.go.set()
    assert first.result().status_code == second.result().status_code == 200
    assert server.images.budget.num_bytes == 0
    assert (await server.post(DATA)).status_code == 200


async def test_one_tenant_gets_as_much_as_is_free() -> None:
    server = Server(4, KEYS)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(server.post(DATA))
        await until(lambda: len(server.backend.requests) == 2)
        assert (await server.post(DATA)).status_code == 429
        tasks.create_task(server.post(DATA, key="sk-2"))
        await until(lambda: len(server.backend.requests) == 3)
        server.go.set()
    assert server.images.budget.num_bytes == 0


def test_tenants_hold_equal_shares_and_leave_one() -> None:
    """Each of n gets 1/(n + 1) of the memory, so that another one finds room; without API keys there is one bound."""
    budget = MemoryBudget(60)
    for _ in range(60):
        for tenant in ("alice", "bob"):
            budget.take(tenant, 1)
    assert budget.num_bytes == 40
    assert budget.take("carol", 10)
    assert not budget.take("carol", 1)
    keyless = MemoryBudget(60)
    assert keyless.take("", 60) and not keyless.take("", 1)


@pytest.mark.parametrize("urls", [("https://a/broken", "https://b"), (DATA, "https://a/broken"), (DATA, "data:,")])
async def test_refused_requests_hold_no_images(urls: tuple[str, ...]) -> None:
    server = Server(100)
    assert (await server.post(*urls)).status_code == 400
    assert server.images.budget.num_bytes == 0


async def test_images_of_a_request_are_fetched_at_once() -> None:
    server = Server(100)
    server.go.set()
    answer = await server.post("https://a", "https://a/b", "https://a/b/c")
    assert answer.status_code == 200, answer.text
    assert server.fetcher.most_at_once == 3 and server.images.budget.num_bytes == 0
    assert len({image.digest for image in server.backend.requests[0].images}) == 3


async def test_files_on_their_way_count() -> None:
    server = Server(0)
    answer = await server.post("https://a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "image_memory_full")
    assert server.images.budget.num_bytes == 0


async def test_a_tenant_with_a_slot_lets_others_decode_first() -> None:
    slots, decoded = DecodeSlots(2), list[str]()
    turns = [asyncio.Event() for _ in range(6)]

    async def decode(tenant: str, turn: asyncio.Event) -> None:
        async with slots.held(tenant):
            decoded.append(tenant)
            await turn.wait()

    tasks = [asyncio.create_task(decode(tenant, turn)) for tenant, turn in zip("aaaabb", turns, strict=True)]
    await until(lambda: decoded == ["a", "a"])
    tasks[2].cancel()
    for at, expected in ((0, "aab"), (1, "aaba"), (4, "aabab"), (3, "aabab")):
        turns[at].set()
        await until(lambda expected=expected: decoded == list(expected))  # type: ignore[misc]
    turns[5].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(20), slots.held("c"), slots.held("c"):
        pass  # all slots are free again
    assert not set(texts(slots)) & {"a", "b", "c"}, "tenants come and go"
