"""Uploads of input files: how many at once, and how slow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_frontend.limits import Limits
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.settings import BatchSettings
from tests.router.api_servers import http_server
from tests.router.fakes import make_settings

HEAD = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--cut\r\n'
FILE = b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{}\r\n--cut--\r\n'


@asynccontextmanager
async def running_client(folder: Path, limits: Limits, *keys: ApiKey) -> AsyncIterator[httpx.AsyncClient]:
    settings, batches = replace(make_settings(), limits=limits), BatchSettings(folder, 1 << 20)
    app, _ = make_router(settings, StaticLeaders([]), RouterOptions(batches=batches, keys=keys))
    async with http_server(app) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
        yield client


async def upload(client: httpx.AsyncClient, may_end: asyncio.Event, pausing: asyncio.Semaphore, key: str = "") -> httpx.Response:
    """Returns the answer to an upload that releases `pausing` in its middle and pauses until `may_end`."""

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        pausing.release()
        await may_end.wait()
        yield FILE

    headers = {"content-type": "multipart/form-data; boundary=cut"} | bearing(key)
    return await client.post("/v1/files", content=body(), headers=headers)


async def test_slow_upload_is_ended(tmp_path: Path) -> None:
    may_end = asyncio.Event()  # clients of httpx read no answer before their body ends
    asyncio.get_running_loop().call_later(1.0, may_end.set)
    async with running_client(tmp_path, Limits(upload_pause_s=0.2)) as client:
        slow = await upload(client, may_end, asyncio.Semaphore())
        assert (slow.status_code, slow.json()["error"]["code"]) == (408, "request_timeout")


async def test_long_upload_is_ended(tmp_path: Path) -> None:
    may_end = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, may_end.set)
    async with running_client(tmp_path, Limits(upload_s=0.2)) as client:
        long = await upload(client, may_end, asyncio.Semaphore())
        assert (long.status_code, long.json()["error"]["code"]) == (408, "request_timeout")
        assert "takes more than 0.2 s" in long.json()["error"]["message"]
        assert (await upload_whole(client)).status_code == 200


async def test_one_tenant_has_few_uploads(tmp_path: Path) -> None:
    may_end, pausing = asyncio.Event(), asyncio.Semaphore(0)
    keys = [ApiKey(key=f"sk-{name}", name=name) for name in ("one", "other")]
    async with running_client(tmp_path, Limits(max_tenant_uploads=1), *keys) as client:
        first = asyncio.create_task(upload(client, may_end, pausing, "sk-one"))
        await pausing.acquire()
        await asyncio.sleep(0.2)
        assert (await upload_whole(client, "sk-one")).json()["error"]["code"] == "too_many_uploads"
        assert (await upload_whole(client, "sk-other")).status_code == 200
        may_end.set()
        assert (await first).status_code == 200
        assert (await upload_whole(client, "sk-one")).status_code == 200


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def test_few_uploads_run_at_once(tmp_path: Path) -> None:
    may_end, pausing = asyncio.Event(), asyncio.Semaphore(0)
    async with running_client(tmp_path, Limits(max_uploads=2)) as client:
        first = [asyncio.create_task(upload(client, may_end, pausing)) for _ in range(2)]
        for _ in first:
            await pausing.acquire()
        await asyncio.sleep(0.2)  # the server runs on this event loop
        third = await upload_whole(client)
        assert (third.status_code, third.json()["error"]["code"], third.headers["retry-after"]) == (429, "too_many_uploads", "5")
        assert (await client.get("/v1/files")).status_code == 200
        may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
        assert (await upload_whole(client)).status_code == 200


async def upload_whole(client: httpx.AsyncClient, key: str = "") -> httpx.Response:
    form = {"purpose": "batch"}
    return await client.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data=form, headers=bearing(key))
