"""Routers and ranks are killed, and clients get the rest: with grammars, penalties, stop strings, logprobs and siblings.

Real processes, a tiny model in float64: two runtimes, two routers.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program, free_port, running, serving
from tests.cluster.service import metric
from tests.router.clients import Told, read
from tests.runtime.tiny import save_tiny
from tests.system.test_hung_rank import ranks_of

pytestmark = pytest.mark.system
TOKENS = 400
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 40, "maxItems": 40}
SCHEMA = {
    "name": "numbers",
    "schema": {"type": "object", "properties": {"a": NUMBERS}, "required": ["a"], "additionalProperties": False},
}
BODIES: list[dict[str, Any]] = [
    {"prompt": "prompt one", "temperature": 0},
    {"prompt": "prompt two", "temperature": 1.0, "seed": 5},
    {"prompt": "prompt three", "temperature": 0.8, "seed": 6, "n": 2, "frequency_penalty": 0.1},
    {"prompt": "prompt four", "temperature": 0, "stop": ["never said, but looked for"]},
    {"prompt": "prompt five", "temperature": 1.0, "seed": 7, "logprobs": 2},
    {"prompt": "prompt six", "temperature": 1.0, "seed": 8, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"prompt": "prompt seven", "temperature": 1.0, "seed": 9, "n": 2, "structured_outputs": {"regex": "([a-f]{7} ){45}"}},
    {"prompt": "prompt eight", "temperature": 0.9, "seed": 10, "repetition_penalty": 1.2, "presence_penalty": 0.3},
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
    flags += ["--token-file", str(folder / "token"), "--dtype", "float64"]
    with running("one", "phalanx_runtime", flags, folder) as one, running("two", "phalanx_runtime", flags, folder) as two:
        yield Service([one, two], folder)


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "skip_special_tokens": False, **fields}


def with_stop(fields: dict[str, Any], told: Told) -> dict[str, Any]:
    """The same request with a stop string that ends it late in its text."""
    text = told.texts[0]
    start = next(at for at in range(3 * len(text) // 4, len(text)) if text.find(text[at : at + 6]) == at)
    return {**fields, "stop": [text[start : start + 6]]}


async def all_to_the_end(url: str) -> tuple[list[dict[str, Any]], list[Told]]:
    """All requests, one of them ended by a stop string that it really says, and what came of them undisturbed."""
    said = await read(url, body_of(BODIES[0]))
    bodies = [body_of(fields) for fields in [*BODIES, with_stop(BODIES[0], said)]]
    tolds = list(await asyncio.gather(*(read(url, body) for body in bodies)))
    assert tolds[-1].ends == {0: "stop"} and len(tolds[-1].texts[0]) < len(said.texts[0])
    assert len(json.loads(tolds[5].texts[0])["a"]) == 40 and re.fullmatch("([a-f]{7} ){45}", tolds[6].texts[1])
    assert len(tolds[4].tokens[0]) == TOKENS
    return bodies, tolds


def shown(tolds: list[Told]) -> list[tuple[Any, ...]]:
    return [(told.texts, told.ends, told.tokens) for told in tolds]


async def through_a_kill(bodies: list[dict[str, Any]], whole: list[Told], first: Program, at: Callable[[], str]) -> list[Told]:
    """All streams, read until their router is killed; then to their end at another, or the next.

    It is killed when each stream has some text, or when one has most of its own: a machine may be slow with the first grammar.
    """
    tolds = [Told({}, {}) for _ in bodies]

    def some_have_enough(_: Told) -> bool:
        is_near = any(told.num_chars > 0.7 * end.num_chars for told, end in zip(tolds, whole, strict=True))
        if (is_near or min(told.num_chars for told in tolds) > 100) and first.process.poll() is None:
            os.kill(first.process.pid, signal.SIGKILL)
        return False

    pairs = list(zip(bodies, tolds, strict=True))
    await asyncio.gather(*(read(first.base_url, body, told, some_have_enough) for body, told in pairs))
    assert not any(told.is_done for told in tolds) and any(told.num_chars for told in tolds), "they were cut"
    url = at()
    await asyncio.gather(*(resume(url, body, told) for body, told in pairs))
    return tolds


async def resume(url: str, body: dict[str, Any], told: Told) -> None:
    """Repeats the request until a router answers it: one that has just started knows no group yet."""
    async with asyncio.timeout(60):
        while not told.is_done:
            await read(url, body, told)
            assert told.status in (200, 503), told.error


def test_clients_of_a_killed_router_resume_at_another(service: Service) -> None:
    ports = free_port(), free_port()
    with service.router("a", ports[0], ports[1]) as first, service.router("b", ports[1], ports[0]) as second:
        bodies, whole = asyncio.run(all_to_the_end(second.base_url))
        again = asyncio.run(through_a_kill(bodies, whole, first, lambda: second.base_url))
    assert shown(again) == shown(whole)


def test_clients_of_the_only_router_resume_after_restart(service: Service) -> None:
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(service.router("only", port))
        bodies, whole = asyncio.run(all_to_the_end(first.base_url))
        again = asyncio.run(
            through_a_kill(bodies, whole, first, lambda: stack.enter_context(service.router("next", port)).base_url)
        )
    assert shown(again) == shown(whole)


async def through_a_dead_rank(bodies: list[dict[str, Any]], router: Program, runtimes: list[Program]) -> list[Told]:
    """All streams to their end; the rank of the busier runtime is killed when each has some text."""
    tolds = [Told({}, {}) for _ in bodies]
    killed: list[int] = []

    def all_have_some(_: Told) -> bool:
        if min(told.num_chars for told in tolds) > 60 and not killed:
            pages = [httpx.get(f"{runtime.base_url}/metrics", timeout=10).text for runtime in runtimes]
            busy = [metric(page, "vllm:num_requests_running") for page in pages]
            killed.append(ranks_of(runtimes[busy.index(max(busy))])[0])
            os.kill(killed[0], signal.SIGKILL)
        return False

    pairs = list(zip(bodies, tolds, strict=True))
    await asyncio.gather(*(read(router.base_url, body, told, all_have_some) for body, told in pairs))
    assert killed
    return tolds


def test_replay_continues_with_all_sampling_state(service: Service) -> None:
    with service.router("replays", free_port()) as router:
        bodies, whole = asyncio.run(all_to_the_end(router.base_url))
        again = asyncio.run(through_a_dead_rank(bodies, router, service.runtimes))
        assert metric(httpx.get(f"{router.base_url}/metrics", timeout=10).text, "phalanx_router_replays_total") > 0
    assert shown(again) == shown(whole)
