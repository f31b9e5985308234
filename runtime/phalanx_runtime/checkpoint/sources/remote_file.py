"""One file over HTTP: continued after a cut, checked against the digest that its source lists, retried within bounds."""

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

from phalanx_runtime.errors import ModelError

# CRC-32C (Castagnoli) of large files, by numpy: many stretches of a file at once, put together by how zeros shift a CRC.

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
    """What `length` zero bytes make of a CRC register: four tables, one for each of its bytes."""

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

    def twice(self) -> "_Shift":
        """The shift by twice as many zeros."""
        other = _Shift.__new__(_Shift)
        other.tables = self._tables(self(self(np.uint32(1) << np.arange(32, dtype=np.uint32))))
        return other


_SHIFTS = [_Shift(_LANE_BYTES)]
while len(_SHIFTS) < 13:
    _SHIFTS.append(_SHIFTS[-1].twice())
_MOST_LANES = 1 << (len(_SHIFTS) - 1)


class Crc32c:
    """A running CRC-32C, used as a hash of `hashlib` is."""

    def __init__(self) -> None:
        self._register = np.uint32(0xFFFFFFFF)

    def update(self, data: bytes, /) -> None:
        """Counts more bytes."""
        rest = memoryview(data)
        while lanes := min(_MOST_LANES, 1 << (len(rest) // _LANE_BYTES).bit_length() >> 1):
            self._register = _lanes(self._register, rest[: lanes * _LANE_BYTES], lanes)
            rest = rest[lanes * _LANE_BYTES :]
        register = int(self._register)
        for byte in rest:
            register = int(_TABLE[(register ^ byte) & 0xFF]) ^ (register >> 8)
        self._register = np.uint32(register)

    def hexdigest(self) -> str:
        """Eight hexadecimal digits."""
        return f"{int(self._register) ^ 0xFFFFFFFF:08x}"


def _lanes(register: np.uint32, data: memoryview, lanes: int) -> np.uint32:
    """The register after `data`: each lane of it alone, the first with what came before; then halves joined to wholes."""
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
"""Attempts in a row that bring nothing new before the download gives up."""
_LONGEST_BACKOFF_S = 10.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadControl:
    """Whom a download tells, and what ends it. Setting `stop` ends everything within a second.

    backoff_s: first wait after a failure; doubles, up to 10 s. report_every_s: least time between two lines of progress.
    cached_only: what is in the cache is taken as it is; no source is asked, and nothing is written.
    """

    progress: Callable[[str], None]
    stop: threading.Event
    backoff_s: float = 0.5
    report_every_s: float = 5.0
    cached_only: bool = False


@dataclass(frozen=True, slots=True)
class Digest:
    """What the bytes of a file must add up to, in hexadecimal. The SHA-1 of git is that of a blob, not of a file."""

    kind: Literal["SHA-256", "git SHA-1", "MD5", "CRC32C"]
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its source lists it: where it is, and how to know that it arrived. `headers` go with each request for it."""

    name: str
    url: str
    size: int | None = None
    digest: Digest | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Unreachable(ModelError):
    """No answer, however often it was asked."""


class Transient(Exception):
    """The source cannot answer now: another attempt may work."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True)
class DownloadProgress:
    """Bytes of a whole download, counted by several threads; says how far it is every few seconds."""

    what: str
    total_bytes: int
    work: DownloadControl
    done_bytes: int = 0
    _reported_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        """Counts bytes that arrived."""
        with self._lock:
            self.done_bytes += num_bytes
            now = time.monotonic()
            if now - self._reported_at < self.work.report_every_s:
                return
            self._reported_at = now
        self.work.progress(f"{self.what}: {self.done_bytes / 1e6:.0f} of {self.total_bytes / 1e6:.0f} MB")


def with_retries(work: DownloadControl, what: str, attempt: Callable[[], _T], progress_of: Callable[[], int] = lambda: 0) -> _T:
    """What `attempt` gives, tried again after a cut or a passing trouble, at most five times in a row without new bytes.

    `progress_of` tells how many bytes there are. Raises Unreachable when it gives up, ModelError when stopped; other errors pass.
    """
    failures = 0
    while True:
        before = progress_of()
        try:
            return attempt()
        except (httpx.RequestError, Transient) as error:
            failures = 1 if progress_of() > before else failures + 1
            if failures >= _MAX_FAILURES:
                raise Unreachable(f"{what}: gave up after {failures} attempts: {error or type(error).__name__}") from error
            asked = error.retry_after_s if isinstance(error, Transient) else 0.0
        wait_s = max(work.backoff_s * 2 ** (failures - 1), asked)
        if work.stop.wait(min(wait_s, _LONGEST_BACKOFF_S)):
            raise ModelError(f"{what}: stopped")


def raise_for_passing_trouble(response: httpx.Response) -> None:
    """Raises Transient for answers that another attempt may not get: 408, 429, 5xx."""
    if response.status_code in (408, 429) or response.status_code >= 500:
        asked = response.headers.get("Retry-After", "")
        raise Transient(f"HTTP {response.status_code}", float(asked) if asked.isdecimal() else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Everything that fetching the files of one source shares."""

    work: DownloadControl
    client: httpx.Client
    tally: DownloadProgress
    stopped: Callable[[], bool]
    refusal: Callable[[httpx.Response, str], ModelError]

    def file(self, file: RemoteFile, target: Path) -> None:
        """`target`, whole and checked. What arrived before a cut stays in `<target>.incomplete`. Raises ModelError."""
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".incomplete")
        resumed = part.exists()
        if resumed:
            self.tally.add(part.stat().st_size)
        self._whole(file, part)
        problem = mismatch(file, part)
        if problem and resumed:
            _discard(part)
            self._whole(file, part)
            problem = mismatch(file, part)
        if problem:
            _discard(part)
            raise ModelError(f"{self.tally.what}: {file.name} arrived wrong: {problem}")
        part.rename(target)
        _etag_path(part).unlink(missing_ok=True)

    def _whole(self, file: RemoteFile, part: Path) -> None:
        def size() -> int:
            return part.stat().st_size if part.exists() else 0

        if file.size is None or size() != file.size:
            with_retries(self.work, f"{self.tally.what}: {file.name}", lambda: self._continue(file, part, size()), size)

    def _continue(self, file: RemoteFile, part: Path, offset: int) -> None:
        headers = {"Accept-Encoding": "identity"} | dict(file.headers)
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if _etag_path(part).exists():
                headers["If-Range"] = _etag_path(part).read_text()
        with self.client.stream("GET", file.url, headers=headers) as response:
            raise_for_passing_trouble(response)
            if response.status_code == 416:
                part.unlink()
                raise Transient("the source's file is shorter than what was fetched before")
            if response.status_code not in (200, 206):
                raise self.refusal(response, file.name)
            continues = response.status_code == 206
            if continues and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise Transient("the source sent another range than was asked for")
            if not continues:
                self._remember_etag(part, response)
            self._append(response, part, os.O_APPEND if continues else os.O_TRUNC)

    def _remember_etag(self, part: Path, response: httpx.Response) -> None:
        etag = response.headers.get("ETag", "")
        if etag.startswith('"'):
            _etag_path(part).write_text(etag)
        else:
            _etag_path(part).unlink(missing_ok=True)

    def _append(self, response: httpx.Response, part: Path, mode: int) -> None:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode, 0o644)
        with open(descriptor, "wb") as out:
            for chunk in response.iter_raw():
                if self.stopped():
                    raise ModelError(f"{self.tally.what}: stopped")
                out.write(chunk)
                self.tally.add(len(chunk))


def _etag_path(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink()
    _etag_path(part).unlink(missing_ok=True)


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def mismatch(file: RemoteFile, path: Path) -> str | None:
    """How the file on disk differs from what the source lists, or None when it does not, or the source lists nothing."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size} bytes instead of {file.size}"
    if file.digest is None:
        return None
    hasher = _hasher(file.digest, size)
    with open(path, "rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            hasher.update(chunk)
    same = hasher.hexdigest() == file.digest.value
    return None if same else f"its {file.digest.kind} is {hasher.hexdigest()}, not {file.digest.value}"


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
