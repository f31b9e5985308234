"""A client that streams one answer of the OpenAI API and resumes it, at another router, when its connection breaks."""

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

KEPT_S = 30.0
"""How long a stream is kept without a router, at least (docs/streams.md); later a client may have to ask again."""
STALL_S = 300.0
"""Without a token for this long a stream is lost."""
RETRY_S = 0.3
SLOW_S = 0.05
"""Pause of a slow client after each event."""
RESUMABLE = ("router_leaving", "groups_silent")
"""Codes of errors after which a stream continues at another router, or later (docs/errors.md)."""
BUSY = (429, 503)
"""Statuses after which a client sends the request again, as `Retry-After` says."""


@dataclass(slots=True)
class Answer:
    """What a client got."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    last_id: str = ""
    breaks: int = 0
    """Connections that broke."""
    refusals: int = 0
    resumes: int = 0
    """Connections that continued the stream."""
    repeats: int = 0
    """How often the client began again, because the stream was no longer kept."""
    error: str | None = None
    """Why the answer is incomplete."""

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.finish is not None


class Asking:
    """One request: asks the routers in turn until the answer is whole or refused, or the client wants no more."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        body: Mapping[str, Any],
        wants_more: Callable[[Answer], bool] = lambda _: True,
        *,
        pause_s: float = 0.0,
        path: str = "/v1/chat/completions",
    ) -> None:
        """wants_more: called after each event. path: of chats or completions."""
        self._session = session
        self._path = path
        self._urls = urls
        self._body = {**body, "stream": True, "return_token_ids": True}
        self._wants_more = wants_more
        self._pause_s = pause_s
        self._response: aiohttp.ClientResponse | None = None
        self._is_over = False
        self._progress_at = 0.0
        self.answer = Answer()

    def disconnect(self) -> None:
        """Closes the connection, as a lost network does; the client resumes."""
        if self._response is not None:
            self._response.close()

    async def run(self, first_url: int = 0) -> Answer:
        """Returns the answer. first_url: index of the router to ask first."""
        answer, attempt = self.answer, first_url
        self._progress_at = time.monotonic()
        while not self._is_over:
            try:
                await self._attempt(self._urls[attempt % len(self._urls)])
            except (aiohttp.ClientError, TimeoutError, OSError):
                answer.breaks += 1
            if self._is_over:
                break
            attempt += 1  # a router that was killed takes longer to come back than another one to answer
            if time.monotonic() - self._progress_at > STALL_S:
                self._fail(f"no token for {STALL_S:.0f} s")
            await asyncio.sleep(RETRY_S)
        return answer

    def _fail(self, why: str) -> None:
        self.answer.error = why
        self._is_over = True

    async def _attempt(self, url: str) -> None:
        headers = {"Last-Event-ID": self.answer.last_id} if self.answer.last_id else {}
        async with self._session.post(f"{url}{self._path}", json=self._body, headers=headers) as response:
            self._response = response
            try:
                if response.status == 200:
                    self.answer.resumes += bool(headers)
                    await self._read(response)
                    self.answer.breaks += not self._is_over
                elif response.status in BUSY:
                    self.answer.refusals += 1
                else:
                    self._refused(response.status, await response.read())
            finally:
                self._response = None

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        async for id, data in events(response.content.iter_any()):
            if data == "[DONE]":
                self._is_over = True
                return
            event = json.loads(data)
            if event.get("error"):
                return self._take_error(event["error"])
            self._take(event)
            self.answer.last_id = id or self.answer.last_id
            if not self._wants_more(self.answer):
                self._is_over = True
                response.close()
                return
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    def _refused(self, status: int, body: bytes) -> None:
        """Ends the answer, unless its stream was lost longer than it is kept: then the client begins again."""
        refusal = refusal_of(status, body)
        if refusal == "HTTP 404 unknown_stream" and time.monotonic() - self._progress_at > KEPT_S:
            former = self.answer
            former.text, former.finish, former.last_id, former.tokens = "", None, "", []
            former.repeats += 1
        else:
            self._fail(refusal)

    def _take_error(self, error: Mapping[str, Any]) -> None:
        """Ends the answer, unless its stream continues elsewhere."""
        if error.get("code") not in RESUMABLE:
            self._fail(f"error {error.get('code')}: {json.dumps(error)[:200]}")

    def _take(self, event: Mapping[str, Any]) -> None:
        for choice in event.get("choices", ()):
            self.answer.text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            self.answer.tokens += choice.get("token_ids") or []
            self.answer.finish = choice.get("finish_reason") or self.answer.finish
            self._progress_at = time.monotonic()


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, str]]:
    """Yields id and data of each event. A stream may break inside an event, which is then not yielded.

    Only a newline ends a line, unlike in `str.splitlines`.
    """
    rest, id = b"", ""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"id: "):
                id = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                yield id, line[6:].decode().strip()
                id = ""


def refusal_of(status: int, body: bytes) -> str:
    """Describes a response without a stream: status, and our error code or the start of the text.

    Another text shows that a router's address now belongs to something else.
    """
    try:
        return f"HTTP {status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status} {body[:80].decode(errors='replace')!r}"


def difference(answer: Answer, reference: Answer) -> str | None:
    """Returns how an answer differs from the undisturbed one; of a cancelled one only what it has is compared."""
    if not answer.is_whole:
        count = len(answer.tokens)
        is_part = answer.tokens == reference.tokens[:count] and reference.text.startswith(answer.text)
        return None if is_part else f"part of {count} tokens differs: {answer.text[-40:]!r}"
    if answer.tokens != reference.tokens:
        equal = next(
            (at for at, pair in enumerate(zip(answer.tokens, reference.tokens, strict=False)) if pair[0] != pair[1]),
            min(len(answer.tokens), len(reference.tokens)),
        )
        return f"{len(answer.tokens)} tokens, {len(reference.tokens)} in the reference, differs at {equal}"
    if answer.text != reference.text:
        return f"equal tokens, but the text {answer.text[-60:]!r} for {reference.text[-60:]!r}"
    return None if answer.finish == reference.finish else f"finish {answer.finish}, reference {reference.finish}"
