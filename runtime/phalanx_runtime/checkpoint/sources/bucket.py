"""What `s3://bucket/prefix` and `gs://bucket/prefix` have in common: address, names, and a version made of what is listed."""

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
    """A folder of a bucket, and the one file of it that is wanted, if one is."""

    scheme: str
    bucket: str
    prefix: str
    file: str | None = None

    @property
    def uri(self) -> str:
        """As it is written, without the file."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def folder(self, cache_dir: Path, endpoint: str) -> Path:
        """Where its snapshots are kept: equal names at other endpoints are other models."""
        key = hashlib.sha256(f"{endpoint} {self.uri}".encode()).hexdigest()[:16]
        return cache_dir / self.scheme / f"{self.bucket[:60]}--{key}"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What lies under one prefix of one bucket: what every such source says of itself."""

    endpoint: str
    address: BucketAddress
    client: httpx.Client
    work: DownloadControl

    @property
    def uri(self) -> str:
        """The prefix as it is written."""
        return self.address.uri

    @property
    def name(self) -> str:
        """The same."""
        return self.address.uri

    @property
    def where(self) -> str:
        """The same, and who is asked."""
        return f"{self.address.uri} at {self.endpoint}"


def address(scheme: str, rest: str, suffix: str = ".gguf") -> BucketAddress:
    """The address after `scheme://`; what ends in the suffix is one file. Raises ModelError."""
    bucket, _, path = rest.partition("/")
    path = path.removesuffix("/")
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(path.split("/") if path else ()):
        forms = f"{scheme}://bucket, {scheme}://bucket/prefix or {scheme}://bucket/prefix/file{suffix}"
        raise ModelError(f"model '{scheme}://{rest}': {forms} is expected")
    if not path.endswith(suffix):
        return BucketAddress(scheme, bucket, path)
    prefix, _, file = path.rpartition("/")
    return BucketAddress(scheme, bucket, prefix, file)


def version_of(files: Iterable[RemoteFile], tags: Iterable[str]) -> str:
    """A name for exactly these files with these contents, as a commit is one. `tags` tell contents apart."""
    lines = sorted(f"{file.name} {file.size} {tag}" for file, tag in zip(files, tags, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]
