"""Downloads one file over HTTP, with resumption, retries and digests."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from phalanx_runtime.checkpoint.sources.addresses import ANY_SOURCE, CheckedTransport, PrivateSources
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import ProgressBar

# CRC-32C (Castagnoli) in numpy, over many lanes at once.

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 256
_Words = npt.NDArray[np.uint32]


def _byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()


class _Shift:
    """Appends `length` zero bytes to a CRC register, by one table per register byte."""

    def __init__(self, length: int) -> None:
        basis = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(length):
            basis = _TABLE[basis & 0xFF] ^ (basis >> 8)
        self.tables = self._tables(basis)

    @staticmethod
    def _tables(basis: _Words) -> _Words:
        tables = np.zeros((4, 256), dtype=np.uint32)
        for bit in range(32):
            chosen = (np.arange(256) >> (bit % 8)) & 1 == 1
            tables[bit // 8, chosen] ^= basis[bit]
        return tables

    def __call__(self, register: _Words) -> _Words:
        a, b, c, d = self.tables
        result: _Words = a[register & 0xFF] ^ b[(register >> 8) & 0xFF] ^ c[(register >> 16) & 0xFF] ^ d[register >> 24]
        return result

    def doubled(self) -> "_Shift":
        other = _Shift.__new__(_Shift)
        other.tables = self._tables(self(self(np.uint32(1) << np.arange(32, dtype=np.uint32))))
        return other


_SHIFTS = [_Shift(_LANE_BYTES)]
while len(_SHIFTS) < 13:
    _SHIFTS.append(_SHIFTS[-1].doubled())
_MAX_LANES = 1 << (len(_SHIFTS) - 1)


class Crc32c:
    """CRC-32C with the interface of `hashlib`."""

    def __init__(self) -> None:
        self._register = np.uint32(0xFFFFFFFF)

    def update(self, data: bytes, /) -> None:
        """Adds bytes."""
        rest = memoryview(data)
        while lanes := min(_MAX_LANES, 1 << (len(rest) // _LANE_BYTES).bit_length() >> 1):
            self._register = _lanes(self._register, rest[: lanes * _LANE_BYTES], lanes)
            rest = rest[lanes * _LANE_BYTES :]
        register = int(self._register)
        for byte in rest:
            register = int(_TABLE[(register ^ byte) & 0xFF]) ^ (register >> 8)
        self._register = np.uint32(register)

    def hexdigest(self) -> str:
        """Returns eight hexadecimal digits."""
        return f"{int(self._register) ^ 0xFFFFFFFF:08x}"


def _lanes(register: np.uint32, data: memoryview, lanes: int) -> np.uint32:
    """Returns the register after `data`; the first lane starts from `register`."""
    columns = np.frombuffer(data, dtype=np.uint8).reshape(lanes, _LANE_BYTES).T.astype(np.uint32)
    registers = np.zeros(lanes, dtype=np.uint32)
    registers[0] = register
    for column in columns:
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> 8)
    for shift in _SHIFTS:
        if len(registers) == 1:
            break
        registers = shift(registers[0::2]) ^ registers[1::2]
    return np.uint32(registers[0])


_T = TypeVar("_T")
_MAX_FAILURES = 5
"""Consecutive attempts without new bytes."""
_MAX_BACKOFF_S = 10.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadControl:
    """Settings of a download."""

    progress: Callable[[str], None]
    stop: threading.Event
    """Ends the download within a second."""
    backoff_s: float = 0.5
    """First wait after a failure; doubles up to 10 s."""
    report_every_s: float = 5.0
    """Minimum interval of progress reports."""
    cached_only: bool = False
    """Disables requests and writes."""
    bar: ProgressBar | None = None
    """Receives every state, in place of the messages at intervals."""
    private_sources: PrivateSources = ANY_SOURCE
    """Sources that may have private addresses."""
    is_adapter: bool = False
    """Downloads the files of an adapter, not those of a model."""
    is_served: bool = False
    """Downloads a model to serve, which needs a configuration and a tokenizer."""

    @property
    def secret_field(self) -> str:
        """Field of a service that names the Secret with the credentials."""
        return "spec.adapters[].secretRef" if self.is_adapter else "spec.model.secretRef"

    def transport(self) -> httpx.BaseTransport | None:
        """Returns the transport of requests to the source; null for httpx's own."""
        return None if self.private_sources.entries is None else CheckedTransport(self.private_sources)


@dataclass(frozen=True, slots=True)
class Digest:
    """Expected digest in hexadecimal. `git SHA-1` hashes the git blob."""

    kind: Literal["SHA-256", "git SHA-1", "MD5", "CRC32C"]
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A listed file."""

    name: str
    url: str
    size: int | None = None
    digest: Digest | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers."""


class Unreachable(ModelError):
    """The source did not respond to any attempt."""


