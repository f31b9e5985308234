"""Downloads the configuration, tokenizer and weights of a model from any `RemoteSource`.

<folder>/refs/<label>         version of a label (branch, tag, "latest") at the last download
<folder>/<version>/           complete snapshot
<folder>/<version>.part/      incomplete download; the next one resumes it
"""

import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from gzip import BadGzipFile
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE
from phalanx_runtime.checkpoint.folder import (
    CALIBRATION_SUFFIX,
    INDEX,
    WHOLE,
    make_once,
    missing_texts,
    read_index,
    tokenizer_hint,
    write_file,
)
from phalanx_runtime.checkpoint.sources.remote_file import (
    DownloadControl,
    DownloadProgress,
    FileDownloader,
    RemoteFile,
    Unreachable,
    raise_if_transient,
    with_retries,
)
from phalanx_runtime.errors import ModelError

# Only regular files are extracted, by base name.

_CHUNK_BYTES = 1 << 20


def unpack(
    archives: Sequence[Path], folder: Path, select: Callable[[list[str]], list[str]], name: str, control: DownloadControl
) -> None:
    """Extracts selected files next to the topmost configuration; later archives win. Raises ModelError."""
    try:
        members = [(path, member) for path in archives for member in _members(path)]
        config = CONFIG_FILE if control.is_adapter else "config.json"
        root = _model_root([member.name for _, member in members], name, config)
        members_by_name = {PurePosixPath(m.name).name: (path, m) for path, m in members if PurePosixPath(m.name).parent == root}
        downloaded = [path.name for path in folder.iterdir() if path not in archives and not path.name.endswith(".unpacking")]
        selected = select(sorted({*members_by_name, *downloaded}))
        for names in _with_index_first(selected, folder):
            for one in names:
                if one in members_by_name:
                    _extract(*members_by_name[one], folder / one, name, control.stop)
    except (tarfile.TarError, EOFError, ValueError, BadGzipFile, zlib.error) as error:
        raise ModelError(f"{name}: cannot read an archive: {error}") from error
    for path in archives:
        path.unlink()


def _members(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return [member for member in archive if not member.isdir()]


def _model_root(names: list[str], source: str, config: str) -> PurePosixPath:
    """Returns the folder of the topmost file with this name, preferably with weights."""
    paths = [PurePosixPath(name) for name in names]
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    configs = [path for path in paths if path.name == config]
    if not configs:
        raise ModelError(f"{source}: its archives have no {config}")
    for path in configs:
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{source}: an archive has a file with the unsafe name {str(path)!r}")
    return min(configs, key=lambda path: (path.parent not in weights, len(path.parts), str(path))).parent


def _extract(path: Path, member: tarfile.TarInfo, target: Path, name: str, stop: threading.Event) -> None:
    if not member.isreg():
        raise ModelError(f"{name}: {member.name} in an archive is a link or a device; expected a regular file")
    part = target.with_name(target.name + ".unpacking")
    with tarfile.open(path) as archive, open(part, "wb") as out:
        content = archive.extractfile(member)
        if content is None:
            raise ModelError(f"{name}: {member.name} in an archive has no content")
        while chunk := content.read(_CHUNK_BYTES):
            if stop.is_set():
                raise ModelError(f"unpacking {name}: stopped")
            out.write(chunk)
    shutil.move(part, target)


_PARALLEL_FILES = 4
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    f"*{CALIBRATION_SUFFIX}",
)
_POOLING_FILE = "*_Pooling/config.json"
"""In a folder of its own, next to the model of sentence-transformers."""
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The local folder of one version."""

    dir: Path
    version: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Remote files and archives of one version."""

    version: str
    files: list[RemoteFile]
    archives: Sequence[RemoteFile] = ()


class RemoteSource(Protocol):
    """A remote location of a model."""

    @property
    def uri(self) -> str:
        """URI without revision."""
        ...

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def description(self) -> str:
        """Name and label for messages."""
        ...

    @property
    def client(self) -> httpx.Client:
        """HTTP client with authentication."""
        ...

    @property
    def control(self) -> DownloadControl:
        """Settings of downloads."""
        ...

    def list_files(self) -> Listing:
        """Lists the current version. Raises Unreachable, ModelError."""
        ...

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        """Adds the digest, if that needs a request. Raises ModelError."""
        ...

    def error_of(self, response: httpx.Response, file: str | None) -> ModelError:
        """Returns the error in a response, to the listing without `file`."""
        ...


