"""The files of a model out of tar archives. Nothing is written but plain files, by their last name, into one folder."""

import shutil
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from phalanx_runtime.errors import ModelError

_CHUNK_BYTES = 1 << 20


def unpack(
    archives: Sequence[Path], folder: Path, choose: Callable[[list[str]], list[str]], name: str, stop: threading.Event
) -> None:
    """Puts the files beside the topmost config.json of the archives, those that `choose` takes, into `folder`, and removes
    the archives. A later archive lies over an earlier one. Raises ModelError."""
    try:
        members = [(path, member) for path in archives for member in _members(path)]
        root = _root([member.name for _, member in members], name)
        there = {PurePosixPath(m.name).name: (path, m) for path, m in members if PurePosixPath(m.name).parent == root}
        present = [path.name for path in folder.iterdir() if path not in archives and not path.name.endswith(".unpacking")]
        for chosen in choose(sorted({*there, *present})):
            if chosen in there:
                _extract(*there[chosen], folder / chosen, name, stop)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ModelError(f"{name}: an archive of it cannot be read: {error}") from error
    for path in archives:
        path.unlink()


def _members(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return [member for member in archive if not member.isdir()]


def _root(names: list[str], source: str) -> PurePosixPath:
    """The folder of the topmost config.json, beside weights if any is. Raises ModelError when there is none, or it is outside."""
    paths = [PurePosixPath(name) for name in names]
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    found = [path for path in paths if path.name == "config.json"]
    if not found:
        raise ModelError(f"{source}: its archives hold no config.json")
    for path in found:
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{source}: an archive of it holds a file with the unsafe name {str(path)!r}")
    return min(found, key=lambda path: (path.parent not in weights, len(path.parts), str(path))).parent


def _extract(path: Path, member: tarfile.TarInfo, target: Path, name: str, stop: threading.Event) -> None:
    if not member.isreg():
        raise ModelError(f"{name}: {member.name} in an archive of it is a link or a device; only plain files are taken")
    beside = target.with_name(target.name + ".unpacking")
    with tarfile.open(path) as archive, open(beside, "wb") as out:
        content = archive.extractfile(member)
        if content is None:
            raise ModelError(f"{name}: {member.name} in an archive of it has no content")
        while chunk := content.read(_CHUNK_BYTES):
            if stop.is_set():
                raise ModelError(f"unpacking {name}: stopped")
            out.write(chunk)
    shutil.move(beside, target)
