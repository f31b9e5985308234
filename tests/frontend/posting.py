"""Requests to an API server over a script, without a socket."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError
from phalanx_frontend.limits import DEFAULT_LIMITS, Limits
from tests.frontend.fakes import FakeBackend, Step

FULL = BackendError(429, "queue_full", "too many requests wait", retry_after_s=2.2)
PATIENCE_S = 30


@asynccontextmanager
async def client_of(backend: FakeBackend, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of an app over this backend."""
    transport = httpx.ASGITransport(create_app(backend, limits=limits), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        yield client


async def post(backend: FakeBackend, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """Returns the answer to one request, by default a completion of "x"."""
    async with client_of(backend) as client:
        # Encoded here: the client refuses to send half a surrogate pair.
        body = json.dumps({"prompt": "x", **fields} if path == "/v1/completions" else fields)
        return await client.post(path, content=body, headers={"content-type": "application/json"})


def scripted(*steps: Step) -> FakeBackend:
    """Plays these steps for every request."""
    return FakeBackend(lambda request: steps)


def events(answer: httpx.Response) -> list[str]:
    """Returns the data of an answer's events."""
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
