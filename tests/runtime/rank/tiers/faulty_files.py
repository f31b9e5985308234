"""File operations that fail, or end the process, where a test wants it."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from phalanx_runtime.rank.tiers.files import LocalFiles


class Killed(BaseException):
    """The process ended here."""


class FaultyFiles(LocalFiles):
    """Local files with faults.

    errors: number of the error by operation (`open`, `create`, `read`, `write`, `remove`, `names`), until it is removed
    life: bytes written, files created and removed until the process is killed
    free: free bytes of the file system, if not the real ones
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.life: int | None = None
        self.free: int | None = None
        self.raised = 0

    def open(self, path: Path, flags: int) -> int:
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        self._check("create" if is_new else "open")
        if is_new:
            self._live(1)
        return super().open(path, flags)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        self._check("read")
        return super().read(file, into, offset)

    def write(self, file: int, parts: Sequence[memoryview], offset: int) -> None:
        data = b"".join(parts)
        if "write" in self.errors:
            super().write(file, [memoryview(data)[: len(data) // 2]], offset)
            self._check("write")
        if self.life is not None and self.life < len(data):
            super().write(file, [memoryview(data)[: self.life]], offset)
        self._live(len(data))
        super().write(file, parts, offset)

    def remove(self, path: Path) -> None:
        self._check("remove")
        self._live(1)
        super().remove(path)

    def names(self, folder: Path) -> list[str]:
        self._check("names")
        return super().names(folder)

    def room(self, folder: Path) -> int:
        return super().room(folder) if self.free is None else self.free

    def _check(self, operation: str) -> None:
        if operation in self.errors:
            self.raised += 1
            number = self.errors[operation]
            raise OSError(number, os.strerror(number))

    def _live(self, steps: int) -> None:
        if self.life is not None:
            if self.life < steps:
                raise Killed
            self.life -= steps


FULL = errno.ENOSPC
BROKEN = errno.EIO
READ_ONLY = errno.EROFS
