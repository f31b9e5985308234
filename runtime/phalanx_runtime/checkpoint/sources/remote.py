"""A model kept elsewhere, as a folder on this machine; the same for every kind of source.

    <folder>/refs/<label>         the version that a label (branch, tag, "latest") was, when last asked
    <folder>/<version>/           the snapshot; whole once it has this name
    <folder>/<version>.part/      a download under way, or cut: the next one continues it

Only what serving needs is fetched: configuration, tokenizer, safetensors. What a kind of source adds is a `RemoteSource`.
"""

import shutil
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.folder import make_once, write_whole
from phalanx_runtime.checkpoint.sources.remote_file import (
    DownloadControl,
    DownloadProgress,
    Fetch,
    RemoteFile,
    Unreachable,
    raise_for_passing_trouble,
    with_retries,
)
from phalanx_runtime.errors import ModelError

# The files of a model out of tar archives. Nothing is written but plain files, by their last name, into one folder.

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


_PARALLEL_FILES = 4
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""Of every request to a source."""
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A source's files at one version."""

    dir: Path
    version: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds at one version: files, and archives that hold files."""

    version: str
    files: list[RemoteFile]
    archives: Sequence[RemoteFile] = ()


class RemoteSource(Protocol):
    """One place where a model is kept."""

    @property
    def uri(self) -> str:
        """As the user writes it, without revision."""
        ...

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def where(self) -> str:
        """Name and label, for messages."""
        ...

    @property
    def client(self) -> httpx.Client:
        """With what proves who asks."""
        ...

    @property
    def work(self) -> DownloadControl:
        """Whom to tell, and what ends the download."""
        ...

    def listing(self) -> Listing:
        """Its files now. Raises Unreachable, ModelError."""
        ...

    def pinned(self, file: RemoteFile) -> RemoteFile:
        """The file with all that is known of it, asked before it is fetched. Raises ModelError."""
        ...

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        ...


def ask(source: RemoteSource, method: str, url: str, what: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to a small request, after a few attempts. Raises Unreachable, ModelError."""

    def attempt() -> httpx.Response:
        response = source.client.request(method, url, headers=headers)
        raise_for_passing_trouble(response)
        return response

    try:
        return with_retries(source.work, what, attempt)
    except httpx.InvalidURL as error:
        raise ModelError(f"{what}: {url!r} is no URL: {error}") from error


def snapshot(source: RemoteSource, folder: Path, label: str, *, file: str | None = None, version: str | None = None) -> Snapshot:
    """The files of a source, fetched unless they are there already. With `file`, only that one. Raises ModelError.

    A `version` that is known and there needs no source; nor does a label while the source cannot be reached, if it was
    fetched before, or where only the cache counts.
    """
    suffix = f".{quote(file, safe='')}" if file else ""
    if version is not None and (folder / (version + suffix)).is_dir():
        return Snapshot(folder / (version + suffix), version)
    if source.work.cached_only:
        missing = (
            f"there is no copy of {source.where} in {folder}, and only what is there is served: "
            "fill it by phalanx-runtime fetch (an exit: with --exit)"
        )
        return _fetched_before(source, folder, label, suffix, ModelError(missing))
    try:
        listing = source.listing()
    except Unreachable as error:
        return _fetched_before(source, folder, label, suffix, error)
    files = _chosen(listing, file, source)

    def make(part: Path) -> None:
        _fetch(source, listing.version, files, part)
        if listing.archives:
            archives = [part / archive.name for archive in listing.archives]
            unpack(archives, part, lambda names: _names(names, source), source.name, source.work.stop)

    target = make_once(folder / (listing.version + suffix), make, source.work.stop)
    _remember(folder, label, listing.version)
    return Snapshot(target, listing.version)


def _names(names: list[str], source: RemoteSource) -> list[str]:
    return [file.name for file in wanted([RemoteFile(name=name, url="") for name in names], None, source.where, source.uri)]


def _chosen(listing: Listing, file: str | None, source: RemoteSource) -> list[RemoteFile]:
    if listing.archives:
        _check_names(listing.files, source.where)
        return [*listing.archives, *(entry for entry in listing.files if "/" not in entry.name and _is_of_a_model(entry.name))]
    return wanted(listing.files, file, source.where, source.uri)


