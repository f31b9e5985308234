"""Responses in the background, which run without a connection, and the events of a response that clients read later."""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Message

from phalanx_frontend.errors import ApiError, error_detail, internal_error
from phalanx_frontend.images.budget import current_lease
from phalanx_frontend.openai_responses.conversation_store import ENTRY_OVERHEAD, SERVER_STOPPED, KeptResponse
from phalanx_frontend.openai_responses.history import History
from phalanx_frontend.openai_responses.output_items import NUM_FIRST_EVENTS, OutputItems
from phalanx_frontend.openai_responses.response_format import UNSTARTED_ERRORS
from phalanx_frontend.stream.answer import Answer
from phalanx_frontend.stream.formats import KEEP_ALIVE, named_event
from phalanx_frontend.text.parts import Arguments, Content, Part, Reasoning, ToolCall

log = logging.getLogger(__name__)
BLOCK_EVENTS = 256
"""Events that are compressed together, to about a tenth."""
CHECK_BYTES = 16 << 10
"""Growth of a log between two looks at the memory of all running responses."""
POLL_S = 0.5
"""Interval at which the events of a response at another server are read."""
MAX_SILENT = 20
"""Reads in a row that may get 503; after one more the stream ends with that error. The other server may be busy or stop."""
FIRST_EVENT = b"event: response.created\n"
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")


