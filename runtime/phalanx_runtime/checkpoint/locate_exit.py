"""From what the user wrote of an exit to its file on this machine.

| written | becomes |
|---|---|
| a file, `file:///exit.safetensors` | itself |
| `hf://org/name/exit.safetensors`, `s3://bucket/exit.safetensors`, `gs://...` | that one file, downloaded once |
| `s3://bucket/prefix`, `gs://...`, `oci://...`, `hf://org/name`, a folder | the one *.safetensors in it |
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx_runtime.checkpoint.locate import DEFAULT_ENDPOINT, silent
from phalanx_runtime.checkpoint.oci_auth import credentials_of
from phalanx_runtime.checkpoint.sources import bucket, gcs, oci, s3
from phalanx_runtime.checkpoint.sources.hub import Hub, download
from phalanx_runtime.checkpoint.sources.remote_file import Work
from phalanx_runtime.errors import ModelError

SUFFIX = ".safetensors"


def locate_exit(
    uri: str,
    *,
    cache_dir: Path,
    hf_token: str | None = None,
    progress: Callable[[str], None] = silent,
    stop: threading.Event | None = None,
    cached_only: bool = False,
) -> Path:
    """The file of the exit, fetched into `cache_dir` first if need be, or found there. Blocks. Raises ModelError."""
    scheme, separator, rest = uri.partition("://")
    work = Work(progress, stop or threading.Event(), cached_only=cached_only)
    if not separator or scheme == "file":
        return _only_file(Path(unquote(urlsplit(uri).path)) if separator else Path(uri).expanduser())
    match scheme:
        case "hf":
            folder = _exit_from_hub(Hub(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, hf_token, work), rest, cache_dir)
        case "s3":
            folder = s3.download(s3.store_of(os.environ), bucket.address(scheme, rest, SUFFIX), cache_dir, work).dir
        case "gs":
            folder = gcs.download(gcs.store_of(os.environ), bucket.address(scheme, rest, SUFFIX), cache_dir, work).dir
        case "oci":
            address = oci.address(rest)
            folder = oci.download(address, credentials_of(os.environ, address.registry), cache_dir, work).dir
        case _:
            raise ModelError(f"exit {uri!r}: {scheme}:// cannot be opened here; give a path, or a URI of file, hf, s3, gs or oci")
    return _only_file(folder)


def _exit_from_hub(hub: Hub, rest: str, cache_dir: Path) -> Path:
    parts = rest.strip("/").split("/", 2)
    file = parts[2] if len(parts) == 3 else None
    if len(parts) < 2 or (file is not None and not file.endswith(SUFFIX)):
        raise ModelError(f"exit 'hf://{rest}': hf://org/name or hf://org/name/file{SUFFIX} is expected")
    return download(hub, "/".join(parts[:2]), None, cache_dir / "hub", file).dir


def _only_file(path: Path) -> Path:
    """The file itself, or the only one of a folder."""
    if path.is_file():
        return path
    found = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else []
    if len(found) != 1:
        raise ModelError(f"exit {path}: {'no such file' if not path.is_dir() else f'it holds {len(found)} *{SUFFIX}, not one'}")
    return found[0]
