"""Folders of the disk tier: one per identity, each owned by one process.

    root / hex digest of the identity / lock, 00000001.pages, 00000002.pages, ...

`max_bytes` bounds one identity's folder. Folders of other identities stay, so that a service that returns to a model finds its
pages. When the file system has no room for `max_bytes` at the start, or for a segment later, those that no process owns are
removed, the one unused for longest first, but for folders with a file that is not ours, and those used within UNUSED_S: they may
be of a rank that is about to start.
"""

import fcntl
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx_runtime.rank.tiers.files import Files
from phalanx_runtime.rank.tiers.segment import DIGEST_BYTES, MAGIC, VERSION, number_of

LOCK = "lock"
UNUSED_S = 3600.0
_ATTEMPTS = 10
_NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class DiskUnavailable(Exception):
    """The folder cannot be used now: another process owns it, it cannot be written, or its disk is full."""


@dataclass(frozen=True, slots=True)
class OwnedFolder:
    """A folder that this process owns until it closes `lock`."""

    path: Path
    lock: int


def identity_digest(identity: bytes, page_bytes: int) -> bytes:
    """Returns 16 bytes that differ for other identities, page sizes and versions of the format."""
    start = b"phalanx pages %d %d " % (VERSION, page_bytes)
    return hashlib.sha256(start + identity).digest()[:DIGEST_BYTES]


def own_folder(path: Path, files: Files) -> OwnedFolder:
    """Creates the folder, if needed, and owns it. Raises DiskUnavailable if another process does, OSError."""
    for _ in range(_ATTEMPTS):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = files.open(path / LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # its former owner removed the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            files.close(lock)
            raise DiskUnavailable(f"another process owns the pages in {path}") from error
        except OSError:
            files.close(lock)
            raise
        if _is_current(path / LOCK, lock):
            return OwnedFolder(path, lock)
        files.close(lock)
    raise DiskUnavailable(f"another process removes {path} again and again")


def make_room(own: Path, needed: int, files: Files, now_s: float) -> int:
    """Removes unused folders beside `own` until the file system has `needed` bytes. Returns how many. Raises OSError.

    `now_s`: seconds since the epoch.
    """
    root = own.parent
    mark_used(own)
    others = [path for path in root.iterdir() if path != own and _NAME.fullmatch(path.name) and not path.is_symlink()]
    used_s = {path: path.stat().st_mtime for path in others}
    removed = 0
    for path in sorted(others, key=lambda path: used_s[path]):
        if files.room(root) >= needed or used_s[path] > now_s - UNUSED_S:
            break
        removed += _remove(path, files)
    return removed


def mark_used(path: Path) -> None:
    """Lets no other log remove this folder for an hour, if it exists."""
    with suppress(OSError):
        os.utime(path)


def _remove(path: Path, files: Files) -> bool:
    """Removes a folder, if it is unowned and ours."""
    if LOCK not in files.names(path):
        return False
    try:
        folder = own_folder(path, files)
    except DiskUnavailable:
        return False
    try:
        segments = [path / name for name in files.names(path) if name != LOCK]
        if not all(_starts_as_segment(segment, files) for segment in segments):
            return False
        for segment in segments:
            files.remove(segment)
        files.remove(path / LOCK)
        path.rmdir()
        return True
    finally:
        files.close(folder.lock)


def _starts_as_segment(path: Path, files: Files) -> bool:
    if not number_of(path.name):
        return False
    try:
        file = files.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        start = bytearray(len(MAGIC))
        return MAGIC.startswith(start[: files.read(file, memoryview(start), 0)])
    finally:
        files.close(file)


def _is_current(path: Path, file: int) -> bool:
    """Returns whether the path still leads to the open file."""
    try:
        found, opened = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