def _fetched_before(source: RemoteSource, folder: Path, label: str, suffix: str, error: ModelError) -> Snapshot:
    reference = folder / "refs" / quote(label, safe="")
    version = reference.read_text() if reference.is_file() else ""
    if not version or not (folder / (version + suffix)).is_dir():
        raise error
    why = "" if source.work.cached_only else f"{error}; "
    source.work.progress(f"{why}serving what {source.where} was when last fetched, {version}")
    return Snapshot(folder / (version + suffix), version)


def _remember(folder: Path, label: str, version: str) -> None:
    try:
        (folder / "refs").mkdir(exist_ok=True)
        write_whole(folder / "refs" / quote(label, safe=""), version.encode())
    except OSError as error:
        raise ModelError(f"cannot write {folder}/refs: {error.strerror or error}") from error


def _is_of_a_model(name: str) -> bool:
    """Whether a file of this name may be needed to serve, were it in no folder."""
    return name.endswith(".safetensors") or name == _INDEX or any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)


def _check_names(files: Sequence[RemoteFile], where: str) -> None:
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or "\\" in file.name or not file.name.isprintable():
            raise ModelError(f"{where} lists a file with the unsafe name {file.name!r}")


def wanted(files: list[RemoteFile], gguf: str | None, where: str, uri: str) -> list[RemoteFile]:
    """The files to fetch. Raises ModelError when the weights or the file asked for are not there, or a name leaves its folder."""
    _check_names(files, where)
    by_name = {file.name: file for file in files}
    if gguf is not None:
        if gguf not in by_name:
            raise ModelError(f"{where} has no file {gguf}")
        return [by_name[gguf]]
    top = [file for file in files if "/" not in file.name]
    weights = _weights({file.name: file for file in top})
    if not weights:
        raise ModelError(f"{where} has no *.safetensors{_gguf_hint(by_name, uri)}")
    return [file for file in top if any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS)] + weights


def _weights(top: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Sharded weights with their index, else the one file, else any safetensors: some repositories hold the weights twice."""
    if _INDEX in top:
        return [file for name, file in top.items() if name == _INDEX or fnmatchcase(name, "model-*.safetensors")]
    if "model.safetensors" in top:
        return [top["model.safetensors"]]
    return [file for name, file in top.items() if name.endswith(".safetensors")]


def _gguf_hint(by_name: dict[str, RemoteFile], uri: str) -> str:
    found = sorted(name for name in by_name if name.endswith(".gguf"))
    return f"; to serve a GGUF file, write {uri}/{found[0]}" if found and not uri.startswith("oci://") else ""


def _fetch(source: RemoteSource, version: str, files: list[RemoteFile], part: Path) -> None:
    """Fills `part` with the files, a few at a time; the first error ends the others. Raises ModelError."""
    what = f"downloading {source.name}"
    total_bytes = sum(file.size or 0 for file in files)
    _check_room(source.name, part, total_bytes)
    source.work.progress(f"{what} at {version}: {len(files)} files, {total_bytes / 1e6:.0f} MB")
    failed = threading.Event()
    fetch = Fetch(
        work=source.work,
        client=source.client,
        tally=DownloadProgress(what=what, total_bytes=total_bytes, work=source.work),
        stopped=lambda: failed.is_set() or source.work.stop.is_set(),
        refusal=source.refusal,
    )

    def one(file: RemoteFile) -> None:
        if not (part / file.name).is_file():
            fetch.file(source.pinned(file), part / file.name)

    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="download") as pool:
        running = [pool.submit(_unless_failed(one, failed), file) for file in files]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, _GaveWay)), errors[0])


def _check_room(name: str, part: Path, total_bytes: int) -> None:
    there = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    free = shutil.disk_usage(part).free
    if total_bytes - there > free:
        need = f"{(total_bytes - there) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
        raise ModelError(f"the disk of {part.parent} is too full for {name}: {need}")


class _GaveWay(Exception):
    """This file was not fetched because another failed."""


def _unless_failed(fetch: Callable[[RemoteFile], None], failed: threading.Event) -> Callable[[RemoteFile], None]:
    def run(file: RemoteFile) -> None:
        if failed.is_set():
            raise _GaveWay
        try:
            fetch(file)
        except BaseException as error:
            gave_way = failed.is_set()
            failed.set()
            if gave_way:
                raise _GaveWay from error
            raise

    return run
