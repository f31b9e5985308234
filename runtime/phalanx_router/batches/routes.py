"""Routes of OpenAI's Files and Batch API."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Form, Query, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.openai.routes import CurrentCaller
from phalanx_router.batches.disk import DiskThreads
from phalanx_router.batches.records import ENDPOINTS, FINAL, INPUT, WINDOW, WINDOW_S, BatchRecord, FileRecord, Owner, page
from phalanx_router.batches.store import COPY_BYTES, LIFETIME_S, BatchStore, StoreFull

MAX_NAME_CHARS = 256
MAX_METADATA = 16
MAX_UNFINISHED = 100
"""Batches of a tenant."""
SLOW_BYTES = 16 << 20
"""Of an upload, that a slow disk stores in the time of an answer."""
Limit = Annotated[int, Query(ge=1, le=10_000)]


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=MAX_METADATA
    )


def batch_routes(store: BatchStore, now: Callable[[], float] = time.time) -> APIRouter:
    """Builds the routes. now: Unix seconds."""
    routes = APIRouter(tags=["batches"])
    routes.include_router(_file_routes(store, now))

    @routes.post("/v1/batches")
    async def create(body: BatchBody, caller: CurrentCaller) -> dict[str, Any]:
        """Starts a batch of the requests in a file."""
        return (await _create(store, body, caller, int(now()))).shown()

    @routes.get("/v1/batches")
    async def batches(caller: CurrentCaller, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """The batches of the caller's tenant, the newest first."""
        return page(await store.threads.answer(store.batches, _tenant(caller)), after, min(limit, 100))

    @routes.get("/v1/batches/{id}")
    async def batch(id: str, caller: CurrentCaller) -> dict[str, Any]:
        """One batch."""
        return (await _batch(store, id, caller)).shown()

    @routes.post("/v1/batches/{id}/cancel")
    async def cancel(id: str, caller: CurrentCaller) -> dict[str, Any]:
        """Ends a batch: requests in progress are answered, the others fail."""
        record = await _batch(store, id, caller)
        if record.status not in ("validating", "in_progress", "cancelling"):
            raise ApiError(409, f"the batch is {record.status}", code="batch_ended")
        await store.threads.answer(store.cancel, id)
        return (await _batch(store, id, caller)).shown()

    return routes


def _file_routes(store: BatchStore, now: Callable[[], float]) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/files")
    async def upload(file: UploadFile, purpose: Annotated[str, Form()], caller: CurrentCaller) -> dict[str, Any]:
        """Stores a file of requests, one JSON object per line."""
        return (await _upload(store, file, purpose, caller, int(now()))).shown()

    @routes.get("/v1/files")
    async def files(
        caller: CurrentCaller,
        purpose: str | None = None,
        after: str | None = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """The files of the caller's tenant, the newest first."""
        found = await store.threads.answer(store.files, _tenant(caller))
        shown = [file for file in found if purpose in (None, file.purpose)]
        return page(shown, after, limit, is_oldest_first=order == "asc")

    @routes.get("/v1/files/{id}")
    async def file(id: str, caller: CurrentCaller) -> dict[str, Any]:
        """One file."""
        return (await _file(store, id, caller)).shown()

    @routes.get("/v1/files/{id}/content", response_model=None)
    async def content(id: str, caller: CurrentCaller) -> Response:
        """The content of a file."""
        record = await _file(store, id, caller)
        try:
            opened = await store.threads.answer(store.opened, record.id)
        except FileNotFoundError as error:  # deleted meanwhile, or not yet moved
            raise _no_file("id") from error
        headers = {"content-length": str(record.bytes)}
        return StreamingResponse(_pieces(store.threads, opened), media_type="application/octet-stream", headers=headers)

    @routes.delete("/v1/files/{id}")
    async def delete(id: str, caller: CurrentCaller) -> dict[str, Any]:
        """Deletes a file."""
        record = await _file(store, id, caller)
        await store.threads.answer(store.delete_file, record.id)
        return {"id": record.id, "object": "file", "deleted": True}

    return routes


async def _create(store: BatchStore, body: BatchBody, caller: Caller, now: int) -> BatchRecord:
    if body.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"use one of {', '.join(ENDPOINTS)}")
    if body.completion_window != WINDOW:
        raise invalid("completion_window", f"use {WINDOW}")
    file = await _file(store, body.input_file_id, caller, "input_file_id")
    if file.purpose != INPUT:
        raise invalid("input_file_id", f"the file's purpose is {file.purpose}, not {INPUT}")
    batch = BatchRecord(
        id=f"batch_{secrets.token_hex(16)}",
        owner=_owner(caller),
        endpoint=body.endpoint,
        input_file_id=file.id,
        metadata=body.metadata or {},
        created_at=now,
        expires_at=now + WINDOW_S,
    )
    if sum(other.status not in FINAL for other in await store.threads.answer(store.batches, _tenant(caller))) >= MAX_UNFINISHED:
        message = f"at most {MAX_UNFINISHED} batches may be in progress: wait until one ends"
        raise ApiError(429, message, code="too_many_batches", retry_after_s=60.0)
    try:
        await store.threads.answer(store.add_batch, batch)
    except FileNotFoundError as error:
        raise _no_file("input_file_id") from error
    except StoreFull as error:
        raise ApiError(413, str(error), "input_file_id", "storage_full") from error
    return batch


async def _upload(store: BatchStore, file: UploadFile, purpose: str, caller: Caller, now: int) -> FileRecord:
    if purpose != INPUT:
        raise invalid("purpose", f"use {INPUT}")
    record = FileRecord(
        id=f"file-{secrets.token_hex(16)}",
        owner=_owner(caller),
        filename=(file.filename or "upload.jsonl")[:MAX_NAME_CHARS],
        purpose=INPUT,
        bytes=file.size or 0,
        created_at=now,
        expires_at=now + LIFETIME_S,
    )
    try:
        pieces = 1 + record.bytes // SLOW_BYTES
        return await store.threads.answer(store.add_file, record, file.file, pieces=pieces)
    except StoreFull as error:
        raise ApiError(413, str(error), "file", "storage_full") from error


async def _pieces(threads: DiskThreads, file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await threads.answer(file.read, COPY_BYTES):
            yield piece
    finally:
        threads.start(file.close)  # which waits for a read in progress


def _tenant(caller: Caller) -> str:
    return caller.tenant(None, None)


def _owner(caller: Caller) -> Owner:
    models, quota = (None, None) if caller.key is None else (caller.key.models, caller.key.quota)
    return Owner(_tenant(caller), None if models is None else list(models), caller.has_keys, quota)


async def _file(store: BatchStore, id: str, caller: Caller, param: str = "id") -> FileRecord:
    """Raises ApiError 404, also for a file of another tenant."""
    if (record := await store.threads.answer(store.file, id, _tenant(caller))) is None:
        raise _no_file(param)
    return record


def _no_file(param: str) -> ApiError:
    return ApiError(404, "no such file; files of other API keys are not shown", param, "file_not_found")


async def _batch(store: BatchStore, id: str, caller: Caller) -> BatchRecord:
    """Raises ApiError 404, also for a batch of another tenant."""
    if (record := await store.threads.answer(store.batch, id, _tenant(caller))) is None:
        raise ApiError(404, "no such batch; batches of other API keys are not shown", "id", "batch_not_found")
    return record
