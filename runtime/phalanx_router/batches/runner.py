"""Runs batches: one task each, the lines as slots become free. Another router continues a batch whose runner is lost."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec.structs import replace

from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_frontend.auth.caller import PRIORITIES, Caller
from phalanx_router.batches.lines import InputLine, answer_line, answered_ids, check_lines, failure_line, read_lines
from phalanx_router.batches.local_call import Call, LocalAnswer
from phalanx_router.batches.records import FINAL, BatchRecord, Problem
from phalanx_router.batches.slots import Slots
from phalanx_router.batches.store import BatchStore

log = logging.getLogger(__name__)

SCAN_S = 2.0
"""Between two looks for batches to run, and between two stored counts of a batch."""
EXPIRE_S = 3600.0
RETRIED = frozenset({429, 502, 503, 504})
"""Statuses after which a request is sent again."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
INTERRUPTED_S = 30.0
"""Before a batch continues after an error of its storage."""
MAX_OPEN_LINES = 256
"""Lines of a batch that wait for a slot, an answer or the next try."""
LOWEST_PRIORITY = PRIORITIES[-1]


class BatchRunner:
    """Runs all batches of a store that no other router runs.

    now: Unix seconds. is_leaving: whether this router shuts down, so that another one is to run its batches.
    """

    def __init__(
        self,
        store: BatchStore,
        call: Call,
        slots: Slots,
        *,
        now: Callable[[], float] = time.time,
        scan_s: float = SCAN_S,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._call = call
        self._slots = slots
        self._now = now
        self._scan_s = scan_s
        self._is_leaving = is_leaving
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        """Batches that this router runs."""
        return len(self._running)

    async def run(self) -> None:
        """Runs batches until the router leaves; their requests are then aborted, and sent again by the next runner."""
        granting = asyncio.create_task(self._slots.run())
        expire_s = 0.0
        try:
            while not self._is_leaving():
                try:
                    if self._now() >= expire_s:
                        expire_s = self._now() + EXPIRE_S
                        await asyncio.to_thread(self._store.expire, int(self._now()))
                    await self._start_batches()
                except OSError as error:  # clients get a 500 meanwhile
                    log.error("the files of batches cannot be read", extra={"why": str(error)})
                await asyncio.sleep(self._scan_s)
        finally:
            tasks = [granting, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_batches(self) -> None:
        for batch in sorted(await asyncio.to_thread(self._store.batches), key=lambda batch: batch.created_at):
            if batch.status in FINAL or batch.id in self._running:
                continue
            if (lock := await asyncio.to_thread(self._store.lock, batch.id)) is not None:
                self._running[batch.id] = asyncio.create_task(self._run_locked(batch.id, batch.owner.tenant, lock))

    async def _run_locked(self, id: str, tenant: str, lock: BinaryIO) -> None:
        try:
            batch = await asyncio.to_thread(self._store.batch, id, tenant)  # another router may have ended it meanwhile
            if batch is not None and batch.status not in FINAL:
                await _BatchRun(self._store, self._call, self._slots, now=self._now, save_s=self._scan_s, batch=batch).run()
        except Exception:
            log.exception("batch interrupted", extra={"batch": id})
            await asyncio.sleep(INTERRUPTED_S)
        finally:
            lock.close()
            self._running.pop(id, None)


class _BatchRun:
    """One batch."""

    def __init__(
        self,
        store: BatchStore,
        call: Call,
        slots: Slots,
        *,
        now: Callable[[], float],
        save_s: float,
        batch: BatchRecord,
    ) -> None:
        self._store = store
        self._call = call
        self._slots = slots
        self._now = now
        self._save_s = save_s
        self._batch = batch
        self._outputs: dict[str, BinaryIO] = {}
        self._is_answered = asyncio.Event()

    async def run(self) -> None:
        """Runs the batch to its end."""
        store, batch = self._store, self._batch
        path = store.content(batch.input_file_id)
        if batch.status == "validating" and not await self._validate(path):
            return
        if batch.status != "finalizing":
            await self._answer_all(path)
            await self._finalize()
        await self._publish()

    async def _answer_all(self, path: Path) -> None:
        """Answers the lines that no runner has answered."""
        with contextlib.ExitStack() as files:
            answered = set[str]()
            for kind in ("output", "errors"):
                file, ids = await asyncio.to_thread(_open_lines, self._store.lines(self._batch.id, kind))
                self._outputs[kind] = files.enter_context(file)
                self._batch = replace(self._batch, **{"completed" if kind == "output" else "failed": len(ids)})
                answered |= ids
            saving = asyncio.create_task(self._save_often())
            try:
                await self._run_lines(path, answered)
            finally:
                self._is_answered.set()
                await saving

    async def _validate(self, path: Path) -> bool:
        try:
            total, problems = await asyncio.to_thread(_check_file, path, self._batch.endpoint)
        except FileNotFoundError:
            total, problems = 0, [Problem("file_not_found", "the input file was deleted")]
        now = int(self._now())
        if problems:
            await self._save(status="failed", errors=problems, failed_at=now)
            return False
        await self._save(status="in_progress", total=total, in_progress_at=now)
        return True

    async def _run_lines(self, path: Path, answered: set[str]) -> None:
        open_lines = asyncio.Semaphore(MAX_OPEN_LINES)
        async with asyncio.TaskGroup() as tasks:
            for line in _requests(path, self._batch.endpoint):
                if line.custom_id not in answered:
                    await open_lines.acquire()
                    tasks.create_task(self._answer(line)).add_done_callback(lambda _: open_lines.release())

    async def _answer(self, line: InputLine) -> None:
        """Sends a request until it has an answer, the window ends or the batch is cancelled."""
        id, retry_s = f"batch_req_{secrets.token_hex(16)}", FIRST_RETRY_S
        while (end := await self._wait_for_slot()) is None:
            try:
                answer = await self._call(self._batch.endpoint, line.body, self._caller(id))
            finally:
                self._slots.release()
            if answer.status not in RETRIED:
                self._record_answer(line, id, answer)
                return
            await asyncio.sleep(min(max(answer.retry_after_s or 0.0, retry_s), LAST_RETRY_S))
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        self._record("errors", failure_line(id, line.custom_id, *end))

    async def _wait_for_slot(self) -> tuple[str, str] | None:
        """Waits for a slot; returns code and message if the batch ends before."""
        has_slot = False
        while (end := self._end()) is None and not has_slot:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._save_s):
                    await self._slots.acquire()
                    has_slot = True
        if has_slot and end is not None:
            self._slots.release()
        return end

    def _end(self) -> tuple[str, str] | None:
        if self._store.is_cancelled(self._batch.id):
            return "batch_cancelled", "the batch was cancelled before this request was answered"
        if self._now() >= self._batch.expires_at:
            return "batch_expired", "the completion window ended before this request was answered"
        return None

    def _record_answer(self, line: InputLine, id: str, answer: LocalAnswer) -> None:
        kind = "output" if answer.status == 200 else "errors"
        self._record(kind, answer_line(id, line.custom_id, answer.status, id, answer.body))

    def _record(self, kind: str, text: bytes) -> None:
        file = self._outputs[kind]
        file.write(text)
        file.flush()
        if kind == "output":
            self._batch = replace(self._batch, completed=self._batch.completed + 1)
        else:
            self._batch = replace(self._batch, failed=self._batch.failed + 1)

    def _caller(self, id: str) -> Caller:
        """The sender of a line: the batch's owner, at the lowest priority."""
        owner = self._batch.owner
        models = None if owner.models is None else tuple(owner.models)
        key = ApiKey(owner.tenant, priority=LOWEST_PRIORITY, models=models)
        return Caller(request_id=id, key=key, has_keys=owner.has_keys, has_random_id=True)

    async def _save_often(self) -> None:
        """Stores the counts until all lines are answered."""
        while not self._is_answered.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._save_s):
                    await self._is_answered.wait()
            await self._save()

    async def _save(self, **changes: Any) -> None:
        self._batch = replace(self._batch, **changes)
        await asyncio.to_thread(self._store.save, self._batch)

    async def _finalize(self) -> None:
        """Stores the ids of the files first, so that a further runner completes the same ones."""
        now = int(self._now())
        cancelling_at = now if self._store.is_cancelled(self._batch.id) else None
        files = {
            f"{'error' if kind == 'errors' else kind}_file_id": f"file-{secrets.token_hex(16)}"
            for kind in ("output", "errors")
            if await asyncio.to_thread(self._store.has_lines, self._batch.id, kind)
        }
        await self._save(status="finalizing", finalizing_at=now, cancelling_at=cancelling_at, **files)

    async def _publish(self) -> None:
        batch, now = self._batch, int(self._now())
        for kind, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            if file_id is not None:
                await asyncio.to_thread(self._store.publish, batch, kind, file_id, now)
        is_expired = (batch.finalizing_at or 0) >= batch.expires_at
        status = "cancelled" if batch.cancelling_at is not None else "expired" if is_expired else "completed"
        await self._save(**{"status": status, f"{status}_at": now})
        log.info("batch ended", extra={"batch": batch.id, "status": status, "completed": batch.completed, "failed": batch.failed})


def _check_file(path: Path, endpoint: str) -> tuple[int, list[Problem]]:
    with path.open("rb") as file:
        return check_lines(file, endpoint)


def _requests(path: Path, endpoint: str) -> Iterator[InputLine]:
    with path.open("rb") as file:
        yield from (line for line in read_lines(file, endpoint) if isinstance(line, InputLine))


def _open_lines(path: Path) -> tuple[BinaryIO, set[str]]:
    """Returns the file to append to, without a last line that a crash cut short, and the ids in it."""
    file = path.open("a+b")
    file.seek(0)
    ids, end = set[str](), 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        ids |= answered_ids([text])
        end += len(text)
    file.truncate(end)
    return file, ids
