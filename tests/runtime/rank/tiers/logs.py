"""Small page logs for tests, with pages that follow from their keys."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.rank.tiers.compaction import MIN_SEGMENTS, live_limit
from phalanx_runtime.rank.tiers.files import Files
from phalanx_runtime.rank.tiers.folder import LOCK
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.segment import Layout

PAGE = 64
LAYOUT = Layout(PAGE, 3)
MAX_BYTES = MIN_SEGMENTS * LAYOUT.size
CAPACITY = live_limit(MAX_BYTES, LAYOUT)
FAST = 1e12
"""A write budget without effect."""


def open_log(
    folder: Path,
    *,
    identity: bytes = b"model",
    eviction: EvictionPolicy = "lru",
    max_bytes: int = MAX_BYTES,
    write_budget: float = FAST,
    files: Files | None = None,
) -> PageLog:
    return PageLog(
        folder,
        max_bytes=max_bytes,
        page_bytes=PAGE,
        identity=identity,
        eviction=eviction,
        write_budget=write_budget,
        files=files,
    )


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def page_of(key: bytes, version: int = 0) -> bytes:
    return hashlib.shake_128(b"%d " % version + key).digest(PAGE)


def put(log: PageLog, number: int, version: int = 0) -> list[bytes]:
    """Puts a page in three parts."""
    page = memoryview(page_of(key_of(number), version))
    return log.put(key_of(number), [page[:10], page[10:60], page[60:]])


def put_all(log: PageLog, numbers: Iterable[int]) -> list[bytes]:
    return [key for number in numbers for key in put(log, number)]


def get(log: PageLog, key: bytes) -> bytes | None:
    page = bytearray(PAGE)
    return bytes(page) if log.get(key, memoryview(page)) else None


def wrong_pages(log: PageLog) -> list[bytes]:
    """Returns the keys of pages that are not what was put; reads all."""
    return [key for key in log.keys() if get(log, key) not in (None, page_of(key))]


def segments(folder: Path) -> list[Path]:
    """Returns all files of all identities but the locks, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder))
