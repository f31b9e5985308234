"""Backend of the API server over the local engine: one mailbox per request, filled by the engine client.

Queued tokens leave as one delta: a slow reader gets longer deltas, not a longer queue.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_runtime.engine.client import RESTART_RETRY_S, EngineClient

KEEP_ALIVE_S = 10.0
"""Seconds of silence after which a stream gets a keep-alive. Proxies commonly disconnect after 30 s or 60 s."""


@dataclass(slots=True, kw_only=True)
class _Mailbox:
    """Events of one request that its reader has not taken yet."""

    index: int
    tokens: list[int] = field(default_factory=list)
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    prompt_details: list[wire.TokenDetail] = field(default_factory=list)
    cached_tokens: int = 0
    finished: wire.Finished | None = None
    error: BackendError | None = None
    reader: asyncio.Future[None] | None = None

    def is_empty(self) -> bool:
        return not self.tokens and self.finished is None and self.error is None

    def wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def take(self) -> Delta:
        """Takes all queued tokens as one delta."""
        reason = None if self.finished is None else self.finished.reason
        delta = Delta(
            index=self.index,
            tokens=self.tokens,
            finish=reason,
            cached_tokens=self.cached_tokens,
            details=self.details or (),
            prompt_details=self.prompt_details or (),
        )
        self.index += len(self.tokens)
        self.tokens = []
        if self.details or self.prompt_details:
            self.details, self.prompt_details = [], []
        return delta

    async def wait(self, timeout_s: float) -> None:
        """Returns on a wake-up or after the timeout."""
        loop = asyncio.get_running_loop()
        self.reader = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake)
        try:
            await self.reader
        finally:
            timer.cancel()
            self.reader = None


class LocalBackend:
    """Implements `phalanx_frontend.backend.Backend`, and is a sink of the engine client."""

    def __init__(self, client: EngineClient, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._client = client
        self._keep_alive_s = keep_alive_s
        self._mailboxes: dict[int, _Mailbox] = {}
        client.subscribe(self._state_changed)

    async def generate(self, request: wire.Request) -> AsyncGenerator[Delta | KeepAlive, None]:
        """Deltas in index order; the last has `finish`. Closing the generator early aborts the request."""
        mailbox = _Mailbox(index=len(request.delivered))
        handle = self._client.submit(request, self)
        self._mailboxes[handle] = mailbox
        try:
            while True:
                if mailbox.is_empty():
                    await mailbox.wait(self._keep_alive_s)
                if mailbox.tokens or mailbox.finished is not None:
                    delta = mailbox.take()
                    yield delta
                    if delta.finish is not None:
                        return
                elif mailbox.error is not None:
                    raise mailbox.error
                else:
                    yield KeepAlive()
        finally:
            del self._mailboxes[handle]
            self._client.abort([handle])

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Returns no streams: local streams end with their connection; only routers have journals."""
        return {}

    async def wait_for_assets(self) -> None:
        """Returns at once: the local backend has no cold start."""

    def assets(self) -> wire.Assets:
        """Model assets for the API server."""
        return self._client.assets()

    def not_ready(self) -> str | None:
        """Reason no request can be served now, or None."""
        state = self._client.state()
        return None if state.serving else state.reason

    def tokens(self, frame: wire.Tokens) -> None:
        """Adds each token to its request's mailbox."""
        mailboxes = self._mailboxes
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            mailbox = mailboxes[handle]
            mailbox.tokens.append(token)
            mailbox.wake()
        if frame.details:
            for handle, detail in zip(frame.handles, frame.details, strict=True):
                if detail is not None:  # either all tokens of a request have details or no token has
                    mailboxes[handle].details.append(detail)
        for told in frame.prompt_details:  # no wake-up: they leave with the first token
            mailboxes[told.handle].prompt_details.extend(told.details)
        for cached in frame.cached:
            mailboxes[cached.handle].cached_tokens = cached.cached_tokens
        for finished in frame.finished:
            mailbox = mailboxes[finished.handle]
            mailbox.finished = finished
            mailbox.cached_tokens = finished.cached_tokens
            mailbox.wake()

    def refused(self, frame: wire.Refused) -> None:
        """Ends one request with the engine's error."""
        self._fail(self._mailboxes[frame.handle], frame.status, frame.code, frame.message, frame.retry_after_s)

    def _state_changed(self) -> None:
        """Fails the requests that the engine has dropped. While the group drains, running ones continue."""
        state = self._client.state()
        if state.serving:
            return
        stops = self._client.stops
        if stops is None:
            code, message = "group_restarting", f"the group lost its engine: {state.reason}"
        else:
            code, message = "shutting_down", stops if stops == state.reason else f"{stops}: {state.reason}"
        for handle, mailbox in self._mailboxes.items():
            if not self._client.has(handle):
                self._fail(mailbox, 503, code, message, RESTART_RETRY_S)

    def _fail(self, mailbox: _Mailbox, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        if mailbox.finished is None:
            mailbox.error = BackendError(status, code, message, retry_after_s)
            mailbox.wake()
