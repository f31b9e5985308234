"""Runs one batch. Its files are read and written in threads, so that a slow disk delays no stream."""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from msgspec.structs import replace

from phalanx_frontend.auth.api_keys import ApiKey, Quota
from phalanx_frontend.auth.caller import PRIORITIES, Caller
from phalanx_frontend.ids import random_id
from phalanx_router.batches.disk import DiskThreads
from phalanx_router.batches.lines import InputLine, answer_line, check_file, failure_line, open_lines, requests, take
from phalanx_router.batches.local_call import Call, LocalAnswer
from phalanx_router.batches.records import BatchRecord, Problem
from phalanx_router.batches.slots import Slots
from phalanx_router.batches.store import AnswersLost, BatchStore

log = logging.getLogger(__name__)

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses after which a request is sent again."""
LAST_RETRY_S = 60.0
MAX_OPEN_LINES, MAX_OPEN_BYTES = 256, 32 << 20
"""Of a batch: lines, and bytes of them, that wait for a slot, an answer or the next try."""
LOWEST_PRIORITY = PRIORITIES[-1]
FILE_FIELDS = {"output": "output_file_id", "errors": "error_file_id"}
"""Of the record, by kind of lines."""
CANCELLED = ("batch_cancelled", "the batch was cancelled before this request was answered")
EXPIRED = ("batch_expired", "the completion window ended before this request was answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What all batches of a router share. now: Unix seconds; save_s: between two writes of answers and counts.

    first_retry_s: pause before a request is sent again, doubled each time up to `LAST_RETRY_S`. overdue_s: no request starts
    while a write takes longer. disk: of the runner. checking: one input at a time is checked. keep_quota: see `ApiKeys`.
    """

    store: BatchStore
    call: Call
    slots: Slots
    now: Callable[[], float]
    save_s: float
    first_retry_s: float = 1.0
    overdue_s: float = 10.0
    disk: DiskThreads = field(default_factory=DiskThreads)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    keep_quota: Callable[[str, Quota], None] = lambda name, quota: None


