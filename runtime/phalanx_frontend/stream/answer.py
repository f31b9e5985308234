"""Response to one generating request, in plain ASGI for speed.

Each delta becomes one chunk. A disconnect, a stop string and an error close the backend's iterators, which aborts the requests. A
failure of one choice ends all.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError, Delta, KeepAlive
from phalanx_frontend.errors import ApiError, api_error_of_backend, error_headers, internal_error, with_resume_hint
from phalanx_frontend.ids import EventIds
from phalanx_frontend.metrics import ApiMetrics, RequestMeter
from phalanx_frontend.stream.formats import KEEP_ALIVE, AnswerFormat, ChoiceFormat, Piece
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.response_cache import MISS, CacheAnswer, CacheUse, record, replay_hit
from phalanx_frontend.stream.resume import Item, ResumePoint, SiblingStreams, resume_answer
from phalanx_frontend.tracing.gen_ai import describe_error, describe_response
from phalanx_frontend.tracing.tracer import RequestTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of an answer."""

    request: wire.Request
    reply: Reply
    format: ChoiceFormat
    meter: RequestMeter
    resume_point: ResumePoint | None = None  # if the stream is resumed

    @property
    def num_delivered(self) -> int:
        """Number of tokens that the client has."""
        return 0 if self.resume_point is None else self.resume_point.num_delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJob:
    """All choices of one answer, grouped by prompt."""

    id: str
    stream: str  # in the event ids
    choices: Sequence[Choice]
    per_prompt: int
    format: AnswerFormat
    is_streamed: bool
    has_usage: bool
    has_running_usage: bool
    cache_use: CacheUse | None = None  # of the only choice
    trace: RequestTrace | None = None

    def usage(self) -> dict[str, Any]:
        """Returns token counts; each prompt counts once."""
        firsts = self.choices[:: self.per_prompt]
        prompt_tokens = sum(len(choice.request.prompt) for choice in firsts)
        completion_tokens = sum(choice.reply.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.reply.cached_tokens for choice in firsts)},
        }


log = logging.getLogger(__name__)

CACHE_HEADER = "x-phalanx-cache"
"""Response header with the result of the lookup, if the response cache was asked."""