def send_request(
    source: RemoteSource, method: str, url: str, label: str, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Sends a small request with retries. Raises Unreachable, ModelError."""

    def attempt() -> httpx.Response:
        response = source.client.request(method, url, headers=headers)
        raise_if_transient(response)
        return response

    try:
        return with_retries(source.control, label, attempt)
    except httpx.InvalidURL as error:
        raise ModelError(f"{label}: {url!r} is no URL: {error}") from error


def fetch_snapshot(
    source: RemoteSource, folder: Path, label: str, *, file: str | None = None, version: str | None = None
) -> Snapshot:
    """Returns a snapshot, downloaded if not cached. `file` limits it to one file. Raises ModelError.

    A cached `version` needs no request. An unreachable source or `cached_only` falls back to the label's last version.
    """
    suffix = f".{quote(file, safe='')}" if file else ".adapter" if source.control.is_adapter else ""
    if version is not None and (folder / (version + suffix)).is_dir():
        return Snapshot(folder / (version + suffix), version)
    if source.control.cached_only:
        missing = (
            f"there is no copy of {source.description} in {folder}, and downloads are disabled: download it with phalanx-runtime "
            + ("fetch MODEL --adapter URI" if source.control.is_adapter else "fetch (an exit: with --exit)")
        )
        return _last_snapshot(source, folder, label, suffix, ModelError(missing))
    try:
        listing = source.list_files()
    except Unreachable as error:
        return _last_snapshot(source, folder, label, suffix, error)
    files = _select(listing, file, source)

    def make(part: Path) -> None:
        by_name = {entry.name: entry for entry in files}
        for names in _with_index_first(list(by_name), part):
            _download(source, listing.version, [by_name[name] for name in names], part)
        if listing.archives:
            archives = [part / archive.name for archive in listing.archives]
            unpack(archives, part, lambda names: _select_names(names, source), source.name, source.control)

    target = make_once(folder / (listing.version + suffix), make, source.control.stop)
    _store_version(folder, label, listing.version)
    return Snapshot(target, listing.version)


def _select_names(names: list[str], source: RemoteSource) -> list[str]:
    files = [RemoteFile(name=name, url="") for name in names]
    return [file.name for file in _select_files(files, None, source)]


def _select_files(files: list[RemoteFile], file: str | None, source: RemoteSource) -> list[RemoteFile]:
    select = select_adapter_files if source.control.is_adapter else select_files
    selected, names = select(files, file, source.description, source.uri), [entry.name for entry in files]
    if source.control.is_served and file is None and (missing := missing_texts(names)):
        raise ModelError(f"{source.description} is no model: it has no {' and no '.join(missing)}{tokenizer_hint(names)}")
    return selected


def _select(listing: Listing, file: str | None, source: RemoteSource) -> list[RemoteFile]:
    if listing.archives:
        _check_names(listing.files, source.description)
        wanted = ADAPTER_FILES.__contains__ if source.control.is_adapter else _is_model_file
        return [*listing.archives, *(entry for entry in listing.files if "/" not in entry.name and wanted(entry.name))]
    return _select_files(listing.files, file, source)


def _last_snapshot(source: RemoteSource, folder: Path, label: str, suffix: str, error: ModelError) -> Snapshot:
    reference = folder / "refs" / quote(label, safe="")
    version = reference.read_text() if reference.is_file() else ""
    if not version or not (folder / (version + suffix)).is_dir():
        raise error
    reason = "" if source.control.cached_only else f"{error}; "
    source.control.progress(f"{reason}serving the last downloaded version of {source.description}, {version}")
    return Snapshot(folder / (version + suffix), version)


def _store_version(folder: Path, label: str, version: str) -> None:
    try:
        (folder / "refs").mkdir(exist_ok=True)
        write_file(folder / "refs" / quote(label, safe=""), version.encode())
    except OSError as error:
        raise ModelError(f"cannot write {folder}/refs: {error.strerror or error}") from error


def _is_pooling_file(name: str) -> bool:
    return name.count("/") == 1 and fnmatchcase(name, _POOLING_FILE)


def _is_model_file(name: str) -> bool:
    return name.endswith(".safetensors") or name == INDEX or any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES)


def _check_names(files: Sequence[RemoteFile], description: str) -> None:
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or "\\" in file.name or not file.name.isprintable():
            raise ModelError(f"{description} lists a file with the unsafe name {file.name!r}")


def select_files(files: list[RemoteFile], file: str | None, description: str, uri: str) -> list[RemoteFile]:
    """Returns the files to download. Raises ModelError."""
    _check_names(files, description)
    by_name = {entry.name: entry for entry in files}
    if file is not None:
        if file not in by_name:
            raise ModelError(f"{description} has no file {file}")
        return [by_name[file]]
    top = [entry for entry in files if "/" not in entry.name]
    weights = _select_weights({entry.name: entry for entry in top})
    if not weights:
        raise ModelError(f"{description} has no *.safetensors{_gguf_hint(by_name, uri)}")
    small = [entry for entry in top if any(fnmatchcase(entry.name, pattern) for pattern in _SMALL_FILES)]
    return small + [entry for entry in files if _is_pooling_file(entry.name)] + weights


def select_adapter_files(files: list[RemoteFile], file: str | None, description: str, uri: str) -> list[RemoteFile]:
    """Returns the files of an adapter. Raises ModelError."""
    _check_names(files, description)
    found = [entry for entry in files if entry.name in ADAPTER_FILES]
    if missing := [name for name in ADAPTER_FILES if all(entry.name != name for entry in found)]:
        raise ModelError(f"{description} is no adapter: it has no {' and no '.join(missing)}")
    return found


def _select_weights(top: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Prefers one file of all weights: some repositories store them twice. An index decides unless it omits that file."""
    if INDEX in top:
        return [file for name, file in top.items() if name == INDEX or name.endswith(".safetensors")]
    if WHOLE in top:
        return [top[WHOLE]]
    return [file for name, file in top.items() if name.endswith(".safetensors")]


def _with_index_first(names: Sequence[str], folder: Path) -> Iterator[Sequence[str]]:
    """Yields the names in parts that are fetched in turn: the index of the weights, then all others but weights it lacks.

    Raises ModelError for a broken index.
    """
    if INDEX in names:
        yield [INDEX]
    kept = {path.name for path in read_index(folder / INDEX).values()} if INDEX in names else None
    if WHOLE in names and (kept is None or WHOLE not in kept):
        kept = {WHOLE}
    yield [name for name in names if name != INDEX and (kept is None or name in kept or not name.endswith(".safetensors"))]


def _gguf_hint(by_name: dict[str, RemoteFile], uri: str) -> str:
    ggufs = sorted(name for name in by_name if name.endswith(".gguf"))
    return f"; to serve a GGUF file, write {uri}/{ggufs[0]}" if ggufs and not uri.startswith("oci://") else ""


def _download(source: RemoteSource, version: str, files: list[RemoteFile], part: Path) -> None:
    """Downloads files in parallel; the first error cancels the others."""
    label = f"downloading {source.name}"
    total_bytes = sum(file.size or 0 for file in files)
    _check_disk_space(source.name, part, total_bytes)
    source.control.progress(f"{label} at {version}: {len(files)} files, {total_bytes / 1e6:.0f} MB")
    failed = threading.Event()
    downloader = FileDownloader(
        control=source.control,
        client=source.client,
        progress=DownloadProgress(label=label, total_bytes=total_bytes, control=source.control),
        is_stopped=lambda: failed.is_set() or source.control.stop.is_set(),
        error_of=source.error_of,
    )

    def download(file: RemoteFile) -> None:
        if not (part / file.name).is_file():
            (part / file.name).parent.mkdir(exist_ok=True)
            downloader.download(source.with_digest(file), part / file.name)

    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="download") as pool:
        futures = [pool.submit(_cancel_after_failure(download, failed), file) for file in files]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, _Cancelled)), errors[0])


def _check_disk_space(name: str, part: Path, total_bytes: int) -> None:
    downloaded = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    free = shutil.disk_usage(part).free
    if total_bytes - downloaded > free:
        need = f"{(total_bytes - downloaded) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
        raise ModelError(f"the disk of {part.parent} is too full for {name}: {need}")


class _Cancelled(Exception):
    """Another file failed first."""


def _cancel_after_failure(download: Callable[[RemoteFile], None], failed: threading.Event) -> Callable[[RemoteFile], None]:
    def run(file: RemoteFile) -> None:
        if failed.is_set():
            raise _Cancelled
        try:
            download(file)
        except BaseException as error:
            is_first = not failed.is_set()
            failed.set()
            if not is_first:
                raise _Cancelled from error
            raise

    return run
