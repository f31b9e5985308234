"""Common parts of S3 and GCS sources."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx

from phalanx_runtime.checkpoint.sources.remote_file import DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A prefix of a bucket, or one file below it."""

    scheme: str
    bucket: str
    prefix: str
    file: str | None = None

    @property
    def uri(self) -> str:
        """URI without the file."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def cache_folder(self, cache_dir: Path, endpoint: str) -> Path:
        """Returns the folder of its snapshots."""
        key = hashlib.sha256(f"{endpoint} {self.uri}".encode()).hexdigest()[:16]
        return cache_dir / self.scheme / f"{self.bucket[:60]}--{key}"


@dataclass(frozen=True, slots=True)
class BucketPrefix:
    """Base of bucket sources."""

    endpoint: str
    address: BucketAddress
    client: httpx.Client
    control: DownloadControl

    @property
    def uri(self) -> str:
        """URI of the prefix."""
        return self.address.uri

    @property
    def name(self) -> str:
        """URI of the prefix."""
        return self.address.uri

    @property
    def description(self) -> str:
        """URI and endpoint."""
        return f"{self.address.uri} at {self.endpoint}"


def parse_address(scheme: str, rest: str, suffix: str = ".gguf") -> BucketAddress:
    """Parses `scheme://rest`; `suffix` marks a file. Raises ModelError."""
    bucket, _, path = rest.partition("/")
    path = path.removesuffix("/")
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(path.split("/") if path else ()):
        forms = f"{scheme}://bucket, {scheme}://bucket/prefix or {scheme}://bucket/prefix/file{suffix}"
        raise ModelError(f"model '{scheme}://{rest}': {forms} is expected")
    if not path.endswith(suffix):
        return BucketAddress(scheme, bucket, path)
    prefix, _, file = path.rpartition("/")
    return BucketAddress(scheme, bucket, prefix, file)


def listing_version(files: Iterable[RemoteFile], tags: Iterable[str]) -> str:
    """Returns a hash over names, sizes and content tags."""
    lines = sorted(f"{file.name} {file.size} {tag}" for file, tag in zip(files, tags, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]
