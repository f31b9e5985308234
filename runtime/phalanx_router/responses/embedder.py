"""Embeddings of questions, by the groups of this service or by another InferenceService. A failure is a result, not an error."""

import asyncio
import base64
import logging
import os
import re
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
import msgspec

from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.embedding.embeddings import shaped
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_frontend.stream.response_cache import QuestionModel
from phalanx_router.backend import RouterBackend
from phalanx_router.routing import vector_index

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Longest wait of a request for the embedding of its question."""
LOAD_TIMEOUT_S = 5.0
"""Longest wait for the libraries of vectors, which other work in threads may hold up."""
PAUSE_S = 5.0
"""Time without embeddings after a failure, so that not every request waits for a group or service that does not answer."""
MAX_CONCURRENT = 32
MAX_BODY_BYTES = 1 << 20
NO_EMBEDDINGS = "no_embeddings"
OF_THE_TEXT = frozenset(("context_length_exceeded", "unknown_revision"))
"""Failures that say nothing about later texts."""
_CODE = re.compile("[a-z_]{1,40}")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A packed vector. Those of one `space` may be compared."""

    vector: bytes
    space: str


@dataclass(frozen=True, slots=True)
class NotEmbedded:
    """Why there is no vector, as a code for metrics."""

    why: str


class EmbedderFailed(Exception):
    """The embedder gives no vector. The text is a code."""


class _Vector(msgspec.Struct, frozen=True):
    embedding: str


class _Response(msgspec.Struct, frozen=True):
    data: list[_Vector]
    model: str


class _ErrorCode(msgspec.Struct, frozen=True):
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorCode = _ErrorCode()


def load_index() -> None:
    """Imports the libraries of vectors, in tenths of a second."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy starts a thread per core of the node
    vector_index.load()


class QuestionEmbedder:
    """Embeds texts within bounds of time and number."""

    def __init__(
        self,
        backend: RouterBackend,
        show_failure: Callable[[str], None],
        clock: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """`show_failure` receives the reason of a failure that concerns later questions too, and empty text when it has ended."""
        self._backend = backend
        self._show_failure = show_failure
        self._clock = clock
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._is_loaded = False
        self._num_running = 0
        self._paused_until = 0.0
        self._failure = ""
        self._http: aiohttp.ClientSession | None = None

    async def embed(self, text: str, model: QuestionModel, address: str, *, is_question: bool) -> Embedded | NotEmbedded:
        """Returns the vector of a question or of another text. `address`: of the service that embeds; empty: the own groups."""
        if self._clock() < self._paused_until:
            return NotEmbedded("paused")
        if self._num_running >= MAX_CONCURRENT or (not address and len(self._backend.dispatcher.queue)):
            return NotEmbedded("busy")
        self._num_running += 1
        try:
            if not self._is_loaded:  # once; the thread that the policy has started may be at it
                async with asyncio.timeout(self._load_timeout_s):
                    await asyncio.to_thread(load_index)
                self._is_loaded = True
            async with asyncio.timeout(self._timeout_s):
                embedded = await (self._ask(text, address) if address else self._compute(text, model, is_question))
        except Exception as error:
            return self._failed(error)
        finally:
            self._num_running -= 1
        self._report("")
        return embedded

    def reset(self) -> None:
        """Forgets failures, as no text will be embedded for a while."""
        self._paused_until = 0.0
        if self._failure:
            self._failure = ""
            self._show_failure("")

    async def close(self) -> None:
        """Closes connections."""
        if self._http is not None:
            await self._http.close()

    def _failed(self, error: Exception) -> NotEmbedded:
        match error:
            case ApiError() | BackendError():
                why = error.code or "failed"
            case EmbedderFailed():
                why = str(error)
            case TimeoutError():
                why = "timeout"
            case aiohttp.ClientError() | OSError() | msgspec.MsgspecError() | ValueError():
                why = "unreachable"
            case _:
                log.exception("no embedding of a question", exc_info=error)
                why = "failed"
        if why in OF_THE_TEXT:
            return NotEmbedded(why)
        if why != NO_EMBEDDINGS:  # which costs no wait
            self._paused_until = self._clock() + PAUSE_S
        self._report(why)
        return NotEmbedded(why)

    def _report(self, why: str) -> None:
        if why == self._failure:
            return
        if why:
            log.warning("similar requests are not found: no embeddings", extra={"why": why})
        else:
            log.info("similar requests are found again")
        self._failure = why
        self._show_failure(why)

    async def _compute(self, text: str, model: QuestionModel, is_question: bool) -> Embedded:
        """Raises ApiError, BackendError, EmbedderFailed."""
        request = await model.pooled(text, is_question=is_question)
        async with aclosing(self._backend.generate(request, is_exempt=True)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if isinstance(delta, Delta) and delta.finish is not None:
                    revision = self._backend.revision_of(request)
                    if not delta.vector:
                        break
                    if not revision:
                        raise EmbedderFailed("unknown_revision")
                    return _packed(delta.vector, f"{revision} {request.pooling} {prepare('') if is_question else ''}")
        raise EmbedderFailed("no_vector")

    async def _ask(self, text: str, address: str) -> Embedded:
        """Raises EmbedderFailed, and errors of aiohttp and msgspec."""
        if self._http is None:
            self._http = aiohttp.ClientSession()
        body = {"input": text, "encoding_format": "base64"}
        async with self._http.post(f"http://{address}/v1/embeddings", json=body) as response:
            content = await _read(response.content)
            if response.status != 200:
                raise EmbedderFailed(_error_code(content) or f"status_{response.status}")
        answer = msgspec.json.decode(content, type=_Response)
        return _packed(base64.b64decode(answer.data[0].embedding), f"{address} {answer.model}")


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Returns a whole body: one call of `read` returns what has arrived. Raises EmbedderFailed if it is too long."""
    content = bytearray()
    async for part in stream.iter_any():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise EmbedderFailed("long_response")
    return bytes(content)


def _packed(vector: bytes, space: str) -> Embedded:
    """`vector`: little-endian float32. Raises EmbedderFailed, ValueError."""
    numbers: array[float] = shaped(vector, len(vector) // 4, False)
    packed = vector_index.packed(numbers)
    if packed is None:
        raise EmbedderFailed("no_direction")
    return Embedded(packed, f"{space} {len(numbers)}")


def _error_code(content: bytes) -> str | None:
    """The code of a Phalanx service, which is one of few; null for other bodies."""
    try:
        code = msgspec.json.decode(content, type=_ErrorBody).error.code
    except msgspec.MsgspecError:
        return None
    return code if code is not None and _CODE.fullmatch(code) else None
