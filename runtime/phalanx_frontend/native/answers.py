"""Responses of the native API: one generation, streamed or whole, or all of a batch; a disconnect of the client ends each."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError, KeepAlive
from phalanx_frontend.errors import (
    ApiError,
    api_error_of_backend,
    error_body,
    error_detail,
    error_response,
    internal_error,
    with_resume_hint,
)
from phalanx_frontend.ids import EventIds
from phalanx_frontend.metrics import ApiMetrics, Clock, RequestMeter
from phalanx_frontend.stream.answer import run_while_connected
from phalanx_frontend.stream.formats import DONE, KEEP_ALIVE, event
from phalanx_frontend.stream.reply import Reply, StreamBroken
from phalanx_frontend.stream.resume import DeliveredChoice, close, resume_answer

log = logging.getLogger(__name__)

Deliver = Callable[[str, list[int]], Awaitable[None]]
"""Receives a piece of text and its tokens; both are empty for a keep-alive."""


class Generation:
    """One accepted request. `run` may be called once; it records the request's metrics."""

    def __init__(
        self,
        id: str,
        request: wire.Request,
        past: DeliveredChoice | None,
        reply: Reply,
        meter: Callable[[], RequestMeter],
        backend: Backend,
        arrived_s: float,
        clock: Clock,
    ) -> None:
        self.id = id
        self.request = request
        self.past = past
        self.reply = reply
        self._open_meter = meter
        self._backend = backend
        self._arrived_s = arrived_s
        self._clock = clock

    async def run(self, deliver: Deliver) -> dict[str, Any]:
        """Returns the whole document, after each piece was delivered. Raises ApiError. Cancellation aborts the request."""
        outcome = "abort"
        meter = self._open_meter()
        texts: list[str] = []
        tokens: list[int] = []
        reply, request, past = self.reply, self.request, self.past
        if past is None:
            stream = self._backend.generate(request)
        else:

            def skip(text: str, had: Sequence[int]) -> None:
                texts.append(text)
                tokens.extend(had)

            stream = resume_answer(self._backend, request, reply, skip, past)
        try:
            async for item in stream:
                if isinstance(item, KeepAlive):
                    await deliver("", [])
                    continue
                before, whole = reply.completion_tokens, reply.num_whole
                text = reply.feed(item)
                if fed := item.tokens[: reply.completion_tokens - before]:
                    meter.tokens(len(fed))
                tokens += fed
                texts.append(text)
                if reply.num_whole > whole or reply.finish is not None:
                    await deliver(text, tokens[whole : reply.num_whole])
                if reply.finish is not None:
                    outcome = reply.finish
                    return self._document("".join(texts), tokens)
            raise StreamBroken("the backend's stream ended without a reason")
        except BackendError as error:
            outcome = "error"
            raise api_error_of_backend(error) from error
        except Exception as error:
            outcome = "error"
            log.exception("request failed", extra={"request_id": self.request.id})
            raise internal_error() from error
        finally:
            await close(stream)
            meter.end(outcome, reply.cached_tokens)

    def _document(self, text: str, tokens: list[int]) -> dict[str, Any]:
        latency_s = self._clock() - self._arrived_s
        return {
            "request_id": self.id,
            "prompt_tokens": len(self.request.prompt),
            "generated_tokens": len(tokens),
            "text": text,
            "token_ids": tokens,
            "latency_ms": latency_s * 1000,
            "throughput_tokens_per_sec": len(tokens) / latency_s if latency_s > 0 else 0.0,
            "finish_reason": self.reply.finish,
        }


BatchEntry = Generation | ApiError
"""One entry of a batch: a generation, or the error that refuses it."""


async def _nowhere(text: str, tokens: list[int]) -> None:
    """Delivers nothing, for responses that are not streamed."""


class NativeAnswer(Response):
    """Response of /v1/generate. Streamed: an event per piece, one with the whole document, then [DONE]."""

    def __init__(self, generation: Generation, metrics: ApiMetrics, route: str, is_streamed: bool) -> None:
        super().__init__()
        self._generation = generation
        self._metrics = metrics
        self._route = route
        self._is_streamed = is_streamed
        self._has_started = False
        self._ids = EventIds(generation.request.id, [0 if generation.past is None else generation.past.num_delivered])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole response, or stops when the client disconnects."""

        async def work() -> None:
            try:
                await (self._stream(send) if self._is_streamed else self._whole(scope, receive, send))
            except ApiError as error:
                await self._fail(error, scope, receive, send)

        await run_while_connected(receive, work())

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        document = await self._generation.run(_nowhere)
        self._metrics.responses.labels(self._route, "200").inc()
        await Response(orjson.dumps(document), media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        id, ids, reply = self._generation.id, self._ids, self._generation.reply

        async def deliver(text: str, tokens: list[int]) -> None:
            if not self._has_started:
                self._has_started = True
                self._metrics.responses.labels(self._route, "200").inc()
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            piece = KEEP_ALIVE
            if text or tokens:
                ids.record_sent(0, reply.num_whole)
                piece = ids.prepend_to(event(orjson.dumps({"request_id": id, "text": text, "token_ids": tokens})))
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        document = await self._generation.run(deliver)
        body = ids.prepend_to(event(orjson.dumps(document))) + DONE
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_started:
            await send(
                {
                    "type": "http.response.body",
                    "body": self._ids.prepend_to(event(error_body(with_resume_hint(error, self._ids.current())))),
                    "more_body": False,
                }
            )
            return
        self._metrics.responses.labels(self._route, str(error.status)).inc()
        await error_response(error)(scope, receive, send)


class BatchAnswer(Response):
    """Response of /v1/batch: the entries' documents, in order. Entries run concurrently; the engine bounds their number."""

    def __init__(
        self, ids: list[str], entries: Sequence[BatchEntry], metrics: ApiMetrics, route: str, arrived_s: float, clock: Clock
    ) -> None:
        super().__init__()
        self._ids = ids
        self._entries = entries
        self._metrics = metrics
        self._route = route
        self._arrived_s = arrived_s
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response when every entry has ended; aborts all of them when the client disconnects."""

        async def work() -> None:
            responses = await asyncio.gather(*(_answer_of(id, entry) for id, entry in zip(self._ids, self._entries, strict=True)))
            document = {
                "request_ids": self._ids,
                "responses": responses,
                "total_latency_ms": (self._clock() - self._arrived_s) * 1000,
            }
            self._metrics.responses.labels(self._route, "200").inc()
            await Response(orjson.dumps(document), media_type="application/json")(scope, receive, send)

        await run_while_connected(receive, work())


async def _answer_of(id: str, entry: BatchEntry) -> dict[str, Any]:
    """Returns the document of one entry, or its error with the status that it would have as a single request."""
    try:
        if isinstance(entry, ApiError):
            raise entry
        return await entry.run(_nowhere)
    except ApiError as error:
        detail = {**error_detail(error), "status": error.status, "retry_after_s": error.retry_after_s}
        return {"request_id": id, "error": detail}
