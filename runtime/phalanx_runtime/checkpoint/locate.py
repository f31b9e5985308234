"""Resolves a configured model to a local folder.

| configured | result |
|---|---|
| folder, `file:///folder` | the folder |
| `x.gguf`, `file:///x.gguf` | a folder with a link to the file |
| `hf://org/name`, `org/name` without such a path | downloaded, cached by commit |
| `s3://bucket/prefix`, `gs://bucket/prefix` | downloaded, cached by listing |
| `oci://registry/repository:tag`, `@sha256:...` | downloaded, cached by digest |
| `hf://org/name/x.gguf`, `s3://bucket/x.gguf`, `gs://bucket/x.gguf` | downloaded, then the same |
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx_runtime.checkpoint.folder import check_model_folder
from phalanx_runtime.checkpoint.gguf.convert import CONVERTER_VERSION, link_once
from phalanx_runtime.checkpoint.sources import bucket, gcs, oci, s3
from phalanx_runtime.checkpoint.sources.addresses import read_private_sources
from phalanx_runtime.checkpoint.sources.hub import Hub, download
from phalanx_runtime.checkpoint.sources.remote_file import DownloadControl
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import ProgressBar

_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_SAMPLE_BYTES = 1 << 20
DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A complete model folder."""

    dir: Path
    source: str
    """Origin, for logs."""
    version: str = ""
    """Commit, manifest digest or listing version; empty for a local model."""


def ignore_progress(message: str) -> None:
    """Drops the message."""


def locate(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path,
    hf_token: str | None = None,
    progress: Callable[[str], None] = ignore_progress,
    stop: threading.Event | None = None,
    cached_only: bool = False,
    bar: ProgressBar | None = None,
) -> LocalModel:
    """Returns the folder of `model`, downloaded into `cache_dir` if necessary. Blocks, possibly for minutes.

    Setting `stop` aborts. `cached_only` disables downloads. `bar`: of downloads. Raises ModelError.
    """
    stop = stop or threading.Event()
    scheme, separator, rest = model.partition("://")
    control = replace(_control(progress, stop, cached_only), bar=bar, is_served=True)
    if separator and scheme == "hf":
        hub = Hub(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, hf_token, control)
        return _from_hub(hub, rest, revision, cache_dir)
    if separator and scheme in ("s3", "gs", "oci"):
        if revision is not None:
            raise ModelError(f"model {model!r}: --revision goes with hf:// only")
        return _from_registry(rest, cache_dir, control) if scheme == "oci" else _from_bucket(scheme, rest, cache_dir, control)
    if separator and scheme != "file":
        forms = "a path, or a URI of file, hf, s3, gs or oci"
        raise ModelError(f"model {model!r}: {scheme}:// cannot be opened here; give {forms}")
    path = _file_path(model) if separator else Path(model).expanduser()
    if path.exists() or separator or not _REPOSITORY.fullmatch(model):
        return _from_path(path, cache_dir, control)
    return locate(
        f"hf://{model}",
        revision=revision,
        cache_dir=cache_dir,
        hf_token=hf_token,
        progress=progress,
        stop=stop,
        cached_only=cached_only,
        bar=bar,
    )


def _control(progress: Callable[[str], None], stop: threading.Event, cached_only: bool) -> DownloadControl:
    private = read_private_sources(os.environ)
    return DownloadControl(progress=progress, stop=stop, cached_only=cached_only, private_sources=private)


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ModelError(f"model {url!r}: a file URL has three slashes and an absolute path, as in file:///models/name")
    return Path(unquote(parts.path))


def _from_path(path: Path, cache_dir: Path, control: DownloadControl) -> LocalModel:
    if not path.exists():
        raise ModelError(f"model {path}: no such file or folder (a model of the hub is written hf://org/name)")
    if path.is_dir():
        check_model_folder(path)
        return LocalModel(path, str(path))
    if path.suffix != ".gguf":
        raise ModelError(f"model {path} is a file, but no .gguf file: give a folder with config.json and *.safetensors")
    return _from_gguf(path, str(path), cache_dir, control)


def _from_gguf(path: Path, source: str, cache_dir: Path, control: DownloadControl) -> LocalModel:
    folder = cache_dir / "converted" / f"{path.stem}-{_content_key(path)}"
    if not folder.is_dir():
        control.progress(f"reading {source}")
    return LocalModel(link_once(path, folder, control.stop), source)


