"""An engine client with a fake engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from tests.runtime.engine.engine_scene import ASSETS, SERVED, EngineScene, FakeEngine, FakeMeter


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EngineScene]:
    """A client that serves incarnation 1, and its engine."""
    meter = FakeMeter()
    ticks = iter(range(10**6))
    client = EngineClient(meter, EngineSocket(), lambda: float(next(ticks)))
    engines: list[FakeEngine] = []

    def rebind() -> FakeEngine:
        endpoint = f"ipc://{tmp_path}/engine-{len(engines)}"
        client.bind(endpoint)
        engines.append(FakeEngine(endpoint))
        return engines[-1]

    client.end_incarnation(1, "starting")
    engine = rebind()
    client.serve(ASSETS, SERVED)
    yield EngineScene(client, engine, meter, rebind)
    client.close()
    for engine in engines:
        engine.close()
