"""Requests to a door over a script, without a server between."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError
from phalanx_frontend.limits import Limits
from tests.frontend.fakes import FakeBackend, Step

FULL = BackendError(429, "queue_full", "too many requests wait", retry_after_s=2.2)
PATIENCE_S = 30


@asynccontextmanager
async def client_of(backend: FakeBackend, limits: Limits | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app over this backend."""
    transport = httpx.ASGITransport(create_app(backend, limits=limits), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client


async def post(backend: FakeBackend, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """The answer to one request; a completion of "x" unless told otherwise."""
    async with client_of(backend) as client:
        # Written here and not by the client, which refuses to send half a character.
        body = json.dumps({"prompt": "x", **fields} if path == "/v1/completions" else fields)
        return await client.post(path, content=body, headers={"content-type": "application/json"})


def scripted(*steps: Step) -> FakeBackend:
    """Every request plays these steps."""
    return FakeBackend(lambda request: steps)


def events(answer: httpx.Response) -> list[str]:
    """The data of an answer's events."""
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
