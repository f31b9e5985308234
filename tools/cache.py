"""Cache outside the checkout: one folder per artefact, named by a key of its inputs, complete or absent.

An artefact is built in a temporary folder and renamed into place: an interrupted run leaves no incomplete artefact, and the next
run starts it again. Concurrent runs wait for each other.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Returns the cache folder: $PHALANX_CACHE, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx."""
    chosen = os.environ.get("PHALANX_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "phalanx"


def key_of(*parts: str | bytes) -> str:
    """Returns sixteen hex digits that depend on every part."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def key_of_folder(*folders: Path) -> str:
    """Returns the key of all files below the folders: names, contents, executable bits. Excludes byte code."""
    parts: list[str | bytes] = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                parts += [str(path.relative_to(folder)), path.read_bytes(), str(os.access(path, os.X_OK))]
    return key_of(*parts)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file during the block. The kernel releases it when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def finished(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns the complete folder: if absent, `make` fills an empty one, which is renamed into place."""
    if folder.exists():
        return folder
    with locked(folder.parent / ".locks" / folder.name):
        if folder.exists():  # another run has built it
            return folder
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return folder
