"""A server under test, and how it is asked."""

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

PROMPT = "Once upon a time"
PATIENCE_S = 60.0
"""Bound of any one wait: a hang fails, a slow machine does not."""


@dataclass(frozen=True)
class Target:
    """A server under test. `base_url` has no /v1."""

    base_url: str
    model: str
    has_chat: bool = True
    is_exact: bool = True
    long_tokens: int = 220
    metrics_prefix: str = "phalanx"
    is_model: bool = False

    def client(self) -> AsyncOpenAI:
        """The real client, without retries."""
        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S, http_client=http)

    def http(self) -> httpx.AsyncClient:
        """A plain HTTP client, for what the real one hides."""
        return httpx.AsyncClient(base_url=self.base_url, timeout=PATIENCE_S, verify=False, trust_env=False)


@dataclass(frozen=True)
class Ended:
    """An answer to its end, streamed or not."""

    text: str
    finish: str | None
    prompt_tokens: int
    completion_tokens: int


async def complete(client: AsyncOpenAI, target: Target, **fields: Any) -> Ended:
    """A completion, not streamed."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    answer = await client.completions.create(model=target.model, **fields)
    assert answer.usage is not None
    choice = answer.choices[0]
    return Ended(choice.text, choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def complete_streamed(client: AsyncOpenAI, target: Target, **fields: Any) -> Ended:
    """The same completion, streamed and put together."""
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
    """Sum of a family's samples that have these labels."""
    async with target.http() as http:
        lines = (await http.get("/metrics")).text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


async def until_metric(target: Target, at_least: float, name: str, **labels: str) -> None:
    """Returns once the metric has got there; TimeoutError when it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while await metric(target, name, **labels) < at_least:
            pass


@asynccontextmanager
async def raw_request(target: Target, fields: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A completion over a socket of its own, cut without any farewell at the end of the block."""
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


class Asked:
    """Fixtures of all suites. Give it a `target` fixture."""

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
