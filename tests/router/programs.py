"""Router programs in this process, by their command line."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from phalanx_frontend.tls import unverified_context
from phalanx_router.program import serve
from phalanx_router.settings import Settings, read_settings
from tests.frontend.fakes import plain_tokens, tiny_assets
from tests.polling import until
from tests.router.fakes import FakeLeader, Script

URL = re.compile(r"https?://127\.0\.0\.1:\d+")


def read(token_file: str, *flags: str, **environment: str) -> Settings:
    return read_settings(["serve", "--token-file", token_file, *flags], environment)


@asynccontextmanager
async def program(
    token_file: str, caplog: pytest.LogCaptureFixture, *flags: str
) -> AsyncIterator[tuple[str, FakeLeader, asyncio.Task[int]]]:
    """Address of a ready router over a leader that holds after three tokens; then the router's end."""
    caplog.set_level(logging.INFO, "uvicorn.error")
    leader = FakeLeader(script=Script(assets=tiny_assets(), draw=lambda request, index: plain_tokens()[index], hold_at=3))
    await leader.start()
    serving = asyncio.create_task(serve(read(token_file, "--port", "0", "--leaders", leader.address, *flags)))
    try:
        await until(lambda: URL.search(caplog.text))
        found = URL.search(caplog.text)
        assert found is not None
        url = found.group()
        async with httpx.AsyncClient(trust_env=False, verify=unverified_context()) as http:

            async def is_ready() -> bool:
                return (await http.get(f"{url}/readyz")).status_code == 200

            await until(is_ready)
        yield url, leader, serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await leader.stop()