class Transient(Exception):
    """A failure that a retry may resolve."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True)
class DownloadProgress:
    """Counts and reports bytes over all files. Thread-safe."""

    label: str
    total_bytes: int
    control: DownloadControl
    done_bytes: int = 0
    _reported_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        """Counts received bytes."""
        with self._lock:
            self.done_bytes += num_bytes
            if self.control.bar is not None:
                self.control.bar(self.label, self.done_bytes, self.total_bytes)
                return
            now = time.monotonic()
            if now - self._reported_at < self.control.report_every_s:
                return
            self._reported_at = now
        self.control.progress(f"{self.label}: {self.done_bytes / 1e6:.0f} of {self.total_bytes / 1e6:.0f} MB")


def with_retries(
    control: DownloadControl, label: str, attempt: Callable[[], _T], count_bytes: Callable[[], int] = lambda: 0
) -> _T:
    """Calls `attempt` until it succeeds. `count_bytes` returns the bytes received so far.

    Raises Unreachable after five attempts without new bytes, ModelError when stopped.
    """
    failures = 0
    while True:
        before = count_bytes()
        try:
            return attempt()
        except (httpx.RequestError, Transient) as error:
            failures = 1 if count_bytes() > before else failures + 1
            if failures >= _MAX_FAILURES:
                raise Unreachable(f"{label}: gave up after {failures} attempts: {error or type(error).__name__}") from error
            retry_after_s = error.retry_after_s if isinstance(error, Transient) else 0.0
        wait_s = max(control.backoff_s * 2 ** (failures - 1), retry_after_s)
        if control.stop.wait(min(wait_s, _MAX_BACKOFF_S)):
            raise ModelError(f"{label}: stopped")


def raise_if_transient(response: httpx.Response) -> None:
    """Raises Transient for 408, 429 and 5xx."""
    if response.status_code in (408, 429) or response.status_code >= 500:
        retry_after = response.headers.get("Retry-After", "")
        raise Transient(f"HTTP {response.status_code}", float(retry_after) if retry_after.isdecimal() else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDownloader:
    """Downloads the files of one source."""

    control: DownloadControl
    client: httpx.Client
    progress: DownloadProgress
    is_stopped: Callable[[], bool]
    error_of: Callable[[httpx.Response, str], ModelError]
    """From response and file name."""

    def download(self, file: RemoteFile, target: Path) -> None:
        """Writes `target`, verified; resumes from `<target>.incomplete`. Raises ModelError."""
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".incomplete")
        resumed = part.exists()
        if resumed:
            self.progress.add(part.stat().st_size)
        self._complete(file, part)
        problem = mismatch(file, part)
        if problem and resumed:
            _discard(part)
            self._complete(file, part)
            problem = mismatch(file, part)
        if problem:
            _discard(part)
            raise ModelError(f"{self.progress.label}: {file.name} is corrupt: {problem}")
        part.rename(target)
        _etag_path(part).unlink(missing_ok=True)

    def _complete(self, file: RemoteFile, part: Path) -> None:
        def size() -> int:
            return part.stat().st_size if part.exists() else 0

        if file.size is None or size() != file.size:
            label = f"{self.progress.label}: {file.name}"
            with_retries(self.control, label, lambda: self._request_rest(file, part, size()), size)

    def _request_rest(self, file: RemoteFile, part: Path, offset: int) -> None:
        headers = {"Accept-Encoding": "identity"} | dict(file.headers)
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if _etag_path(part).exists():
                headers["If-Range"] = _etag_path(part).read_text()
        with self.client.stream("GET", file.url, headers=headers) as response:
            raise_if_transient(response)
            if response.status_code == 416:
                part.unlink()
                raise Transient("the source's file is shorter than its downloaded part")
            if response.status_code not in (200, 206):
                raise self.error_of(response, file.name)
            is_rest = response.status_code == 206
            if is_rest and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise Transient("the source sent another range than requested")
            if not is_rest:
                self._store_etag(part, response)
            self._write(response, part, os.O_APPEND if is_rest else os.O_TRUNC)

    def _store_etag(self, part: Path, response: httpx.Response) -> None:
        etag = response.headers.get("ETag", "")
        if etag.startswith('"'):
            _etag_path(part).write_text(etag)
        else:
            _etag_path(part).unlink(missing_ok=True)

    def _write(self, response: httpx.Response, part: Path, mode: int) -> None:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode, 0o644)
        with open(descriptor, "wb") as out:
            for chunk in response.iter_raw():
                if self.is_stopped():
                    raise ModelError(f"{self.progress.label}: stopped")
                out.write(chunk)
                self.progress.add(len(chunk))


def _etag_path(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink()
    _etag_path(part).unlink(missing_ok=True)


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def mismatch(file: RemoteFile, path: Path) -> str | None:
    """Describes a difference from the listed size and digest, if any."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size} bytes instead of {file.size}"
    if file.digest is None:
        return None
    hasher = _hasher(file.digest, size)
    with open(path, "rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            hasher.update(chunk)
    is_equal = hasher.hexdigest() == file.digest.value
    return None if is_equal else f"its {file.digest.kind} is {hasher.hexdigest()}, not {file.digest.value}"


def _hasher(digest: Digest, size: int) -> _Hasher:
    match digest.kind:
        case "SHA-256":
            return hashlib.sha256()
        case "git SHA-1":
            return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        case "MD5":
            return hashlib.md5(usedforsecurity=False)
        case "CRC32C":
            return Crc32c()
