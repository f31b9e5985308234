"""Concurrent streams of the `openai` client, with an action in their middle."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

MIN_PART, MAX_PART = 0.25, 0.75
"""All streams are between these parts of their tokens during the action."""


@dataclass(slots=True)
class StreamResult:
    """The result of one stream."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: int = 0
    error: str | None = None


class Streams:
    """Streams that start together. `action` runs once, in a thread, when each has received `MIN_PART`."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], action: Callable[[], object] | None = None) -> None:
        self.results = [StreamResult() for _ in bodies]
        self.spread: tuple[float, float] | None = None
        """Smallest and largest part that any stream had received when the action started."""
        self._url = url
        self._bodies = bodies
        self._action = action
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self) -> list[StreamResult]:
        """Runs all streams to their end. Raises the action's error, or AssertionError if it did not start."""
        asyncio.run(self._all())
        if self._action is not None:
            assert self._thread is not None, "the streams ended before the action"
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self.results

    async def _all(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(
                *(self._stream(client, result, body) for result, body in zip(self.results, self._bodies, strict=True))
            )

    async def _stream(self, client: openai.AsyncOpenAI, result: StreamResult, body: dict[str, Any]) -> None:
        try:
            chunks = await client.completions.create(**body, stream=True, stream_options={"include_usage": True})
            async for chunk in chunks:
                for choice in chunk.choices:
                    result.tokens += getattr(choice, "token_ids", None) or []
                    result.finish = choice.finish_reason or result.finish
                result.usage = chunk.usage.completion_tokens if chunk.usage else result.usage
                self._start_action_if_due()
        except openai.OpenAIError as error:
            result.error = f"{type(error).__name__}: {error}"

    def _start_action_if_due(self) -> None:
        if self._action is None or self._thread is not None:
            return
        parts = [len(result.tokens) / body["max_tokens"] for result, body in zip(self.results, self._bodies, strict=True)]
        if min(parts) >= MIN_PART:
            self.spread = min(parts), max(parts)
            self._thread = threading.Thread(target=self._run_action)
            self._thread.start()

    def _run_action(self) -> None:
        assert self._action is not None
        try:
            self._action()
        except BaseException as error:
            self._error = error
