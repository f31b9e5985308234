"""Routers are killed, and their clients get the rest elsewhere. Real processes, a tiny model: two runtimes, two routers."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.programs import Program, free_port, running, serving
from tests.router.clients import Told, read
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
TOKENS = 400
BODIES: list[dict[str, Any]] = [
    {"prompt": "prompt one", "temperature": 0},
    {"prompt": "prompt two", "temperature": 1.0, "seed": 5},
    {"prompt": "prompt three", "temperature": 0.8, "seed": 6, "n": 2, "frequency_penalty": 0.1},
    {"prompt": "prompt four", "temperature": 0, "stop": ["never said, but looked for"]},
]


@dataclass(frozen=True, slots=True)
class Service:
    """Two runtimes and the folder in which routers before them are started."""

    runtimes: list[Program]
    folder: Path

    def router(self, name: str, port: int, *peers: int) -> Any:
        """A router on this port, whose peers are on those."""
        leaders = ",".join(program.base_url.removeprefix("http://") for program in self.runtimes)
        command = [sys.executable, "-m", "phalanx_router", "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--leaders", leaders, "--token-file", str(self.folder / "token")]
        if peers:
            command += ["--peers", ",".join(f"127.0.0.1:{peer}" for peer in peers)]
        return serving(name, command, port, "/readyz", self.folder, 60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("resume")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny(folder / "tiny", max_position_embeddings=2048)
    (folder / "token").write_text("a-service-token")
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000"]
    flags += ["--token-file", str(folder / "token")]
    with running("one", "phalanx_runtime", flags, folder) as one, running("two", "phalanx_runtime", flags, folder) as two:
        yield Service([one, two], folder)


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "skip_special_tokens": False, **fields}


async def all_to_the_end(url: str) -> list[Told]:
    return list(await asyncio.gather(*(read(url, body_of(fields)) for fields in BODIES)))


async def through_a_kill(first: Program, at: Callable[[], str]) -> list[Told]:
    """All streams, read until each has some text, when their router is killed; then to their end at another, or the next."""
    tolds = [Told({}, {}) for _ in BODIES]

    def all_have_some(_: Told) -> bool:
        if min(told.num_chars for told in tolds) > 100 and first.process.poll() is None:
            os.kill(first.process.pid, signal.SIGKILL)
        return False

    pairs = [(body_of(fields), told) for fields, told in zip(BODIES, tolds, strict=True)]
    await asyncio.gather(*(read(first.base_url, body, told, all_have_some) for body, told in pairs))
    assert not any(told.is_done for told in tolds), "they were cut"
    url = at()
    await asyncio.gather(*(resume(url, body, told) for body, told in pairs))
    return tolds


async def resume(url: str, body: dict[str, Any], told: Told) -> None:
    """Repeats the request until a router answers it: one that has just started knows no group yet."""
    async with asyncio.timeout(60):
        while not told.is_done:
            await read(url, body, told)
            assert told.status in (200, 503), told.error


def test_clients_of_a_killed_router_get_the_rest_from_another(service: Service) -> None:
    ports = free_port(), free_port()
    with service.router("a", ports[0], ports[1]) as first, service.router("b", ports[1], ports[0]) as second:
        whole = asyncio.run(all_to_the_end(second.base_url))
        again = asyncio.run(through_a_kill(first, lambda: second.base_url))
    assert [(told.texts, told.ends) for told in again] == [(told.texts, told.ends) for told in whole]


def test_clients_of_the_only_router_get_the_rest_when_it_is_back(service: Service) -> None:
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(service.router("only", port))
        whole = asyncio.run(all_to_the_end(first.base_url))
        again = asyncio.run(through_a_kill(first, lambda: stack.enter_context(service.router("next", port)).base_url))
    assert [(told.texts, told.ends) for told in again] == [(told.texts, told.ends) for told in whole]
