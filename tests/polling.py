"""Waits for conditions, and work beside a test. A test that waits fails after a generous limit, naming its condition."""

import asyncio
import inspect
import linecache
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

LIMIT_S = 60.0
INTERVAL_S = 0.005


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Returns once `condition()` is true; fails after `limit_s` seconds. The condition may be a coroutine function."""
    try:
        async with asyncio.timeout(limit_s):
            while not (await value if inspect.isawaitable(value := condition()) else value):
                await asyncio.sleep(INTERVAL_S)
    except TimeoutError as error:
        raise AssertionError(_failure(condition, limit_s)) from error


@asynccontextmanager
async def during(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work` beside the block and cancels it at the block's end. Work that failed before fails the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Blocks until `condition()` is true; fails after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, _failure(condition, limit_s)
        time.sleep(INTERVAL_S)


def _failure(condition: Callable[[], object], limit_s: float) -> str:
    code = getattr(condition, "__code__", None)
    if code is None:
        return f"not true within {limit_s:g} s: {condition!r}"
    source = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"not true within {limit_s:g} s: {code.co_filename}:{code.co_firstlineno}: {source}"
