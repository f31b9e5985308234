"""Response to a stream that arrives before a model is known: comments keep the connection open."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from phalanx_frontend.backend import BackendError
from phalanx_frontend.errors import OPENAI_ERRORS, ApiError, ErrorForm, api_error_of_backend
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_frontend.stream.answer import run_while_connected
from phalanx_frontend.stream.formats import KEEP_ALIVE


class HeldAnswer(Response):
    """Waits for the response of `make_response`, then sends it. Later errors become error events."""

    def __init__(
        self,
        make_response: Callable[[], Awaitable[Response]],
        keep_alive_s: float,
        objectives: ObjectiveCounter,
        errors: ErrorForm = OPENAI_ERRORS,
    ) -> None:
        super().__init__()
        self._make_response = make_response
        self._keep_alive_s = keep_alive_s
        self._objectives = objectives
        self._errors = errors
        self._has_started = False
        self._response: Response | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, unless the client disconnects."""
        try:
            await run_while_connected(receive, self._hold(send))
        except (ApiError, BackendError) as error:
            if not self._has_started:
                raise
            api_error = api_error_of_backend(error) if isinstance(error, BackendError) else error
            self._objectives.failed(api_error.status, api_error.code)
            await send(
                {"type": "http.response.body", "body": self._errors.event(self._errors.body(api_error)), "more_body": False}
            )
            return
        if self._response is not None:
            await self._response(scope, receive, self._continued_send(send) if self._has_started else send)

    async def _hold(self, send: Send) -> None:
        task = asyncio.ensure_future(self._make_response())
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=self._keep_alive_s)
                if task.done():
                    break
                if not self._has_started:
                    self._has_started = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._response = task.result()
        finally:
            task.cancel()

    def _continued_send(self, send: Send) -> Send:
        """Returns a `send` that continues the started response; an error document becomes an event."""
        is_error = False

        async def forward(message: Message) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] != 200
            elif is_error:
                await send({**message, "body": self._errors.event(message.get("body", b""))})
            else:
                await send(message)

        return forward
