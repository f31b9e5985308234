"""Many streams of the `openai` client at once, with their token ids and times, and something done to them half-way."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

FIRST, LAST = 0.25, 0.75
"""Between these parts of every stream something is done to them."""


@dataclass(slots=True)
class Told:
    """What one client got: token ids in the order in which they came, how it ended, what went wrong."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: int = 0
    error: str | None = None


class Streams:
    """Streams of one load. `act` runs once, in a thread of its own, when every stream has a quarter of its tokens."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], act: Callable[[], object] | None = None) -> None:
        self.told = [Told() for _ in bodies]
        self.spread: tuple[float, float] | None = None
        """The least and the largest part that any stream had when `act` began."""
        self._url = url
        self._bodies = bodies
        self._act = act
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self) -> list[Told]:
        """All streams to their end. Raises what `act` raised, and AssertionError when it was never called."""
        asyncio.run(self._all())
        if self._act is not None:
            assert self._thread is not None, "the streams ended before anything was done to them"
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self.told

    async def _all(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(*(self._one(client, told, body) for told, body in zip(self.told, self._bodies, strict=True)))

    async def _one(self, client: openai.AsyncOpenAI, told: Told, body: dict[str, Any]) -> None:
        try:
            chunks = await client.completions.create(**body, stream=True, stream_options={"include_usage": True})
            async for chunk in chunks:
                for choice in chunk.choices:
                    told.tokens += getattr(choice, "token_ids", None) or []
                    told.finish = choice.finish_reason or told.finish
                told.usage = chunk.usage.completion_tokens if chunk.usage else told.usage
                self._look()
        except openai.OpenAIError as error:
            told.error = f"{type(error).__name__}: {error}"

    def _look(self) -> None:
        if self._act is None or self._thread is not None:
            return
        parts = [len(told.tokens) / body["max_tokens"] for told, body in zip(self.told, self._bodies, strict=True)]
        if min(parts) >= FIRST:
            self.spread = min(parts), max(parts)
            self._thread = threading.Thread(target=self._do)
            self._thread.start()

    def _do(self) -> None:
        assert self._act is not None, "there is something to do"
        try:
            self._act()
        except BaseException as error:
            self._error = error