class EventLog:
    """Events of a stream, each at the position of its `sequence_number`."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._tail: list[bytes] = []
        self._num_tail = 0
        self.num_bytes = 0
        """Memory of all events, in bytes."""

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_EVENTS + len(self._tail)

    def append(self, event: bytes) -> None:
        """Adds an event."""
        self._tail.append(event)
        self._num_tail += len(event)
        self.num_bytes += len(event)
        if len(self._tail) == BLOCK_EVENTS:
            self._blocks.append(_packed(self._tail))
            self.num_bytes += len(self._blocks[-1]) - self._num_tail
            self._tail, self._num_tail = [], 0

    def since(self, number: int) -> list[bytes]:
        """Returns events from a number on, as `unpacked` does."""
        num_packed = len(self._blocks) * BLOCK_EVENTS
        return unpacked(self._blocks, number) if number < num_packed else self._tail[number - num_packed :]

    def packed(self) -> tuple[bytes, ...]:
        """Returns the blocks of all events."""
        return (*self._blocks, *([_packed(self._tail)] if self._tail else []))


def _packed(events: Sequence[bytes]) -> bytes:
    return zlib.compress(b"".join(events), 1)


def unpacked(blocks: Sequence[bytes], number: int, first: int = 0) -> list[bytes]:
    """Returns events from a number on, up to the end of its block: all of them may need much more memory than their blocks.

    `first`: number of the first event of the blocks. Each block ends at a multiple of `BLOCK_EVENTS`, except the last one.
    """
    block = number // BLOCK_EVENTS
    position, start = block - first // BLOCK_EVENTS, number - max(block * BLOCK_EVENTS, first)
    return _split(zlib.decompress(blocks[position]))[start:] if 0 <= position < len(blocks) and start >= 0 else []


def later_events(kept: KeptResponse, number: int) -> KeptResponse:
    """Returns a running response with its events from a number on alone, without documents, for a server that follows it."""
    rest = unpacked(kept.events, number)
    blocks = (_packed(rest), *kept.events[number // BLOCK_EVENTS + 1 :]) if rest else ()
    return replace(kept, document=b"{}", input_items=b"[]", events=blocks, first_event=number)


def _split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n") if event]


class BackgroundResponse:
    """A response that is computed after its request was answered. It implements `Running`.

    `log`: None for a response that is not streamed. `has_room`: whether its events may grow; otherwise they are dropped. It fails
    if it would not be stored, with more than `max_bytes`.
    """

    def __init__(self, log: EventLog | None, has_room: Callable[[], bool], max_bytes: int) -> None:
        self.input_items = b"[]"
        self.previous: str | None = None
        self._log = log
        self._has_room, self._max_bytes = has_room, max_bytes
        self._queued: Mapping[str, Any] = {}
        self._status, self._num_queued_bytes, self._is_too_large = "queued", 0, False
        self._num_checked_bytes = 0  # of the log, at the last look at the memory of all
        self._final: bytes | None = None
        self._changed = asyncio.Event()  # replaced at each change
        self._task: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Its approximate memory, in bytes."""
        num_logged = self._log.num_bytes if self._log is not None else 0
        return self._num_queued_bytes + len(self.input_items) + num_logged + ENTRY_OVERHEAD

    def queue(self, document: Mapping[str, Any]) -> None:
        """Takes the document of the response before it starts."""
        self._queued, self._num_queued_bytes = document, len(orjson.dumps(document))
        self._add(named_event({"type": "response.created", "response": document, "sequence_number": 0}))

    def complete(self, id: str, document: bytes) -> None:
        """Takes the last document of the response; a cancelled one keeps its own, and one that is too large fails."""
        num_bytes = len(document) + len(self.input_items) + ENTRY_OVERHEAD
        if self._final is None and num_bytes > self._max_bytes:
            bounds = f"it has {num_bytes} bytes with its input, and at most {self._max_bytes} are stored"
            message = f"response_too_large: {bounds}; request fewer tokens, or no logprobs"
            self._final = self._failed(message)
            self._is_too_large = True
        self._final = self._final or document

    def compute(self, answer: Answer, finish: Callable[[], None]) -> None:
        """Starts the answer, and calls `finish` at its end. It holds the images of the request until then."""
        lease = current_lease()
        lease.outlives_request = True
        self._task = asyncio.create_task(self._compute(answer))

        def end(task: asyncio.Task[None]) -> None:
            if self._final is None:
                self._end_failed(internal_error().message)
            lease.end()
            finish()
            self._notify()

        self._task.add_done_callback(end)

    def kept(self) -> KeptResponse:
        """Returns the response as it is now."""
        document = self._closed(self._status) if self._final is None else self._final
        events = self._log.packed() if self._log is not None else ()
        # Its last events follow its last document.
        is_running, id = self._final is None or not self._has_ended, self._queued["id"]
        return KeptResponse(id, document, self.input_items, self.previous, events=events, is_running=is_running)

    async def follow(self, number: int, keep_alive_s: float) -> AsyncIterator[list[bytes]]:
        """Yields events from a number on, as they come; an empty list after `keep_alive_s` seconds without events.

        It ends early once the events are dropped.
        """
        while self._log is not None:
            changed, has_ended, events = self._changed, self._has_ended, self._log.since(number)
            number += len(events)
            if events:
                yield events
                continue
            if has_ended:
                return
            try:
                async with asyncio.timeout(keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                yield []

    def cancel(self) -> None:
        """Ends the response, unless it has ended."""
        if self._final is None and self._task is not None:
            self._final = self._closed("cancelled")
            self._task.cancel()

    def fail(self, why: str) -> None:
        """Ends the response as failed, unless it has ended."""
        if self._final is None and self._task is not None:
            self._end_failed(why)
            self._task.cancel()

    async def ended(self) -> None:
        """Waits until it has ended."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    @property
    def _has_ended(self) -> bool:
        return self._task is not None and self._task.done()

    async def _compute(self, answer: Answer) -> None:
        try:
            await answer.run(self._receive)
        except Exception as error:
            if not isinstance(error, ApiError):  # a bug: the log has the cause
                log.exception("response in the background failed", extra={"request_id": self._queued["id"]})
                error = internal_error()
            if self._final is not None:
                self._log = None  # the last event is missing: a stream ends with the document
                return
            # Nothing resumes it, as the client of another stream could.
            why = SERVER_STOPPED if error.code == "router_leaving" else error_detail(error)["message"] or ""
            self._end_failed(why, "rate_limit_exceeded" if error.status == 429 else "server_error")

    async def _receive(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if not body or body == KEEP_ALIVE:
            return
        self._status = "in_progress"
        for event in _split(body) if self._log is not None else ():
            event = event.partition(b"\n")[2] if event.startswith(b"id: ") else event  # no `Last-Event-ID` resumes it
            if not event.startswith((FIRST_EVENT, *(LAST_EVENTS if self._is_too_large else ()))):
                self._add(event)
        if self._is_too_large and self._final is not None:
            self._add_failed(self._final)
        self._notify()

    def _end_failed(self, why: str, code: str = "server_error") -> None:
        self._final = self._failed(why, code)
        self._add_failed(self._final)

    def _add_failed(self, document: bytes) -> None:
        number = len(self._log) if self._log is not None else 0
        self._add(named_event({"type": "response.failed", "response": orjson.Fragment(document), "sequence_number": number}))

    def _add(self, event: bytes) -> None:
        if self._log is None:
            return
        self._log.append(event)
        if abs(self._log.num_bytes - self._num_checked_bytes) >= CHECK_BYTES:
            self._num_checked_bytes = self._log.num_bytes
            if not self._has_room():
                self._log = None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _closed(self, status: str) -> bytes:
        """Returns the document without an output."""
        return orjson.dumps({**self._queued, "status": status})

    def _failed(self, why: str, code: str = "server_error") -> bytes:
        """Returns the document of a failure. `code`: one of those that clients know."""
        return orjson.dumps({**self._queued, "status": "failed", "error": {"code": code, "message": why}})


async def stored_events(history: History, kept: KeptResponse, number: int, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Yields the events of a response from a number on, of a running one as they come. An error becomes an event."""
    num_silent = 0
    try:
        while True:
            if (running := history.running(kept.id)) is not None:
                async for events in running.follow(number, keep_alive_s):
                    number += len(events)
                    yield b"".join(events) or KEEP_ALIVE
                kept = running.kept()  # the store may have no room for it
            while events := unpacked(kept.events, number, kept.first_event):
                number += len(events)
                yield b"".join(events)
            if not kept.is_running:
                if not kept.events and (events := replayed(kept.document, number)):
                    yield b"".join(events)
                return
            yield KEEP_ALIVE
            await asyncio.sleep(POLL_S)
            try:
                kept, num_silent = await history.response(kept.id, number), 0
            except ApiError as error:
                num_silent += 1
                if error.status != 503 or num_silent > MAX_SILENT:
                    raise
    except ApiError as error:
        yield UNSTARTED_ERRORS.event(UNSTARTED_ERRORS.body(error))


def replayed(document: bytes, number: int) -> list[bytes]:
    """Returns the events of a response that has ended from a number on, with one delta for each item; the last one always."""
    response = orjson.loads(document)
    status = response["status"]
    started = {**response, "status": "in_progress", "output": [], "incomplete_details": None, "error": None, "usage": None}
    kinds = ("created", "in_progress")
    events = [
        named_event({"type": f"response.{kind}", "response": started, "sequence_number": at}) for at, kind in enumerate(kinds)
    ]
    assert len(events) == NUM_FIRST_EVENTS
    items = OutputItems(response["id"])
    for item in response["output"]:
        logprobs = item["content"][0]["logprobs"] if item["type"] == "message" else ()
        added = b"".join(items.add(part, logprobs) for part in _parts(item))
        events += _split(added + items.close(item["status"]))
    if status != "cancelled":  # the API has no such event
        events += [items.event(status, response=response)]
        number = min(number, len(events) - 1)
    return events[number:]


def _parts(item: Mapping[str, Any]) -> list[Part]:
    match item["type"]:
        case "function_call":
            return [ToolCall(0, item["name"], item["call_id"]), Arguments(0, item["arguments"])]
        case "reasoning":
            return [Reasoning(item["content"][0]["text"])]
        case _:
            return [Content(item["content"][0]["text"])]