def _content_key(path: Path) -> str:
    """Hashes path, size, modification time, first and last MiB."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            hasher = hashlib.sha256(f"{CONVERTER_VERSION} {path.absolute()} {status.st_size} {status.st_mtime_ns}".encode())
            hasher.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, status.st_size - _SAMPLE_BYTES))
            hasher.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return hasher.hexdigest()[:16]


def _from_hub(hub: Hub, rest: str, revision: str | None, cache_dir: Path) -> LocalModel:
    parts = rest.strip("/").split("/", 2)
    repository = "/".join(parts[:2])
    file = parts[2] if len(parts) == 3 else None
    if not _REPOSITORY.fullmatch(repository) or (file is not None and not file.endswith(".gguf")):
        raise ModelError(f"model 'hf://{rest}': hf://org/name or hf://org/name/file.gguf is expected")
    snapshot = download(hub, repository, revision, cache_dir / "hub", file)
    source = f"hf://{repository}@{snapshot.version}"
    if file is not None:
        return replace(_from_gguf(snapshot.dir / file, f"{source}/{file}", cache_dir, hub.control), version=snapshot.version)
    check_model_folder(snapshot.dir)
    return LocalModel(snapshot.dir, source, snapshot.version)


def _from_bucket(scheme: str, rest: str, cache_dir: Path, control: DownloadControl) -> LocalModel:
    address = bucket.parse_address(scheme, rest)
    if scheme == "s3":
        snapshot = s3.download(s3.read_store(os.environ), address, cache_dir, control)
    else:
        snapshot = gcs.download(gcs.read_store(os.environ), address, cache_dir, control)
    source = f"{address.uri}@{snapshot.version}"
    if address.file is not None:
        path = snapshot.dir / address.file
        local = _from_gguf(path, f"{source}/{address.file}", cache_dir, control)
        return replace(local, version=snapshot.version)
    check_model_folder(snapshot.dir)
    return LocalModel(snapshot.dir, source, snapshot.version)


def _from_registry(rest: str, cache_dir: Path, control: DownloadControl) -> LocalModel:
    address = oci.parse_address(rest)
    snapshot = oci.download(address, oci.read_credentials(os.environ, address.registry), cache_dir, control)
    check_model_folder(snapshot.dir)
    version = f"sha256:{snapshot.version}"
    return LocalModel(snapshot.dir, f"{address.uri}@{version}", version)


# Adapters: the two files of PEFT.


def fetch_adapter(text: str, cache_dir: Path, environment: Mapping[str, str]) -> Path:
    """Returns the downloaded folder of an adapter URI, with @REVISION if of the hub. Blocks. Raises ModelError."""
    is_hub = text.startswith("hf://")
    uri, _, revision = text.partition("@") if is_hub else (text, "", "")
    return locate_adapter(uri, revision=revision or None, cache_dir=cache_dir, environment=environment, stop=threading.Event())


def locate_adapter(
    uri: str,
    *,
    revision: str | None = None,
    cache_dir: Path,
    environment: Mapping[str, str],
    stop: threading.Event,
    cached_only: bool = False,
) -> Path:
    """Returns the adapter's folder, downloaded into `cache_dir` if necessary. Blocks.

    `environment`: variables with the credentials of the source. Raises ModelError.
    """
    scheme, _, rest = uri.partition("://")
    control = replace(_control(ignore_progress, stop, cached_only), is_adapter=True)
    match scheme:
        case "file":
            return _file_path(uri)
        case "hf":
            hub = Hub(environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, environment.get("HF_TOKEN") or None, control)
            return download(hub, rest.strip("/"), revision, cache_dir / "hub").dir
        case "s3":
            return s3.download(s3.read_store(environment), bucket.parse_address(scheme, rest), cache_dir, control).dir
        case "gs":
            return gcs.download(gcs.read_store(environment), bucket.parse_address(scheme, rest), cache_dir, control).dir
        case "oci":
            address = oci.parse_address(rest)
            return oci.download(address, oci.read_credentials(environment, address.registry), cache_dir, control).dir
        case _:
            raise ModelError(f"adapter {uri!r}: {scheme}:// cannot be opened here; give a URI of file, hf, s3, gs or oci")


# Exits: a *.safetensors file, or the only one in a folder, prefix, repository or image.

EXIT_SUFFIX = ".safetensors"


def locate_exit(
    uri: str,
    *,
    cache_dir: Path,
    hf_token: str | None = None,
    progress: Callable[[str], None] = ignore_progress,
    stop: threading.Event | None = None,
    cached_only: bool = False,
    bar: ProgressBar | None = None,
) -> Path:
    """Returns the exit's file, downloaded into `cache_dir` if necessary. Blocks. Raises ModelError."""
    scheme, separator, rest = uri.partition("://")
    control = replace(_control(progress, stop or threading.Event(), cached_only), bar=bar)
    if not separator or scheme == "file":
        return _only_file(Path(unquote(urlsplit(uri).path)) if separator else Path(uri).expanduser())
    match scheme:
        case "hf":
            folder = _exit_from_hub(Hub(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, hf_token, control), rest, cache_dir)
        case "s3":
            folder = s3.download(
                s3.read_store(os.environ), bucket.parse_address(scheme, rest, EXIT_SUFFIX), cache_dir, control
            ).dir
        case "gs":
            folder = gcs.download(
                gcs.read_store(os.environ), bucket.parse_address(scheme, rest, EXIT_SUFFIX), cache_dir, control
            ).dir
        case "oci":
            address = oci.parse_address(rest)
            folder = oci.download(address, oci.read_credentials(os.environ, address.registry), cache_dir, control).dir
        case _:
            raise ModelError(f"exit {uri!r}: {scheme}:// cannot be opened here; give a path, or a URI of file, hf, s3, gs or oci")
    return _only_file(folder)


def _exit_from_hub(hub: Hub, rest: str, cache_dir: Path) -> Path:
    parts = rest.strip("/").split("/", 2)
    file = parts[2] if len(parts) == 3 else None
    if len(parts) < 2 or (file is not None and not file.endswith(EXIT_SUFFIX)):
        raise ModelError(f"exit 'hf://{rest}': hf://org/name or hf://org/name/file{EXIT_SUFFIX} is expected")
    return download(hub, "/".join(parts[:2]), None, cache_dir / "hub", file).dir


def _only_file(path: Path) -> Path:
    """Raises ModelError unless there is exactly one exit."""
    if path.is_file():
        return path
    exits = sorted(path.rglob(f"*{EXIT_SUFFIX}")) if path.is_dir() else []
    if len(exits) != 1:
        raise ModelError(
            f"exit {path}: {'no such file' if not path.is_dir() else f'it has {len(exits)} *{EXIT_SUFFIX}, expected one'}"
        )
    return exits[0]
