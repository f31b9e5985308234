"""Backend of the API server over the local engine.

Queued tokens leave as one delta: a slow reader gets longer deltas, not a longer queue.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_api.trace import PrefillTime
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_frontend.tracing.group_spans import add_prefill
from phalanx_frontend.tracing.tracer import RequestTrace, Tracer
from phalanx_runtime.engine.client import RESTART_RETRY_S, EngineClient

KEEP_ALIVE_S = 10.0
"""Proxies commonly disconnect after 30 s or 60 s of silence."""


@dataclass(slots=True, kw_only=True)
class _Mailbox:
    index: int
    tokens: list[int] = field(default_factory=list)
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    prompt_details: list[wire.TokenDetail] = field(default_factory=list)
    cached_tokens: int = 0
    prefills: list[tuple[PrefillTime, int, float]] = field(default_factory=list)
    """Of a traced request: times, cached tokens and the time of arrival; again after each preemption."""
    finished: wire.Finished | None = None
    error: BackendError | None = None
    reader: asyncio.Future[None] | None = None

    def is_empty(self) -> bool:
        return not self.tokens and self.finished is None and self.error is None

    def wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def take(self) -> Delta:
        reason = None if self.finished is None else self.finished.reason
        delta = Delta(
            index=self.index,
            tokens=self.tokens,
            finish=reason,
            cached_tokens=self.cached_tokens,
            details=self.details or (),
            prompt_details=self.prompt_details or (),
            vector=b"" if self.finished is None else self.finished.vector,
        )
        self.index += len(self.tokens)
        self.tokens = []
        if self.details or self.prompt_details:
            self.details, self.prompt_details = [], []
        return delta

    async def wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.reader = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake)
        try:
            await self.reader
        finally:
            timer.cancel()
            self.reader = None


class LocalBackend:
    """Implements `Backend` and `RequestSink`."""

    def __init__(self, client: EngineClient, keep_alive_s: float = KEEP_ALIVE_S, tracer: Tracer | None = None) -> None:
        self._client = client
        self._tracer = tracer
        self._keep_alive_s = keep_alive_s
        self._mailboxes: dict[int, _Mailbox] = {}
        client.subscribe(self._state_changed)

    async def generate(self, request: wire.Request) -> AsyncGenerator[Delta | KeepAlive, None]:
        """Yields deltas in index order; closing the generator aborts the request. Raises BackendError."""
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
            trace = None if self._tracer is None else self._tracer.find(request.trace)
            if trace is not None and mailbox.prefills:
                _add_spans(trace, mailbox)

    def check_quota(self, tenant: str, prompt_tokens: int) -> None:
        """Accepts all: only routers have quotas."""

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Returns no streams: only routers have journals."""
        return {}

    async def wait_for_assets(self, name: str = "") -> None:
        """Returns at once: no cold start."""

    def assets(self) -> wire.Assets:
        """Model assets."""
        return self._client.assets()

    def not_ready(self) -> str | None:
        """Reason, if no request can be served."""
        state = self._client.state()
        return None if state.serving else state.reason

    def tokens(self, frame: wire.Tokens) -> None:
        """Queues tokens."""
        mailboxes = self._mailboxes
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            mailbox = mailboxes[handle]
            mailbox.tokens.append(token)
            mailbox.wake()
        if frame.details:
            for handle, detail in zip(frame.handles, frame.details, strict=True):
                if detail is not None:
                    mailboxes[handle].details.append(detail)
        for prompt in frame.prompt_details:  # they leave with the first token
            mailboxes[prompt.handle].prompt_details.extend(prompt.details)
        for cached in frame.cached:
            mailbox = mailboxes[cached.handle]
            mailbox.cached_tokens = max(mailbox.cached_tokens, cached.cached_tokens)
            if cached.prefill is not None:
                mailbox.prefills.append((cached.prefill, cached.cached_tokens, time.monotonic()))
        for finished in frame.finished:
            mailbox = mailboxes[finished.handle]
            mailbox.finished = finished
            mailbox.cached_tokens = finished.cached_tokens
            mailbox.wake()

    def refused(self, frame: wire.Refused) -> None:
        """Ends a request with an error."""
        self._fail(self._mailboxes[frame.handle], frame.status, frame.code, frame.message, frame.retry_after_s)

    def _state_changed(self) -> None:
        """Fails the requests that the client has dropped."""
        state = self._client.state()
        if state.serving:
            return
        stop_reason = self._client.stop_reason
        if stop_reason is None:
            code, message = "group_restarting", f"the group lost its engine: {state.reason}"
        else:
            code, message = "shutting_down", stop_reason if stop_reason == state.reason else f"{stop_reason}: {state.reason}"
        for handle, mailbox in self._mailboxes.items():
            if not self._client.has(handle):
                self._fail(mailbox, 503, code, message, RESTART_RETRY_S)

    def _fail(self, mailbox: _Mailbox, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        if mailbox.finished is None:
            mailbox.error = BackendError(status, code, message, retry_after_s)
            mailbox.wake()


def _add_spans(trace: RequestTrace, mailbox: _Mailbox) -> None:
    for number, (times, cached_tokens, now) in enumerate(mailbox.prefills):
        add_prefill(trace, times=times, now=now, cached_tokens=cached_tokens, group="", epoch=0, is_again=number > 0)
    trace.add("decode", mailbox.prefills[0][2], time.monotonic(), attributes={"phalanx.tokens": mailbox.index})
