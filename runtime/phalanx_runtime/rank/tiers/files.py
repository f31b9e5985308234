"""File operations of the disk tier, behind a protocol so that tests can fail each of them."""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_MAX_BUFFERS = 1024
"""Linux' limit of buffers per call."""


class Files(Protocol):
    """Operations on files by descriptor and path. All but `close` raise OSError."""

    def open(self, path: Path, flags: int) -> int:
        """Returns a descriptor of a file. `flags`: those of `os.open`."""
        ...

    def close(self, file: int) -> None:
        """Closes a descriptor. Ignores errors: what does not reach the disk fails verification."""
        ...

    def size(self, file: int) -> int:
        """Returns the size in bytes."""
        ...

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Reads until `into` is full or the file ends. Returns the number of bytes."""
        ...

    def write(self, file: int, parts: Sequence[memoryview], offset: int) -> None:
        """Writes all parts, one after the other."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file, if it exists."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Returns the names in a folder."""
        ...

    def room(self, folder: Path) -> int:
        """Returns the free bytes of the folder's file system."""
        ...


class LocalFiles:
    """Files of the operating system."""

    def open(self, path: Path, flags: int) -> int:
        """See `Files`. Raises OSError for what is no regular file, such as a link, without waiting for the writer of a pipe."""
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise OSError(errno.EINVAL, "no regular file", str(path))

    def close(self, file: int) -> None:
        """See `Files`."""
        with suppress(OSError):
            os.close(file)

    def size(self, file: int) -> int:
        """See `Files`."""
        return os.fstat(file).st_size

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """See `Files`."""
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, file: int, parts: Sequence[memoryview], offset: int) -> None:
        """See `Files`. A short write is an error of lack of room: on local files there is no other."""
        for start in range(0, len(parts), _MAX_BUFFERS):
            some = parts[start : start + _MAX_BUFFERS]
            size = sum(part.nbytes for part in some)
            if os.pwritev(file, some, offset) < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += size

    def remove(self, path: Path) -> None:
        """See `Files`."""
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> list[str]:
        """See `Files`."""
        return os.listdir(folder)

    def room(self, folder: Path) -> int:
        """See `Files`."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
