"""The cache outside the checkout: one folder per thing, named by what it was made from, whole or absent.

A thing is made in a folder beside its own and renamed into place, so an interrupted run leaves nothing that looks whole,
and the next run starts that thing over. Two runs at once wait for each other.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """The folder of all caches: $PHALANX_CACHE, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx."""
    chosen = os.environ.get("PHALANX_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "phalanx"


def key_of(*parts: str | bytes) -> str:
    """Sixteen hex digits that change when any part does."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def key_of_folder(*folders: Path) -> str:
    """The key of every file below the folders: names, contents, and whether a file may be run. Byte code is left out."""
    parts: list[str | bytes] = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                parts += [str(path.relative_to(folder)), path.read_bytes(), str(os.access(path, os.X_OK))]
    return key_of(*parts)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nothing; holds the lock file until the block is left. The kernel frees it when the process dies, however it dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def finished(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, whole: made by make(an empty folder beside it) and renamed into place unless it is there already."""
    if folder.exists():
        return folder
    with locked(folder.parent / ".locks" / folder.name):
        if folder.exists():  # another run made it while this one waited
            return folder
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return folder
