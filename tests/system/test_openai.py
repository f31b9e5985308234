"""One OpenAI suite, two servers: the runtime asked directly, and the router before two runtimes. Real processes, a tiny model."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.programs import Program, running
from tests.cluster.service import metric, stream_all
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
TOKENS = 900
"""Enough that every stream still runs when the first chunks have come."""


@dataclass(frozen=True, slots=True)
class World:
    """Two runtimes and the router before them."""

    runtimes: list[Program]
    router: Program


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("programs")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny(folder / "tiny", max_position_embeddings=2048)
    token = folder / "token"
    token.write_text("a-service-token")
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file", str(token)]
    with (
        running("one", "phalanx_runtime", flags, folder) as one,
        running("two", "phalanx_runtime", flags, folder) as two,
        running("router", "phalanx_router", router_flags([one, two], token), folder) as router,
    ):
        yield World([one, two], router)


def router_flags(runtimes: list[Program], token: Path) -> list[str]:
    leaders = ",".join(program.base_url.removeprefix("http://") for program in runtimes)
    return ["serve", "--token-file", str(token), "--leaders", leaders]


@pytest.fixture(scope="module", params=["runtime", "router"])
def target(request: pytest.FixtureRequest, world: World) -> Target:
    program = world.runtimes[0] if request.param == "runtime" else world.router
    prefix = "phalanx" if request.param == "runtime" else "phalanx_router"
    return Target(program.base_url, "tiny", long_tokens=1000, is_model=True, metrics_prefix=prefix)


class TestOpenAI(OpenAISuite):
    """Everything in the suite, against each."""


def test_streams_outlive_the_runtime_that_served_them(world: World) -> None:
    fixed = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True}
    bodies = [{**fixed, "prompt": f"prompt {i}", "temperature": 0} for i in range(4)]
    bodies += [{**fixed, "prompt": f"prompt {i}", "temperature": 1.0, "seed": i} for i in range(4)]
    undisturbed = asyncio.run(stream_all(world.runtimes[1].base_url, bodies))
    assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * 8
    killed: list[int] = []

    def kill(chunks: int) -> None:
        if chunks > 5 and not killed:
            killed.append(world.runtimes[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    survived = asyncio.run(stream_all(world.router.base_url, bodies, kill))
    assert killed
    assert [a.error for a in survived] == [None] * 8
    assert [a.text for a in survived] == [a.text for a in undisturbed]
    assert metric(httpx.get(f"{world.router.base_url}/metrics", timeout=10).text, "phalanx_router_replays_total") > 0
