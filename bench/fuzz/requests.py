"""Mutated requests, sent to the API server in this process as ASGI messages."""

import asyncio
import io
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz.bodies import BODIES, GETS, HEADERS, STORED, UPLOADS
from bench.fuzz.mutations import TEXTS, encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.fields import ERRORS
from phalanx_frontend.limits import Limits
from phalanx_router.batches.records import INPUT, FileRecord, Owner
from phalanx_router.batches.routes import batch_routes
from phalanx_router.batches.store import BatchStore
from phalanx_runtime.server.http.adapters import AdapterFolders, adapter_routes
from tests.frontend.fakes import FakeBackend, Step, seeded_script, tiny_assets, token_deltas

MAX_BODY_BYTES = 200_000
MAX_ERROR_BYTES = 20_000
"""A message of 1,000 characters, each an escaped surrogate pair, and the rest."""
MAX_OUTPUT_TOKENS = 6
MAX_STORED_BYTES = 60_000
RENEWED_CASES = 500
"""After these the server has one file and no batch again: cases delete it, and fill the limit."""
DOCUMENTED_503 = {"not_ready"}
"""Codes of docs/errors.md that the backend of these runs may send with 503."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. `pieces`: the body as it arrives."""

    method: str
    path: bytes
    headers: list[tuple[bytes, bytes]]
    pieces: list[bytes]
    query: bytes = b""
    leaves: bool = False
    """The client disconnects after its request."""


@dataclass(slots=True)
class Reply:
    """What the server sends."""

    status: int = 0
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


def short_script(request: wire.Request) -> Iterable[Step]:
    """Answers with a few tokens, whatever max_tokens is."""
    if request.pooling is not None:
        return seeded_script(request)
    count = max(1, min(request.sampling.max_tokens, MAX_OUTPUT_TOKENS))
    return token_deltas([3 + (len(request.prompt) + index) % 250 for index in range(count)], "length")


def make_app(folder: Path) -> Any:
    """Returns an API server over a backend that answers at once, with the routes of a router and of a runtime alone.

    `folder`: of files and batches, of which none runs, and of adapters, of which none can be loaded.
    """
    backend = FakeBackend(script=short_script, assets=tiny_assets(max_model_len=512))
    app = create_app(backend, limits=Limits(max_body_bytes=MAX_BODY_BYTES))
    app.include_router(batch_routes(renewed_store(folder)), responses=ERRORS)
    engine: Any = _AdapterEngine(backend)
    app.include_router(adapter_routes(engine, AdapterFolders(folder, max_rank=8)), responses=ERRORS)
    return app, backend


def renewed_store(folder: Path) -> BatchStore:
    """Returns a store with `STORED` alone. Stores that are open on the folder have no other files then, too."""
    store = BatchStore(folder, MAX_STORED_BYTES)
    for path in [*(folder / "files").iterdir(), *(folder / "batches").iterdir()]:
        path.unlink()
    file = FileRecord(id=STORED, owner=Owner(), filename="a", purpose=INPUT, bytes=1, created_at=0, expires_at=2**40)
    store.add_file(file, io.BytesIO(b"x"))
    return store


class _AdapterEngine:
    """What the routes of adapters ask of an engine that has none."""

    def __init__(self, backend: FakeBackend) -> None:
        self.assets = backend.assets
        self.adapters = self

    def unload(self, name: str) -> bool:
        return False


