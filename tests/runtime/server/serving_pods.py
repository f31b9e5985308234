"""Pods that serve in this process, over fake ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bench.frame.programs import free_port
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.pod_server import PodServer
from phalanx_runtime.server.serve import make_server
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.polling import until
from tests.runtime.fake_rank import command


def make_settings(folder: Path, *arguments: str, **environment: str) -> ServeSettings:
    token = folder.parent / "token"
    token.write_text("secret")
    flags = ["serve", str(folder), "--port", "0", "--token-file", str(token), *arguments]
    settings = read_settings(flags, {"PHALANX_GROUP": "tiny-g-abcde", "PHALANX_REVISION": "r1"} | environment)
    assert isinstance(settings, ServeSettings)
    return settings


class Running:
    """A pod's server in this process."""

    def __init__(self, server: PodServer, settings: ServeSettings) -> None:
        self.server = server
        self.settings = settings
        self.task = asyncio.create_task(server.serve())
        # The server closes connections that were idle for 5 s, about as long as a test waits: no connection is reused.
        self.http = httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def port(self) -> int:
        return int(self.server.servers[0].sockets[0].getsockname()[1])

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(f"http://127.0.0.1:{self.port}{path}")

    async def is_ready(self) -> bool:
        return (await self.get("/readyz")).status_code == 200

    async def is_unready(self) -> bool:
        return not await self.is_ready()

    async def ready(self) -> dict[str, Any]:
        """/v1/health once the pod is ready."""
        await until(self.is_ready)
        health: dict[str, Any] = (await self.get("/v1/health")).json()
        return health


def client_of(running: Running) -> EngineClient:
    """The engine client of a leader's pod."""
    assert isinstance(running.server.drainable, EngineClient)
    return running.server.drainable


@asynccontextmanager
async def served(settings: ServeSettings, *behavior: str) -> AsyncIterator[Running]:
    running = Running(make_server(settings, command(*behavior)), settings)
    try:
        await until(lambda: running.server.started or running.task.done())
        yield running
    finally:
        running.server.should_exit = True
        with suppress(SystemExit):
            await running.task
        await running.http.aclose()


async def complete(running: Running) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hello"}
    return await running.http.post(f"http://127.0.0.1:{running.port}/v1/completions", json=body)


@asynccontextmanager
async def two_pods(folder: Path, *, leader_s: str = "600", worker_s: str = "600") -> AsyncIterator[tuple[Running, Running]]:
    """Leader and worker of a serving group; its steps wait for the file `marks/go`."""
    port = str(free_port())
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", port]
    settings = make_settings(folder, *flags, "--shutdown-timeout", leader_s)
    worker_settings = make_settings(folder, *flags, "--shutdown-timeout", worker_s, "--node-rank", "1")
    async with served(settings, "held") as leader, served(worker_settings, "held") as worker:
        await leader.ready()
        await worker.ready()
        yield leader, worker
