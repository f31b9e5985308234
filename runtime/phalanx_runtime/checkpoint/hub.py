"""A model repository of a hub, as a folder on this machine.

    <cache>/<org>--<name>/refs/<revision>     the commit that a revision was, when last asked
    <cache>/<org>--<name>/<commit>/           the snapshot; whole once it has this name
    <cache>/<org>--<name>/<commit>.part/      a download under way, or cut: the next one continues it

Only what serving needs is fetched: configuration, tokenizer, safetensors. Source: the hub's HTTP API (`/api/models`, `/resolve`).
"""

import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import httpx

from phalanx_runtime.checkpoint.folder import made_once, write_whole
from phalanx_runtime.checkpoint.hub_file import Fetch, Hub, HubFile, Tally, raise_for_passing_trouble, with_retries
from phalanx_runtime.errors import ModelError

_PARALLEL_FILES = 4
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_COMMIT = re.compile(r"[0-9a-f]{40}")
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
    """A repository's files at one commit."""

    dir: Path
    commit: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: list[HubFile]


def download(hub: Hub, repository: str, revision: str | None, cache_dir: Path, gguf: str | None = None) -> Snapshot:
    """The repository at `revision` (branch, tag or commit; None is "main"), fetched unless it is there already.

    With `gguf` only that file. A commit that is there needs no hub; nor does a branch or tag while the hub cannot be
    reached, if it was fetched before. Raises ModelError.
    """
    revision = revision or "main"
    folder = cache_dir / repository.replace("/", "--")
    suffix = f".{quote(gguf, safe='')}" if gguf else ""
    if _COMMIT.fullmatch(revision) and (folder / (revision + suffix)).is_dir():
        return Snapshot(folder / (revision + suffix), revision)
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT, headers=hub.headers) as client:
        remote = _Repository(hub, client, repository, revision)
        try:
            listing = remote.listing()
        except _Unreachable as error:
            return _fetched_before(folder, revision, suffix, error, hub)
        files = wanted(listing.files, gguf, f"{repository} at revision {revision}")
        target = folder / (listing.commit + suffix)
        made_once(target, lambda part: remote.fetch(listing.commit, files, part), hub.stop)
    _remember(folder, revision, listing.commit)
    return Snapshot(target, listing.commit)


class _Unreachable(ModelError):
    """No answer at all."""


def _fetched_before(folder: Path, revision: str, suffix: str, error: ModelError, hub: Hub) -> Snapshot:
    reference = folder / "refs" / quote(revision, safe="")
    commit = reference.read_text() if reference.is_file() else ""
    if not commit or not (folder / (commit + suffix)).is_dir():
        raise error
    hub.progress(f"{error}; serving what revision {revision} was when last fetched, {commit}")
    return Snapshot(folder / (commit + suffix), commit)


def _remember(folder: Path, revision: str, commit: str) -> None:
    try:
        (folder / "refs").mkdir(exist_ok=True)
        write_whole(folder / "refs" / quote(revision, safe=""), commit.encode())
    except OSError as error:
        raise ModelError(f"cannot write {folder}/refs: {error.strerror or error}") from error


def wanted(files: list[HubFile], gguf: str | None, where: str) -> list[HubFile]:
    """The files to fetch. Raises ModelError when the weights or the file asked for are not there, or a name leaves its folder."""
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or "\\" in file.name or not file.name.isprintable():
            raise ModelError(f"{where}: the hub lists a file with the unsafe name {file.name!r}")
    by_name = {file.name: file for file in files}
    if gguf is not None:
        if gguf not in by_name:
            raise ModelError(f"{where} has no file {gguf}")
        return [by_name[gguf]]
    top = [file for file in files if "/" not in file.name]
    weights = _weights({file.name: file for file in top})
    if not weights:
        raise ModelError(f"{where} has no *.safetensors{_gguf_hint(by_name)}")
    return [file for file in top if any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS)] + weights


def _weights(top: dict[str, HubFile]) -> list[HubFile]:
    """Sharded weights with their index, else the one file, else any safetensors: some repositories hold the weights twice."""
    if _INDEX in top:
        return [file for name, file in top.items() if name == _INDEX or fnmatchcase(name, "model-*.safetensors")]
    if "model.safetensors" in top:
        return [top["model.safetensors"]]
    return [file for name, file in top.items() if name.endswith(".safetensors")]


