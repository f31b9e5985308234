"""A real program under overload and client disconnects: only 429 with Retry-After, and no pages held."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from bench.engine.overload import Shape, capacity, disconnect, gauges, send_at_rate
from bench.frame.programs import running
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
SHAPE = Shape(prompt=32, output=100, vocab=256)
LONG = Shape(prompt=32, output=900, vocab=256)
"""Still runs when its client disconnects."""
CLIENTS = 500


async def overload(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        max_rate = await capacity(session, url, SHAPE, 8, 3)
        outcomes, _ = await send_at_rate(session, url, SHAPE, min(10 * max_rate, 200), 15)
        assert not outcomes.failures
        assert outcomes.completed > 0 and outcomes.refused > 0
        assert min(outcomes.retry_after_s) >= 1
        assert not any((await disconnect(session, url, SHAPE, CLIENTS)).values())


async def disconnects(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        remaining = await disconnect(session, url, LONG, CLIENTS)
        assert len(remaining) == 4 and not any(remaining.values())
        assert await gauges(session, url) == remaining
        async with session.get(f"{url}/metrics") as response:
            page = await response.text()
    ended = dict(re.findall(r'^vllm:request_success_total{[^}]*finished_reason="(\w+)"[^}]*} (\S+)$', page, re.MULTILINE))
    assert float(ended["abort"]) >= 0.9 * CLIENTS, ended
    assert sum(map(float, ended.values())) == CLIENTS


@pytest.mark.slow
def test_overload_is_refused_and_holds_no_page(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    flags = ["--max-num-seqs", "8", "--max-num-queued-tokens", "2000"]
    with running("runtime", "phalanx_runtime", ["serve", str(model), *flags], tmp_path) as program:
        asyncio.run(overload(program.base_url))


def test_clients_that_disconnect_hold_no_page(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", max_position_embeddings=2048)
    with running("runtime", "phalanx_runtime", ["serve", str(model), "--max-num-seqs", "64"], tmp_path) as program:
        asyncio.run(disconnects(program.base_url))
