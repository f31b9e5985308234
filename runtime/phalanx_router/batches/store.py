"""Files and batches in a folder, which several routers may share.

    files/ID.json, files/ID.data          a file and its content
    batches/ID.json                       a batch; its runner writes it
    batches/ID.lock                       locked by the runner
    batches/ID.cancel                     exists once a client asked to cancel
    batches/ID.output, batches/ID.errors  lines of answers, which become files at the end

A record is replaced by a rename, so a reader sees the former or the new one, also after a crash.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from phalanx_router.batches.records import OUTPUT, BatchRecord, FileRecord

LIFETIME_S = 30 * 24 * 3600
"""Of a file, and of a batch after its end."""
COPY_BYTES = 1 << 20
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
T = TypeVar("T")


class StoreFull(Exception):
    """The files would exceed the limit."""


class BatchStore:
    """Files and batches. All methods use the disk: call them in a thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Creates the folder. Raises OSError."""
        self._files, self._batches = folder / "files", folder / "batches"
        self._max_bytes = max_bytes
        for path in (self._files, self._batches):
            path.mkdir(parents=True, exist_ok=True)

    def add_file(self, record: FileRecord, content: BinaryIO) -> FileRecord:
        """Stores a file; returns its record with the size. Raises StoreFull or OSError, and then keeps nothing."""
        path, left = self._files / f"{record.id}.data", self._max_bytes - self.used_bytes()
        try:
            with path.open("wb") as data:
                while piece := content.read(COPY_BYTES):
                    left -= len(piece)
                    if left < 0:
                        raise StoreFull(
                            f"files have at most {self._max_bytes} bytes in all: delete some, or wait until they expire"
                        )
                    data.write(piece)
                os.fsync(data.fileno())
            stored = msgspec.structs.replace(record, bytes=path.stat().st_size)
            _write(self._files / f"{record.id}.json", stored)
            return stored
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def used_bytes(self) -> int:
        """Returns the bytes of all contents."""
        sizes = 0
        for path in (*self._files.glob("*.data"), *self._batches.glob("*.output"), *self._batches.glob("*.errors")):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def file(self, id: str, tenant: str) -> FileRecord | None:
        """Returns a file of this tenant."""
        record = _read(self._files / f"{id}.json", FileRecord) if _ID.fullmatch(id) else None
        return record if record is not None and record.owner.tenant == tenant else None

    def files(self, tenant: str) -> list[FileRecord]:
        """Returns the files of a tenant."""
        return [record for record in _all(self._files, FileRecord) if record.owner.tenant == tenant]

    def content(self, id: str) -> Path:
        """Returns the path of a file's content."""
        return self._files / f"{id}.data"

    def delete_file(self, id: str) -> None:
        """Deletes a file; a batch that reads it continues."""
        for suffix in ("json", "data"):
            (self._files / f"{id}.{suffix}").unlink(missing_ok=True)

    def batch(self, id: str, tenant: str) -> BatchRecord | None:
        """Returns a batch of this tenant."""
        record = self._shown(_read(self._batches / f"{id}.json", BatchRecord)) if _ID.fullmatch(id) else None
        return record if record is not None and record.owner.tenant == tenant else None

    def batches(self, tenant: str | None = None) -> list[BatchRecord]:
        """Returns the batches of a tenant, or all."""
        records = (self._shown(record) for record in _all(self._batches, BatchRecord))
        return [record for record in records if record is not None and tenant in (None, record.owner.tenant)]

    def _shown(self, record: BatchRecord | None) -> BatchRecord | None:
        is_running = record is not None and record.status in ("validating", "in_progress")
        if record is None or not is_running or not self.is_cancelled(record.id):
            return record
        return msgspec.structs.replace(record, status="cancelling")

    def save(self, record: BatchRecord) -> None:
        """Stores a batch."""
        _write(self._batches / f"{record.id}.json", record)

    def cancel(self, id: str) -> None:
        """Asks the runner of a batch to end it."""
        (self._batches / f"{id}.cancel").touch()

    def is_cancelled(self, id: str) -> bool:
        """Whether a client asked to cancel the batch."""
        return (self._batches / f"{id}.cancel").exists()

    def lock(self, id: str) -> BinaryIO | None:
        """Returns a file that keeps other routers from the batch until it is closed; null if another one has it."""
        file = (self._batches / f"{id}.lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            file.close()
            return None

    def lines(self, id: str, kind: str) -> Path:
        """Returns the path of a batch's answers. kind: `output` or `errors`."""
        return self._batches / f"{id}.{kind}"

    def has_lines(self, id: str, kind: str) -> bool:
        """Whether a batch has answers of this kind."""
        path = self.lines(id, kind)
        return path.exists() and path.stat().st_size > 0

    def publish(self, batch: BatchRecord, kind: str, file_id: str, now: int) -> None:
        """Makes a file of a batch's answers. A further call changes nothing."""
        path, content = self.lines(batch.id, kind), self.content(file_id)
        with suppress(FileNotFoundError):  # moved by a runner that was lost
            os.replace(path, content)
        record = FileRecord(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=OUTPUT,
            bytes=content.stat().st_size,
            created_at=now,
            expires_at=now + LIFETIME_S,
        )
        _write(self._files / f"{file_id}.json", record)

    def expire(self, now: int) -> None:
        """Deletes files and ended batches of which the lifetime is over."""
        for file in _all(self._files, FileRecord):
            if file.expires_at <= now:
                self.delete_file(file.id)
        for batch in _all(self._batches, BatchRecord):
            ended = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
            if ended is not None and ended + LIFETIME_S <= now:
                for path in self._batches.glob(f"{batch.id}.*"):
                    path.unlink(missing_ok=True)


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    written = path.with_suffix(".new")
    with written.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _all(folder: Path, kind: type[T]) -> Iterator[T]:
    return (record for path in folder.glob("*.json") if (record := _read(path, kind)) is not None)
