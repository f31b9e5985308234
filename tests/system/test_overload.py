"""More load than the real program can bear, and clients that leave: only 429 with Retry-After, and nothing held."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from bench.overload import Shape, capacity, flood, gauges, leave
from bench.programs import running
from tests.runtime.tiny import save_tiny

pytestmark = [pytest.mark.system, pytest.mark.slow]
SHAPE = Shape(prompt=32, output=100, vocab=256)


async def overload(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bearable = await capacity(session, url, SHAPE, 8, 3)
        seen, _ = await flood(session, url, SHAPE, min(10 * bearable, 200), 15)
        assert not seen.wrong
        assert seen.whole > 0 and seen.refused > 0
        assert min(seen.retry_after_s) >= 1
        held = await leave(session, url, SHAPE, 500)
        assert len(held) == 4 and not any(held.values())
        assert await gauges(session, url) == held


def test_overload_is_refused_and_disconnects_leak_nothing(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    flags = ["--max-num-seqs", "8", "--max-num-queued-tokens", "2000"]
    with running("runtime", "phalanx_runtime", ["serve", str(model), *flags], tmp_path) as program:
        asyncio.run(overload(program.base_url))
