"""The answer to one request, streamed or whole, as a bare ASGI response: a frame less per token than a framework's.

Each delta leaves as one chunk, however many tokens it holds. Whenever the client goes away the backend's iterator is closed,
which aborts the request; the same for a stop string, an error, a server that shuts down.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError, Delta, KeepAlive
from phalanx_frontend.errors import ApiError, error_body, error_headers, internal_error, of_backend
from phalanx_frontend.formats import DONE, KEEP_ALIVE, Format, event, usage
from phalanx_frontend.metrics import DoorMetrics, RequestMeter
from phalanx_frontend.reply import Reply, StreamBroken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted request: what to generate, and how to write it."""

    request: wire.Request
    reply: Reply
    format: Format
    is_streamed: bool
    has_usage: bool


class Answer(Response):
    """Runs a job against the backend while the client is there."""

    def __init__(self, job: Job, backend: Backend, meter: RequestMeter, metrics: DoorMetrics, route: str) -> None:
        super().__init__()
        self._job = job
        self._backend = backend
        self._meter = meter
        self._metrics = metrics
        self._route = route
        self._has_started = False
        self._outcome = "abort"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole response, or stops when the client left."""
        try:
            await run_while_connected(receive, self._send_answer(send))
        finally:
            self._meter.end(self._outcome, self._job.reply.cached_tokens)

    async def _send_answer(self, send: Send) -> None:
        stream = self._backend.generate(self._job.request)
        try:
            await (self._send_stream if self._job.is_streamed else self._send_whole)(stream, send)
            self._outcome = self._job.reply.finish or "error"
        except BackendError as error:
            await self._send_error(of_backend(error), send)
        except Exception:
            # Unforeseen: a bug of ours or of the backend. The client gets an end, the log gets the cause.
            log.exception("request failed", extra={"request": self._job.request.id})
            await self._send_error(internal_error(), send)
        finally:
            await close(stream)

    async def _send_stream(self, stream: AsyncIterator[Delta | KeepAlive], send: Send) -> None:
        job, reply = self._job, self._job.reply
        opening = job.format.opening()
        async for item in stream:
            if not self._has_started:
                await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}, send)
            if isinstance(item, KeepAlive):
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                continue
            text = self._take(item)
            if reply.finish is not None:
                last = opening + job.format.ending(text, reply) + self._counts() + DONE
                # Before the last byte: once it is out, the server reports the client as gone and this task is cancelled.
                await close(stream)
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            if text:
                await send({"type": "http.response.body", "body": opening + job.format.text(text), "more_body": True})
                opening = b""
        raise StreamBroken("the backend's stream ended without a reason")

    async def _send_whole(self, stream: AsyncIterator[Delta | KeepAlive], send: Send) -> None:
        job, reply, texts = self._job, self._job.reply, []
        async for item in stream:
            if isinstance(item, KeepAlive):
                continue
            texts.append(self._take(item))
            if reply.finish is not None:
                await close(stream)
                counts = usage(len(job.request.prompt), reply)
                body = job.format.whole("".join(texts), reply, counts)
                await self._start(200, {"content-type": "application/json", "content-length": str(len(body))}, send)
                await send({"type": "http.response.body", "body": body, "more_body": False})
                return
        raise StreamBroken("the backend's stream ended without a reason")

    def _take(self, delta: Delta) -> str:
        before = self._job.reply.completion_tokens
        text = self._job.reply.feed(delta)
        if count := self._job.reply.completion_tokens - before:
            self._meter.tokens(count)
        return text

    def _counts(self) -> bytes:
        if not self._job.has_usage:
            return b""
        return self._job.format.counts(usage(len(self._job.request.prompt), self._job.reply))

    async def _send_error(self, error: ApiError, send: Send) -> None:
        self._outcome = "error"
        body = error_body(error)
        if self._has_started:
            body = event(body)
        else:
            headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
            await self._start(error.status, headers, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: dict[str, str], send: Send) -> None:
        self._has_started = True
        self._metrics.responses.labels(self._route, str(status)).inc()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


async def close(stream: AsyncIterator[Delta | KeepAlive]) -> None:
    """Ends a stream early, which aborts its request. A stream that ended already stays so."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs the work to its end, or cancels it as soon as the client is gone. Leaves nothing running behind."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