def _gguf_hint(by_name: dict[str, HubFile]) -> str:
    found = sorted(name for name in by_name if name.endswith(".gguf"))
    return f"; to serve a GGUF file, write hf://org/name/{found[0]}" if found else ""


@dataclass(frozen=True, slots=True)
class _Repository:
    """One repository on the hub."""

    hub: Hub
    client: httpx.Client
    name: str
    revision: str

    def listing(self) -> Listing:
        """The commit of the revision and its files. Raises _Unreachable, ModelError."""
        url = f"{self.hub.endpoint.rstrip('/')}/api/models/{self.name}/revision/{quote(self.revision, safe='')}"

        def ask() -> httpx.Response:
            response = self.client.get(url, params={"blobs": "true"})
            raise_for_passing_trouble(response)
            return response

        try:
            response = with_retries(self.hub, f"hub {self.hub.endpoint}", ask)
        except httpx.InvalidURL as error:
            raise ModelError(f"HF_ENDPOINT {self.hub.endpoint!r} is no URL: {error}") from error
        except ModelError as error:
            raise _Unreachable(str(error)) from error
        if response.status_code != 200:
            raise self.refusal(response, None)
        return _parse(response, self.name)

    def fetch(self, commit: str, files: list[HubFile], part: Path) -> None:
        """Fills `part` with the files, a few at a time; the first error ends the others. Raises ModelError."""
        what = f"downloading {self.name}"
        total_bytes = sum(file.size or 0 for file in files)
        self._check_room(part, total_bytes)
        self.hub.progress(f"{what} at {commit}: {len(files)} files, {total_bytes / 1e6:.0f} MB")
        failed = threading.Event()
        fetch = Fetch(
            hub=self.hub,
            client=self.client,
            base_url=f"{self.hub.endpoint.rstrip('/')}/{self.name}/resolve/{commit}",
            tally=Tally(what, total_bytes, self.hub),
            stopped=lambda: failed.is_set() or self.hub.stop.is_set(),
            refusal=self.refusal,
        )
        with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="hub") as pool:
            running = [pool.submit(_unless_failed(fetch, failed), file, part / file.name) for file in files]
        errors = [error for future in running if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _GaveWay)), errors[0])

    def _check_room(self, part: Path, total_bytes: int) -> None:
        there = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        free = shutil.disk_usage(part).free
        if total_bytes - there > free:
            need = f"{(total_bytes - there) / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            raise ModelError(f"the disk of {part.parent} is too full for {self.name}: {need}")

    def refusal(self, response: httpx.Response, file: str | None) -> ModelError:
        """The error that an answer other than the wanted one means."""
        where = f"{self.name} at revision {self.revision} on {self.hub.endpoint}"
        if response.status_code in (401, 403):
            if self.hub.token:
                return ModelError(
                    f"the hub refuses the token for {where}: check HF_TOKEN and that its account may read the model"
                )
            secret = "set HF_TOKEN (in a cluster: the Secret that spec.model.secretRef names)"
            return ModelError(f"{where} is private, gated or does not exist: {secret}")
        if response.status_code == 404:
            return ModelError(f"there is no {'model ' if file is None else f'file {file} in '}{where}")
        return ModelError(f"the hub answers HTTP {response.status_code} for {where}")


class _GaveWay(Exception):
    """This file was not fetched because another failed."""


def _unless_failed(fetch: Fetch, failed: threading.Event) -> Callable[[HubFile, Path], None]:
    def run(file: HubFile, target: Path) -> None:
        if failed.is_set():
            raise _GaveWay
        try:
            fetch.file(file, target)
        except BaseException as error:
            gave_way = failed.is_set()
            failed.set()
            if gave_way:
                raise _GaveWay from error
            raise

    return run


def _parse(response: httpx.Response, name: str) -> Listing:
    try:
        body = response.json()
        return Listing(str(body["sha"]), [_file(entry) for entry in body["siblings"]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{response.url} is no model hub: it lists {name} in a form that is not understood") from error


def _file(entry: dict[str, object]) -> HubFile:
    large = entry.get("lfs")
    size, sha1 = entry.get("size"), entry.get("blobId")
    sha256 = large.get("sha256") if isinstance(large, dict) else None
    return HubFile(
        name=str(entry["rfilename"]),
        size=size if isinstance(size, int) else None,
        sha256=sha256 if isinstance(sha256, str) else None,
        git_sha1=sha1 if isinstance(sha1, str) and not isinstance(large, dict) else None,
    )