class Answer(Response):
    """Runs a job while the client is connected."""

    def __init__(self, job: AnswerJob, backend: Backend, metrics: ApiMetrics, route: str) -> None:
        super().__init__()
        self._job = job
        self._backend = backend
        self._metrics = metrics
        self._route = route
        self._has_started = False
        self._cached: CacheAnswer = MISS
        self._ids = EventIds(job.stream, [choice.num_delivered for choice in job.choices])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, unless the client disconnects."""
        await run_while_connected(receive, self._send_answer(send))

    async def run(self, send: Send) -> None:
        """Sends the stream of an answer in the background, which no disconnect ends. Raises ApiError."""
        await self._send_stream(send)

    async def documents(self) -> list[dict[str, Any]]:
        """Runs the job and returns the document of each choice. Raises ApiError."""
        async with self._streams() as siblings:
            choices = self._job.choices
            texts: list[list[str]] = [[] for _ in choices]
            async for index, item in siblings:
                if isinstance(item, Delta):
                    texts[index].append(self._feed(choices[index], item))
                    if choices[index].reply.finish is not None:
                        await siblings.end(index)
            pieces = [Piece("".join(parts), choice.reply.take_shown()) for choice, parts in zip(choices, texts, strict=True)]
            return [choice.format.whole(piece) for choice, piece in zip(choices, pieces, strict=True)]

    async def _send_answer(self, send: Send) -> None:
        try:
            await (self._send_stream if self._job.is_streamed else self._send_whole)(send)
        except ApiError as error:
            await self._send_error(error, send)

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[SiblingStreams]:
        """Opens the backend's streams, and closes them and the meters. Raises ApiError."""
        outcome = "abort"
        if self._job.cache_use is not None:
            self._cached = await self._job.cache_use.find()
        siblings = SiblingStreams([self._stream_of(choice) for choice in self._job.choices])
        for choice in self._job.choices:
            choice.meter.start()
        objectives = self._metrics.objectives
        try:
            yield siblings
            objectives.answered()
        except BackendError as error:
            outcome = "error"
            objectives.failed(error.status, error.code)
            describe_error(self._job.trace, error.status, error.code, error.can_resume and self._has_started)
            raise api_error_of_backend(error) from error
        except Exception as error:
            # A bug: the log has the cause.
            outcome = "error"
            objectives.failed(500, "internal_error")
            describe_error(self._job.trace, 500, "internal_error")
            log.exception("request failed", extra={"request_id": self._job.id})
            raise internal_error() from error
        finally:
            try:
                await siblings.close()
            finally:
                for choice in self._job.choices:
                    choice.meter.end(choice.reply.finish or outcome, choice.reply.cached_tokens)
                self._describe(outcome)

    def _describe(self, outcome: str) -> None:
        job = self._job
        if job.trace is not None:
            usage, reasons = job.usage(), [choice.reply.finish or outcome for choice in job.choices]
            describe_response(job.trace, job.id, usage["prompt_tokens"], usage["completion_tokens"], reasons)

    def _stream_of(self, choice: Choice) -> AsyncIterator[Item]:
        use = self._job.cache_use
        if choice.resume_point is not None:
            return resume_answer(self._backend, choice.request, choice.reply, choice.format.skip, choice.resume_point)
        if use is None:
            return self._backend.generate(choice.request)
        if self._cached.output is not None:
            return replay_hit(use, self._cached, self._cached.output, is_streamed=self._job.is_streamed)
        return record(self._backend.generate(choice.request), use, self._cached, choice.reply, time.perf_counter)

    async def _send_stream(self, send: Send) -> None:
        async with self._streams() as siblings:
            await self._send_events(siblings, send)

    async def _send_events(self, siblings: SiblingStreams, send: Send) -> None:
        job, choices, has_running_usage = self._job, self._job.choices, self._job.has_running_usage
        openings = [b"" if choice.num_delivered else choice.format.opening() for choice in choices]
        num_open, ids = len(openings), self._ids
        async for index, item in siblings:
            if not self._has_started:
                await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}, send)
            if isinstance(item, KeepAlive):
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                continue
            choice = choices[index]
            text, reply = self._feed(choice, item), choice.reply
            if not text and reply.finish is None and not choice.format.shows_empty_text:
                continue
            piece, usage = Piece(text, reply.take_shown()), job.usage() if has_running_usage else None
            if reply.finish is None:
                body = choice.format.piece(piece, usage)
                if body:
                    if not choice.format.is_holding:
                        ids.record_sent(index, reply.num_whole)
                    body = ids.add_to(body)
            else:
                events = choice.format.ending(piece, usage)
                num_open -= 1
                ids.record_sent(index, reply.num_whole)
                body = b"".join(map(ids.add_to, events))
                # Before the last byte, after which the server reports a disconnect.
                await siblings.end(index)
            if body and openings[index]:
                body, openings[index] = openings[index] + body, b""
            if not num_open:
                body += (job.format.counts(job.usage()) if job.has_usage else b"") + job.format.done
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": num_open > 0})

    async def _send_whole(self, send: Send) -> None:
        documents = await self.documents()
        body = self._job.format.whole(documents, self._job.usage())
        await self._start(200, {"content-type": "application/json", "content-length": str(len(body))}, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_error(self, error: ApiError, send: Send) -> None:
        form = self._job.format.errors
        if self._has_started:
            body = self._ids.add_to(form.event(form.body(with_resume_hint(error, self._ids.current()))))
        else:
            body = form.body(error)
            headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
            await self._start(error.status, headers, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: dict[str, str], send: Send) -> None:
        self._has_started = True
        if self._job.cache_use is not None and status == 200:
            headers[CACHE_HEADER] = self._cached.header
            if self._job.trace is not None:
                self._job.trace.attributes["phalanx.cache"] = self._cached.header
        self._metrics.responses.labels(self._route, str(status)).inc()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    def _feed(self, choice: Choice, delta: Delta) -> str:
        """Returns the text that a delta adds."""
        reply = choice.reply
        before = reply.completion_tokens
        text = reply.feed(delta)
        if count := reply.completion_tokens - before:
            choice.meter.tokens(count, is_stored=self._cached.output is not None)
        return text


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, or cancels it when the client disconnects."""
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
