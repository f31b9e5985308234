"""Files and batches in a folder, which several routers may share.

    files/ID.json, files/ID.data          a file and its content
    batches/ID.json                       a batch; its runner writes it
    batches/ID.input                      link to the content of its input, so that the file may be deleted
    batches/ID.lock                       locked by the runner
    batches/ID.cancel                     exists once a client asked to cancel
    batches/ID.output, batches/ID.errors  lines of answers, which become files at the end

A record is replaced by a rename, so a reader sees the former or the new one, also after a crash.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from phalanx_router.batches.disk import ANSWER_S, DiskThreads
from phalanx_router.batches.records import OUTPUT, BatchRecord, FileRecord, Owner

LIFETIME_S = 30 * 24 * 3600
"""Of a file, and of a batch after its end."""
LEFTOVER_S = 3600.0
"""After this, what has no record is of an upload or a new batch that a crash ended."""
COPY_BYTES = 1 << 20
RECORD_BYTES = 4096
"""Counted of a record, so that the limit bounds their number, too."""
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_CONTENTS = frozenset({".data", ".input", ".output", ".errors"})
_COUNTED = _CONTENTS | {".json"}
_OWNED = _CONTENTS | {".lock", ".cancel"}
"""Of a record."""
T = TypeVar("T")


class StoreFull(Exception):
    """The files would exceed the limit, or those of a tenant half of it."""


class _Owned(msgspec.Struct):
    """Part of both records."""

    owner: Owner


class AnswersLost(Exception):
    """The answers of a batch are not in its folder."""


class BatchStore:
    """Files and batches. All methods use the disk: call them in a thread.

    threads: for calls of clients.
    """

    def __init__(self, folder: Path, max_bytes: int, *, leftover_s: float = LEFTOVER_S, answer_s: float = ANSWER_S) -> None:
        """Creates the folder. leftover_s: age of what crashes left. answer_s: see `DiskThreads`. Raises OSError."""
        self.threads = DiskThreads(answer_s)
        self._files, self._batches = folder / "files", folder / "batches"
        self._max_bytes = max_bytes
        self._leftover_s = leftover_s
        self._reserved = Counter[str]()
        """Bytes of uploads in progress, by tenant."""
        self._reserving = threading.Lock()
        self._tenants = dict[str, str]()
        """By id of a file or batch."""
        for path in (self._files, self._batches):
            path.mkdir(parents=True, exist_ok=True)

    def add_file(self, record: FileRecord, content: BinaryIO) -> FileRecord:
        """Stores a file with the size in its record. Raises StoreFull or OSError, and then keeps nothing."""
        path = self.content(record.id)
        with self._room_for(record.owner, record.bytes + RECORD_BYTES):
            try:
                with path.open("wb") as data:
                    shutil.copyfileobj(content, data, COPY_BYTES)
                    _sync(data)
                _write(self._files / f"{record.id}.json", record)
                return record
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    @contextmanager
    def _room_for(self, owner: Owner, size: int) -> Iterator[None]:
        """Reserves bytes. Raises StoreFull."""
        with self._reserving:
            used = self._usage() + self._reserved
            why = "delete some, or wait until they expire"
            if used.total() + size > self._max_bytes:
                raise StoreFull(f"all files and batches have at most {self._max_bytes} bytes: {why}")
            if owner.has_keys and used[owner.tenant] + size > self._max_bytes // 2:
                raise StoreFull(f"the files and batches of a tenant have at most {self._max_bytes // 2} bytes: {why}")
            self._reserved[owner.tenant] += size
        try:
            yield
        finally:
            with self._reserving:
                self._reserved[owner.tenant] -= size

    def used_bytes(self) -> int:
        """Returns the bytes of all contents and records; a content and its links count once."""
        with self._reserving:
            return self._usage().total()

    def _usage(self) -> Counter[str]:
        """Returns the bytes by tenant; those without a record are of the tenant without a name."""
        sizes: dict[tuple[int, int], tuple[str, int]] = {}
        for path in (*self._files.iterdir(), *self._batches.iterdir()):
            with suppress(FileNotFoundError):
                if path.suffix in _COUNTED:
                    status = path.stat()
                    size = RECORD_BYTES if path.suffix == ".json" else status.st_size
                    sizes[status.st_dev, status.st_ino] = path.stem, size
        known, self._tenants = self._tenants, {}
        used = Counter[str]()
        for id, size in sizes.values():
            if (tenant := known[id] if id in known else self._tenant(id)) is not None:
                self._tenants[id] = tenant
            used[tenant or ""] += size
        return used

    def _tenant(self, id: str) -> str | None:
        folder = self._batches if id.startswith("batch_") else self._files
        record = _read(folder / f"{id}.json", _Owned)
        return None if record is None else record.owner.tenant

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

    def opened(self, id: str) -> BinaryIO:
        """Returns a file's content to read. Raises FileNotFoundError."""
        return self.content(id).open("rb")

    def delete_file(self, id: str) -> None:
        """Deletes a file; batches keep its content."""
        for suffix in ("json", "data"):
            (self._files / f"{id}.{suffix}").unlink(missing_ok=True)

    def add_batch(self, record: BatchRecord) -> None:
        """Stores a new batch and a link to its input. Raises FileNotFoundError without that, StoreFull or OSError."""
        path, content = self.lines(record.id, "input"), self.content(record.input_file_id)
        with self._room_for(record.owner, RECORD_BYTES):
            try:
                _link(content, path)
                self.save(record)
            except BaseException:
                for left in (self._batches / f"{record.id}.json", path):
                    left.unlink(missing_ok=True)
                raise

    def batch(self, id: str, tenant: str) -> BatchRecord | None:
        """Returns a batch of this tenant, as clients see it."""
        record = self.stored(id) if _ID.fullmatch(id) else None
        return self._shown(record) if record is not None and record.owner.tenant == tenant else None

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Returns the batches of a tenant, as clients see them."""
        return [self._shown(record) for record in _all(self._batches, BatchRecord) if record.owner.tenant == tenant]

    def _shown(self, record: BatchRecord) -> BatchRecord:
        cancelling_at = self.cancelling_at(record.id) if record.status in ("validating", "in_progress") else None
        if cancelling_at is None:
            return record
        return msgspec.structs.replace(record, status="cancelling", cancelling_at=cancelling_at)

    def unknown(self, known: Container[str]) -> list[BatchRecord]:
        """Returns the batches without those with known ids. Raises OSError if the folder is lost."""
        ids = [entry.name.removesuffix(".json") for entry in os.scandir(self._batches) if entry.name.endswith(".json")]
        records = [self.stored(id) for id in ids if id not in known]
        return [record for record in records if record is not None]

    def stored(self, id: str) -> BatchRecord | None:
        """Returns the record of a batch."""
        return _read(self._batches / f"{id}.json", BatchRecord)

    def save(self, record: BatchRecord) -> None:
        """Stores a batch."""
        _write(self._batches / f"{record.id}.json", record)

    def cancel(self, id: str) -> None:
        """Asks the runner of a batch to end it."""
        with suppress(FileExistsError):  # the first time counts
            (self._batches / f"{id}.cancel").touch(exist_ok=False)

    def cancelling_at(self, id: str) -> int | None:
        """Returns when a client asked to cancel the batch."""
        try:
            return int((self._batches / f"{id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def lock(self, id: str) -> BinaryIO | None:
        """Returns a file that keeps other routers from the batch until it is closed; null if another one has it.

        Raises OSError on a file system without locks.
        """
        file = (self._batches / f"{id}.lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise

    def lines(self, id: str, kind: str) -> Path:
        """Returns the path of lines of a batch. kind: `input`, `output` or `errors`."""
        return self._batches / f"{id}.{kind}"

    def has_lines(self, id: str, kind: str) -> bool:
        """Whether a batch has lines of this kind."""
        path = self.lines(id, kind)
        return path.exists() and path.stat().st_size > 0

    def publish(self, batch: BatchRecord, kind: str, file_id: str, now: int) -> None:
        """Makes a file of a batch's answers. A further call changes nothing. Raises AnswersLost or OSError.

        The record comes first: a content without one is deleted as a leftover.
        """
        path, content = self.lines(batch.id, kind), self.content(file_id)
        size = _size(path)
        is_moved = size is None  # by a runner that was lost
        if is_moved and (size := _size(content)) is None:
            raise AnswersLost(f"the file of the {kind} lines is missing")
        record = FileRecord(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=OUTPUT,
            bytes=size or 0,
            created_at=now,
            expires_at=now + LIFETIME_S,
        )
        _write(self._files / f"{file_id}.json", record)
        if not is_moved:
            os.replace(path, content)
            _sync_folder(self._files)

    def expire(self, now: int) -> None:
        """Deletes files and ended batches of which the lifetime is over, and what crashes left."""
        for file in _all(self._files, FileRecord):
            if file.expires_at <= now:
                self.delete_file(file.id)
        named: set[str | None] = set()
        for batch in _all(self._batches, BatchRecord):
            ended = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
            if ended is None:
                named |= {batch.output_file_id, batch.error_file_id}
            elif ended + LIFETIME_S <= now:
                for path in self._batches.glob(f"{batch.id}.*"):
                    path.unlink(missing_ok=True)
            else:
                self.lines(batch.id, "input").unlink(missing_ok=True)
        self._delete_leftovers(named)

    def _delete_leftovers(self, named: Container[str | None]) -> None:
        """named: files that a batch is about to publish."""
        for path in (*self._files.iterdir(), *self._batches.iterdir()):
            has_no_record = path.suffix in _OWNED and not path.with_suffix(".json").exists() and path.stem not in named
            with suppress(FileNotFoundError):
                # The time of the last change of the inode: a link or a rename keeps that of the content.
                if (has_no_record or path.suffix == ".new") and time.time() - path.stat().st_ctime > self._leftover_s:
                    path.unlink()


def _link(content: Path, path: Path) -> None:
    """Raises FileNotFoundError without the content."""
    try:
        os.link(content, path)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(content, path)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    written = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    with written.open("wb") as file:
        file.write(msgspec.json.encode(record))
        _sync(file)
    os.replace(written, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _all(folder: Path, kind: type[T]) -> Iterator[T]:
    return (record for path in folder.glob("*.json") if (record := _read(path, kind)) is not None)
