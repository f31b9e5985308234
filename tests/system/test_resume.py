"""Streams survive killed routers and ranks: with grammars, penalties, stop strings, logprobs and siblings.

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
from tests.router.clients import ReceivedStream, read
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import metric_of, ranks_of

pytestmark = pytest.mark.system
REPLAYS = "phalanx_router_replays_total"
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
    {"prompt": "prompt four", "temperature": 0, "stop": ["never generated"]},
    {"prompt": "prompt five", "temperature": 1.0, "seed": 7, "logprobs": 2},
    {"prompt": "prompt six", "temperature": 1.0, "seed": 8, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"prompt": "prompt seven", "temperature": 1.0, "seed": 9, "n": 2, "structured_outputs": {"regex": "([a-f]{7} ){45}"}},
    {"prompt": "prompt eight", "temperature": 0.9, "seed": 10, "repetition_penalty": 1.2, "presence_penalty": 0.3},
]


@dataclass(frozen=True, slots=True)
class Service:
    """Two runtimes and the folder for their routers."""

    runtimes: list[Program]
    folder: Path

    def router(self, name: str, port: int, *peers: int) -> Any:
        """A router on `port` with peers on other ports."""
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


def with_stop(fields: dict[str, Any], answer: ReceivedStream) -> dict[str, Any]:
    """The request with a stop string that ends it late in its text."""
    text = answer.texts[0]
    start = next(at for at in range(3 * len(text) // 4, len(text)) if text.find(text[at : at + 6]) == at)
    return {**fields, "stop": [text[start : start + 6]]}


async def read_all(url: str) -> tuple[list[dict[str, Any]], list[ReceivedStream]]:
    """All requests, one of them with a stop string in its text, and their undisturbed answers."""
    first = await read(url, body_of(BODIES[0]))
    bodies = [body_of(fields) for fields in [*BODIES, with_stop(BODIES[0], first)]]
    answers = list(await asyncio.gather(*(read(url, body) for body in bodies)))
    assert answers[-1].ends == {0: "stop"} and len(answers[-1].texts[0]) < len(first.texts[0])
    assert len(json.loads(answers[5].texts[0])["a"]) == 40 and re.fullmatch("([a-f]{7} ){45}", answers[6].texts[1])
    assert len(answers[4].tokens[0]) == TOKENS
    return bodies, answers


def contents(answers: list[ReceivedStream]) -> list[tuple[Any, ...]]:
    return [(answer.texts, answer.ends, answer.tokens) for answer in answers]


async def read_over_a_kill(
    bodies: list[dict[str, Any]], whole: list[ReceivedStream], first: Program, next_url: Callable[[], str]
) -> list[ReceivedStream]:
    """Reads all streams until their router is killed, then to their end at `next_url`.

    The router is killed when each stream has some text, or when one has most of it: the first grammar may be slow.
    """
    answers = [ReceivedStream({}, {}) for _ in bodies]

    killed: list[int] = []

    def kill_when_due(_: ReceivedStream) -> bool:
        """Whether the router is dead. What it has sent is not read then: on a busy machine it may be all that was missing."""
        is_near = any(answer.num_chars > 0.7 * end.num_chars for answer, end in zip(answers, whole, strict=True))
        if (is_near or min(answer.num_chars for answer in answers) > 100) and not killed:
            killed.append(first.process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return bool(killed)

    pairs = list(zip(bodies, answers, strict=True))
    await asyncio.gather(*(read(first.base_url, body, answer, kill_when_due) for body, answer in pairs))
    assert not any(answer.is_done for answer in answers) and any(answer.num_chars for answer in answers), (
        "all streams are incomplete"
    )
    url = next_url()
    await asyncio.gather(*(resume(url, body, answer) for body, answer in pairs))
    return answers


async def resume(url: str, body: dict[str, Any], answer: ReceivedStream) -> None:
    """Repeats the request until a router answers it: a new router has no group yet."""
    async with asyncio.timeout(60):
        while not answer.is_done:
            await read(url, body, answer)
            assert answer.status in (200, 503), answer.error


def test_clients_of_a_killed_router_resume_at_another(service: Service) -> None:
    ports = free_port(), free_port()
    with service.router("a", ports[0], ports[1]) as first, service.router("b", ports[1], ports[0]) as second:
        bodies, whole = asyncio.run(read_all(second.base_url))
        again = asyncio.run(read_over_a_kill(bodies, whole, first, lambda: second.base_url))
    assert contents(again) == contents(whole)


def test_clients_of_the_only_router_resume_after_restart(service: Service) -> None:
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(service.router("only", port))
        bodies, whole = asyncio.run(read_all(first.base_url))
        again = asyncio.run(
            read_over_a_kill(bodies, whole, first, lambda: stack.enter_context(service.router("next", port)).base_url)
        )
    assert contents(again) == contents(whole)


async def read_over_a_dead_rank(bodies: list[dict[str, Any]], router: Program, runtimes: list[Program]) -> list[ReceivedStream]:
    """Reads all streams to their end; the rank of the busier runtime is killed when each has some text, if one still runs."""
    answers = [ReceivedStream({}, {}) for _ in bodies]
    killed: list[int] = []
    looks: list[float] = []

    def kill_when_all_have_text(_: ReceivedStream) -> bool:
        if min(answer.num_chars for answer in answers) > 60 * (len(looks) + 1) and not killed:
            pages = [httpx.get(f"{runtime.base_url}/metrics", timeout=10).text for runtime in runtimes]
            busy = [metric(page, "vllm:num_requests_running") for page in pages]
            looks.append(max(busy))
            if max(busy):
                killed.append(ranks_of(runtimes[busy.index(max(busy))])[0])
                os.kill(killed[0], signal.SIGKILL)
        return False

    pairs = list(zip(bodies, answers, strict=True))
    await asyncio.gather(*(read(router.base_url, body, answer, kill_when_all_have_text) for body, answer in pairs))
    return answers


def test_replay_continues_with_all_sampling_state(service: Service) -> None:
    with service.router("replays", free_port()) as router:
        bodies, whole = asyncio.run(read_all(router.base_url))
        for _ in range(3):  # on a busy machine all may be computed before the client reads
            again = asyncio.run(read_over_a_dead_rank(bodies, router, service.runtimes))
            if metric_of(router, REPLAYS) > 0:
                break
        assert metric_of(router, REPLAYS) > 0
    assert contents(again) == contents(whole)
    logs = {path.name: path.read_text() for path in service.folder.glob("*.log")}
    assert "rank" in logs["one.log"] + logs["two.log"] and "replays.log" in logs
    assert [name for name, text in logs.items() if BODIES[0]["prompt"] in text or whole[0].texts[0][:40] in text] == [], (
        "Kubernetes takes the termination message from the log"
    )