def draw_request(draw: Random) -> Request:
    """Returns a request that is valid or wrong in some ways."""
    headers = {"content-type": b"application/json"}
    for name in draw.sample(list(HEADERS), draw.choice((0, 0, 0, 1, 3))):
        headers[name] = draw.choice(HEADERS[name])
    encoded = [(name.encode(), value) for name, value in headers.items()]
    query = draw.choice((b"", b"", b"", b"a=b&%ff=%00&stream=true", b"%ff" * 20))
    if draw.random() < 0.07:
        method = draw.choice(("GET", "GET", "HEAD", "OPTIONS", "POST", "DELETE", "TRACE", "X" * 50))
        address, _, own_query = draw.choice(GETS).encode().partition(b"?")
        return Request(method, address, encoded, [], own_query or query)
    path = draw.choice(list(BODIES))
    body = _draw_body(draw, path)
    if path == UPLOADS and draw.random() < 0.9:
        encoded, body = [(b"content-type", b"multipart/form-data; boundary=x")], _draw_form(draw, body)
    at = sorted(draw.randrange(len(body) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
    pieces = [body[start:end] for start, end in zip([0, *at], [*at, len(body)], strict=True)]
    method = "POST" if draw.random() < 0.98 else draw.choice(("PUT", "GET", "PATCH", "post", "\0"))
    shown = path.encode() if draw.random() < 0.98 else mutate_bytes(draw, path.encode())
    return Request(method, shown, encoded, pieces, query, leaves=draw.random() < 0.03)


def _draw_body(draw: Random, path: str) -> bytes:
    document = mutate_document(draw, deepcopy(draw.choice(BODIES[path])), draw.choice((0, 1, 1, 1, 2, 3, 5)))
    body = encode_document(document)
    if draw.random() < 0.1:
        body = mutate_bytes(draw, body)
    if draw.random() < 0.01:
        body = body.replace(b'"once', json.dumps("x" * draw.choice((1000, 100_000, MAX_BODY_BYTES)))[:-1].encode())
    if draw.random() < 0.02:
        body = body.replace(b'"once', json.dumps(draw.choice(TEXTS))[:-1].encode())
    return body


def _draw_form(draw: Random, content: bytes) -> bytes:
    """Returns the form of an upload, at times with damaged bytes."""
    purpose = draw.choice(("batch", "batch", "batch", "fine-tune", "", "\ud800"))
    parts = [b'name="purpose"\r\n\r\n' + purpose.encode(errors="surrogatepass")]
    parts.append(b'name="file"; filename="%s"\r\n\r\n%s' % (draw.choice((b"a.jsonl", b"../a", b"\xff", b"x" * 999)), content))
    form = b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n" % part for part in parts) + b"--x--\r\n"
    return mutate_bytes(draw, form) if draw.random() < 0.4 else form


class Requests(Target):
    """An API server in this process, called without HTTP."""

    def __init__(self, folder: Path) -> None:
        self._app, self._backend = make_app(folder)
        self._folder, self._num_cases = folder, 0
        self._runner = asyncio.Runner()
        self._waiting: asyncio.Queue[tuple[Request, asyncio.Future[Reply]]] = asyncio.Queue()
        self._server = self._runner.get_loop().create_task(self._serve())

    def run(self, draw: Random) -> Outcome:
        """Sends one request."""
        self._num_cases += 1
        if not self._num_cases % RENEWED_CASES:
            renewed_store(self._folder)
        request, loop = draw_request(draw), self._runner.get_loop()
        answered: asyncio.Future[Reply] = loop.create_future()
        self._waiting.put_nowait((request, answered))
        reply = loop.run_until_complete(answered)
        self._backend.requests.clear()
        return judge(request, reply)

    def close(self) -> None:
        """Closes the event loop."""
        self._runner.close()

    async def _serve(self) -> None:
        """Sends all requests in one task: anyio ends its threads with the task that started them."""
        while True:
            request, answered = await self._waiting.get()
            try:
                answered.set_result(await self._send(request))
            except BaseException as error:  # Rust's panics are no Exception
                if isinstance(error, asyncio.CancelledError):
                    raise
                answered.set_exception(error)

    async def _send(self, request: Request) -> Reply:
        reply, waiting = Reply(), list(request.pieces) or [b""]
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}
            if not request.leaves:
                await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                if reply.status:
                    raise Defect("two responses")
                reply.status, reply.headers = message["status"], dict(message["headers"])
            else:
                reply.body += message.get("body", b"")
                if not message.get("more_body"):
                    ended.set()

        await self._app(scope_of(request), receive, send)
        return reply


def scope_of(request: Request) -> dict[str, Any]:
    """Returns the ASGI scope, as uvicorn makes it."""
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": request.path.decode("latin-1"), "raw_path": request.path, "query_string": request.query, "root_path": "",
        "headers": request.headers, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80),
    }  # fmt: skip


def judge(request: Request, reply: Reply) -> Outcome:
    """Returns whether the server accepted the request. Raises Defect for an undocumented answer."""
    shown = f"{request.method} {request.path!r} {b''.join(request.pieces)[:300]!r} -> {reply.status} {reply.body[:200]!r}"
    if not reply.status:
        if request.leaves:
            return "refused"
        raise Defect(f"no response: {shown}")
    if reply.status < 400:
        if b"internal_error" in reply.body:
            raise Defect(f"an error inside a response: {shown}")
        return "accepted"
    if b"text/plain" in reply.headers.get(b"content-type", b"") and request.path in (
        b"/health",
        b"/healthz",
        b"/ping",
        b"/readyz",
    ):
        return "refused"
    error = _error_of(reply.body) if request.method != "HEAD" else {"message": "", "code": None}
    if reply.status >= 500 and not (reply.status == 503 and error and error.get("code") in DOCUMENTED_503):
        raise Defect(shown)
    if error is None or len(reply.body) > MAX_ERROR_BYTES or {"message", "type", "param", "code"} - {*error, "type", "param"}:
        raise Defect(f"no error in OpenAI's form: {shown}")
    return "refused"


def _error_of(body: bytes) -> dict[str, Any] | None:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return error if isinstance(error, dict) else None
