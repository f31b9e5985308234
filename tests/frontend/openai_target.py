"""A server under test, and its clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.polling import until

PROMPT = "Once upon a time"
PATIENCE_S = 60.0
"""Timeout of each request, long enough for a slow machine."""


@dataclass(frozen=True)
class Target:
    """A server under test, and the features that its model has."""

    base_url: str  # without /v1
    model: str
    has_chat: bool = True
    is_exact: bool = True  # equal requests give equal tokens
    long_tokens: int = 220  # a request for this many outlasts the arrival of its first token
    metrics_prefix: str = "phalanx"
    is_model: bool = False  # a real model, with meaningful logprobs

    def client(self) -> AsyncOpenAI:
        """Returns the real client, without retries."""
        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S, http_client=http)

    def http(self) -> httpx.AsyncClient:
        """Returns a plain HTTP client, for requests and headers that the real one does not expose."""
        return httpx.AsyncClient(base_url=self.base_url, timeout=PATIENCE_S, verify=False, trust_env=False)


@dataclass(frozen=True)
class Ended:
    """A complete answer."""

    text: str
    finish: str | None
    prompt_tokens: int
    completion_tokens: int


async def complete(client: AsyncOpenAI, target: Target, **fields: Any) -> Ended:
    """Returns a completion that is not streamed."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    answer = await client.completions.create(model=target.model, **fields)
    assert answer.usage is not None
    choice = answer.choices[0]
    return Ended(choice.text, choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def complete_streamed(client: AsyncOpenAI, target: Target, **fields: Any) -> Ended:
    """Returns the same completion, joined from a stream."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    stream = await client.completions.create(model=target.model, stream=True, stream_options={"include_usage": True}, **fields)
    text, finish, usage = "", None, None
    async for chunk in stream:
        assert finish is None or not chunk.choices, "a chunk with text came after the one with the reason"
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason
        usage = chunk.usage
    assert usage is not None
    return Ended(text, finish, usage.prompt_tokens, usage.completion_tokens)


async def metric(target: Target, name: str, **labels: str) -> float:
    """Returns the sum of a family's samples with these labels."""
    async with target.http() as http:
        lines = (await http.get("/metrics")).text.splitlines()
    pairs = [f'{key}="{value}"' for key, value in labels.items()]
    samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in pairs)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


async def metric_reaches(target: Target, at_least: float, name: str, **labels: str) -> None:
    """Waits until `metric` returns at least this value."""

    async def has_reached() -> bool:
        return await metric(target, name, **labels) >= at_least

    await until(has_reached)


@asynccontextmanager
async def raw_request(target: Target, fields: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Opens a completion over its own socket, which is cut at the end of the block."""
    url = httpx.URL(target.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port or 80)
    body = json.dumps({"model": target.model, "prompt": PROMPT, "ignore_eos": True, **fields}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"host: {url.host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    try:
        yield reader
    finally:
        writer.transport.abort()


class SuiteFixtures:
    """Fixtures of all suites. Needs a `target` fixture."""

    @pytest.fixture
    async def client(self, target: Target) -> AsyncIterator[AsyncOpenAI]:
        async with target.client() as client:
            yield client

    @pytest.fixture
    def exact(self, target: Target) -> None:
        if not target.is_exact:
            pytest.skip("equal requests need not give equal tokens on this target")

    @pytest.fixture
    def chat(self, target: Target) -> None:
        if not target.has_chat:
            pytest.skip("the model has no chat template")