class BatchRun:
    """One batch, which this router has locked."""

    def __init__(self, parts: RunParts, batch: BatchRecord) -> None:
        self._parts = parts
        self._disk = parts.disk
        self._batch = batch
        self._tenant = batch.owner.tenant
        self._ended: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        """Code and message for the lines that are not answered."""
        self._has_expired = False
        """Whether it ended a line."""
        self._asking = asyncio.Lock()
        self._unwritten: dict[str, list[bytes]] = {kind: [] for kind in FILE_FIELDS}
        self._has_room = asyncio.Event()
        self._is_in_time = asyncio.Event()
        """Whether no write is overdue."""
        self._is_in_time.set()
        self._open_lines = self._open_bytes = 0

    async def run(self) -> None:
        """Runs the batch to its end. Raises OSError."""
        if self._batch.owner.quota is not None:
            self._parts.keep_quota(self._tenant, self._batch.owner.quota)
        if self._batch.status == "validating" and not await self._validate():
            return
        if self._batch.status != "finalizing":
            await self._answer_all()
            await self._finalize()
        await self._publish()

    async def fail(self, message: str) -> None:
        """Ends the batch because of a bug, with the answers so far."""
        if any(self._unwritten.values()):
            await self._disk.finish(self._write_rest)
        await self._finalize(errors=[Problem("internal_error", message)])
        await self._publish()

    async def _validate(self) -> bool:
        """Checks the input. Returns whether the batch is in progress; one that is cancelled or expires during it has no lines."""
        async with self._parts.checking:
            await self._look_for_end()
            total, problems = (0, []) if self._ended.done() else await self._check()
        now = int(self._parts.now())
        if self._ended.done():
            await self._finalize(is_expired=self._ended.result() == EXPIRED)
            await self._publish()
        elif problems:
            await self._save(status="failed", errors=problems, failed_at=now)
        else:
            await self._save(status="in_progress", total=total, in_progress_at=now)
        return self._batch.status == "in_progress"

    async def _check(self) -> tuple[int, list[Problem]]:
        """Returns what `check_file` does, or part of it once the batch ends."""
        path, must_stop = self._parts.store.lines(self._batch.id, "input"), threading.Event()
        checking = asyncio.ensure_future(self._disk.finish(check_file, path, self._batch.endpoint, must_stop.is_set))
        try:
            while not checking.done() and not self._ended.done():
                await asyncio.wait({checking}, timeout=self._parts.save_s)
                await self._look_for_end()
        finally:
            must_stop.set()
            await asyncio.wait({checking})
        return checking.result()

    async def _answer_all(self) -> None:
        """Answers the lines that no runner has answered."""
        with ExitStack() as opened:
            files, answered = await self._disk.finish(self._open_outputs, opened)
            await self._look_for_end()
            async with asyncio.TaskGroup() as tasks:
                saving = tasks.create_task(self._save_often(files))
                async with asyncio.TaskGroup() as lines:
                    await self._start_lines(answered, lines)
                saving.cancel()
            await self._disk.finish(self._write, files)

    def _open_outputs(self, opened: ExitStack) -> tuple[dict[str, BinaryIO], set[str]]:
        """Runs in a thread. Returns the files to append to, and the ids in them. opened: closes them."""
        files, ids = dict[str, BinaryIO](), dict[str, set[str]]()
        for kind in FILE_FIELDS:
            files[kind], ids[kind] = open_lines(self._parts.store.lines(self._batch.id, kind))
            opened.enter_context(files[kind])
        self._batch = replace(self._batch, completed=len(ids["output"]), failed=len(ids["errors"]))
        return files, ids["output"] | ids["errors"]

    async def _start_lines(self, answered: set[str], tasks: asyncio.TaskGroup) -> None:
        lines = requests(self._parts.store.lines(self._batch.id, "input"), self._batch.endpoint)
        while chunk := await self._disk.finish(take, lines):
            for line in chunk:
                if line.custom_id in answered:
                    continue
                while self._open_lines >= MAX_OPEN_LINES or self._open_bytes >= MAX_OPEN_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._open_lines, self._open_bytes = self._open_lines + 1, self._open_bytes + len(line.body)
                tasks.create_task(self._answer(line))

    async def _answer(self, line: InputLine) -> None:
        """Sends a request until it has an answer, the window ends or the batch is cancelled."""
        id, request_id = f"batch_req_{secrets.token_hex(16)}", random_id("")
        try:
            answer = await self._answered(line, request_id)
            if answer is None:
                self._has_expired |= self._ended.result() == EXPIRED
                self._record("errors", failure_line(id, line.custom_id, *self._ended.result()))
            else:
                kind = "output" if answer.status == 200 else "errors"
                self._record(kind, answer_line(id, line.custom_id, answer.status, request_id, answer.body))
        except Exception:  # a bug ends its request alone
            log.exception("a request of a batch failed", extra={"batch": self._batch.id, "request_id": request_id})
            message = f"internal error; look for {request_id} in the log of the router"
            self._record("errors", failure_line(id, line.custom_id, "internal_error", message))
        self._open_lines, self._open_bytes = self._open_lines - 1, self._open_bytes - len(line.body)
        self._has_room.set()

    async def _answered(self, line: InputLine, request_id: str) -> LocalAnswer | None:
        """Returns the answer after all tries; null if the batch ends before."""
        retry_s = self._parts.first_retry_s
        while (answer := await self._try(line, request_id)) is not None and answer.status in RETRIED:
            await asyncio.wait({self._ended}, timeout=min(max(answer.retry_after_s or 0.0, retry_s), LAST_RETRY_S))
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        return answer

    async def _try(self, line: InputLine, request_id: str) -> LocalAnswer | None:
        """Returns the answer once a slot is granted; null if the batch ends before. One line of a batch waits at a time."""
        async with self._asking:
            await self._is_in_time.wait()
            slot = self._parts.slots.ask(self._tenant)
            try:
                futures: set[asyncio.Future[Any]] = {slot, self._ended}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self._parts.slots.give_back(slot, self._tenant)
                raise
        try:
            if self._ended.done():
                return None
            return await self._parts.call(self._batch.endpoint, line.body, self._caller(request_id))
        finally:
            self._parts.slots.give_back(slot, self._tenant)

    def _caller(self, request_id: str) -> Caller:
        """The sender of a line: the batch's owner, at the lowest priority."""
        owner = self._batch.owner
        models = None if owner.models is None else tuple(owner.models)
        key = ApiKey(owner.tenant, priority=LOWEST_PRIORITY, models=models)
        return Caller(request_id=request_id, key=key, has_keys=owner.has_keys, has_random_id=True)

    def _record(self, kind: str, text: bytes) -> None:
        self._unwritten[kind].append(text)

    async def _save_often(self, files: dict[str, BinaryIO]) -> None:
        """Writes answers and counts, and looks whether the batch is to end."""
        while True:
            await asyncio.sleep(self._parts.save_s)
            overdue = asyncio.get_running_loop().call_later(self._parts.overdue_s, self._is_in_time.clear)
            await self._disk.finish(self._write, files)
            await self._look_for_end()
            overdue.cancel()
            self._is_in_time.set()

    async def _look_for_end(self) -> None:
        cancelling_at = await self._disk.finish(self._parts.store.cancelling_at, self._batch.id)
        is_cancelled = cancelling_at is not None
        if not self._ended.done() and (is_cancelled or self._parts.now() >= self._batch.expires_at):
            self._ended.set_result(CANCELLED if is_cancelled else EXPIRED)

    def _write(self, files: dict[str, BinaryIO]) -> None:
        """Runs in a thread, one at a time. Answers are on the disk before the counts that include them."""
        counts = {"output": self._batch.completed, "errors": self._batch.failed}
        for kind, file in files.items():
            lines, self._unwritten[kind] = self._unwritten[kind], []
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
            counts[kind] += len(lines)
        is_expired = self._batch.is_expired or self._has_expired
        self._batch = replace(self._batch, completed=counts["output"], failed=counts["errors"], is_expired=is_expired)
        self._parts.store.save(self._batch)

    def _write_rest(self) -> None:
        with ExitStack() as opened:
            self._write(self._open_outputs(opened)[0])

    async def _save(self, **changes: Any) -> None:
        self._batch = replace(self._batch, **changes)
        await self._disk.finish(self._parts.store.save, self._batch)

    async def _finalize(self, **changes: Any) -> None:
        """Stores the ids of the files first, so that a further runner completes the same ones."""
        await self._look_for_end()
        now, store = int(self._parts.now()), self._parts.store
        is_cancelled = self._ended.done() and self._ended.result() == CANCELLED
        files = {
            name: f"file-{secrets.token_hex(16)}"
            for kind, name in FILE_FIELDS.items()
            if await self._disk.finish(store.has_lines, self._batch.id, kind)
        }
        cancelling_at = await self._disk.finish(store.cancelling_at, self._batch.id) if is_cancelled else None
        await self._save(status="finalizing", finalizing_at=now, cancelling_at=cancelling_at, **files, **changes)

    async def _publish(self) -> None:
        batch, now = self._batch, int(self._parts.now())
        lost: dict[str, Any] = {"errors": batch.errors}
        for kind, name in FILE_FIELDS.items():
            if (file_id := getattr(batch, name)) is None:
                continue
            try:
                await self._disk.finish(self._parts.store.publish, batch, kind, file_id, now)
            except AnswersLost as error:
                lost |= {name: None, "errors": [*lost["errors"], Problem("answers_lost", str(error))]}
        ended = "cancelled" if batch.cancelling_at is not None else "expired" if batch.is_expired else "completed"
        status = "failed" if lost["errors"] else ended
        await self._save(**lost, **{"status": status, f"{status}_at": now})
        log.info("batch ended", extra={"batch": batch.id, "status": status, "completed": batch.completed, "failed": batch.failed})
