"""The disk tier of a rank: a log of KV pages that survives the process, on a local disk.

    put: newest segment, slot after slot       full segment -> next segment       drop: the slot is dead
    dead segment: removed       no room for a segment: the one with the fewest live pages is removed, its pages are dropped

The room is that of `max_bytes`, and of the file system if that is less: new pages replace old ones there too.

Compaction, between writes and reads, spares those pages. A log is a cache: it loses pages (a full disk, a power failure, damage),
but a page that it returns is one that was put under this key, by its 128-bit checksum.
"""

import errno
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.rank.tiers.compaction import WriteBudget, choose_layout, choose_source, live_limit
from phalanx_runtime.rank.tiers.files import Files, LocalFiles
from phalanx_runtime.rank.tiers.folder import DiskUnavailable, OwnedFolder, identity_digest, make_room, own_folder
from phalanx_runtime.rank.tiers.live_pages import LivePages
from phalanx_runtime.rank.tiers.segment import KEY_BYTES, Segment, StoredPage
from phalanx_runtime.rank.tiers.segment_store import SegmentStore

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
WRITE_BUDGET = 32e6
"""Bytes per second that compaction may write."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FULL_S = 60.0
"""If a page finds no room on the file system though a segment was removed, no other segment is for this time. As long, at
least, between two searches for pages of other identities."""
PIECE_BYTES = 4 << 20
"""Bytes that one call of `compact` copies at most, or one page."""


@dataclass(slots=True, kw_only=True)
class LogCounters:
    """Counts since the start."""

    writes: int = 0
    """Pages written by `put`."""
    unwritten: int = 0
    """Pages that could not be written."""
    reads: int = 0
    """Calls of `get`."""
    hits: int = 0
    corrupt: int = 0
    """Pages dropped because they could not be read or had another checksum."""
    evicted: int = 0
    """Pages dropped by the eviction policy."""
    displaced: int = 0
    """Pages dropped with their segment."""
    compacted_bytes: int = 0
    """Bytes that compaction wrote."""
    reclaimed_bytes: int = 0
    """Bytes of segments that were removed, free slots included."""
    foreign: int = 0
    """Files in the folder that are not ours, as found at the start."""

    @property
    def dropped(self) -> int:
        """Pages that were lost."""
        return self.corrupt + self.evicted + self.displaced


class PageLog:
    """Pages by key. Segments never exceed `max_bytes`, also during compaction. Not thread-safe: one thread calls all methods.

    `identity` describes what a page depends on but its key: model, KV dtype, layout, shard. Every page has `page_bytes`.
    Policies know no chains: pages of a chain should be put and read from its end, so that the first page is dropped last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        page_bytes: int,
        identity: bytes,
        eviction: EvictionPolicy = "lru",
        segment_bytes: int = SEGMENT_BYTES,
        write_budget: float = WRITE_BUDGET,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns the identity's folder in `folder` and indexes its pages. `clock`: monotonic seconds.

        Raises DiskUnavailable, and ValueError if `max_bytes` is too small for the pages.
        """
        self.counters = LogCounters()
        self.page_bytes = page_bytes
        layout = choose_layout(max_bytes, page_bytes, segment_bytes)
        self._pages = LivePages(live_limit(max_bytes, layout), eviction)
        self._budget = WriteBudget(write_budget, page_bytes)
        self._files = files or LocalFiles()
        self._buffer = memoryview(bytearray(page_bytes))
        self._has_failed = False
        self._clock, self._full_until_s, self._searched_s = clock, -math.inf, -math.inf
        digest = identity_digest(identity, page_bytes)
        path = folder / digest.hex()
        self._store = SegmentStore(path, digest, layout, max_bytes, self._files)
        self._owned = self._open(path)

    @property
    def capacity(self) -> int:
        """Pages that can be live."""
        return self._pages.capacity

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments with those of free slots: an upper bound of the files' sizes."""
        return self._store.num_bytes

    def keys(self) -> list[bytes]:
        """Returns the keys of all pages, the one written first at the front."""
        return self._pages.keys()

    def __contains__(self, key: bytes) -> bool:
        return self._pages.get(key) is not None

    def put(self, key: bytes, parts: Sequence[memoryview]) -> list[bytes]:
        """Writes a page, or records a use of the one that has the key. `parts`: contiguous, `page_bytes` in all, else ValueError.

        Returns the keys that were dropped, with `key` if the page could not be written.
        """
        if len(key) != KEY_BYTES or sum(part.nbytes for part in parts) != self.page_bytes:
            raise ValueError(f"a page has a key of {KEY_BYTES} bytes and {self.page_bytes} bytes")
        if (found := self._pages.get(key)) is not None:
            self._pages.touch(found)
            return []
        dropped: list[bytes] = []
        try:
            page = self._write(key, parts, dropped)
        except OSError as error:
            self.counters.unwritten += 1
            self._record_failure(error)
            return [*dropped, key]
        self.counters.writes += 1
        if (victim := self._pages.victim()) is not None:
            self.counters.evicted += 1
            dropped.append(self._drop(victim))
        self._pages.add(page)
        return dropped

    def get(self, key: bytes, into: memoryview) -> bool:
        """Returns whether `into` is the page now; else its bytes are undefined. Drops a page that fails verification.

        Raises ValueError for another size than `page_bytes`.
        """
        if into.nbytes != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes")
        self.counters.reads += 1
        page = self._pages.get(key)
        if page is None:
            return False
        if not self._store.read(page, into.cast("B")):
            self._drop_corrupt(page)
            return False
        self.counters.hits += 1
        self._pages.touch(page)
        return True

    def compact(self, now_s: float) -> list[bytes]:
        """Copies some pages within the write budget, if few segments can be created. `now_s`: monotonic seconds.

        Returns the dropped keys: those of pages that fail verification.
        """
        self._budget.update(now_s)
        dropped: list[bytes] = []
        store = self._store
        try:
            for _ in range(max(1, PIECE_BYTES // self.page_bytes)):
                can_write = store.prepare()
                source = choose_source(store.full, store.room, store.layout)
                if source is None or not can_write or not self._budget.take(self.page_bytes):
                    break
                dropped += self._move(next(iter(source.pages.values())))
        except OSError as error:
            self._record_failure(error)
        return dropped

    def close(self) -> None:
        """Lets another process own the folder. Nothing is written."""
        self._store.close()
        self._files.close(self._owned.lock)

    def _open(self, path: Path) -> OwnedFolder:
        """Owns the folder and indexes its pages."""
        try:
            owned = own_folder(path, self._files)
        except OSError as error:
            raise DiskUnavailable(f"cannot use {path}: {error}") from error
        try:
            self._index()
        except OSError as error:
            self._files.close(owned.lock)
            raise DiskUnavailable(f"cannot use {path}: {error}") from error
        self._remove_others(path, self._store.room)
        return owned

    def _index(self) -> None:
        pages, former, foreign = self._store.load()
        for page in pages[-self.capacity :]:
            self._pages.add(page)
        for page in [*former, *pages[: -self.capacity]]:  # else a restart finds them once the others are dropped
            if page.segment.pages or page.segment is self._store.head:
                self._reclaim(page.segment, page.slot)
        for segment in self._store.full[:]:
            if not segment.pages:
                self._store.remove(segment)
        while self._store.room < 0:
            self._displace()
        self.counters.foreign = len(foreign)
        if foreign:
            log.warning("files in the folder of pages are not ours", extra={"names": foreign[:10], "count": len(foreign)})

    def _write(self, key: bytes, parts: Sequence[memoryview], dropped: list[bytes]) -> StoredPage:
        """Writes a page, again after a full file system got room. Adds to `dropped` the keys that made room. Raises OSError."""
        checksum = self._store.checksum(key, parts)
        while not self._store.prepare():
            dropped += self._displace()
        try:
            return self._store.write(key, checksum, parts)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._make_room(dropped):
                raise
        page = self._store.write(key, checksum, parts)
        self._full_until_s = -math.inf
        return page

    def _make_room(self, dropped: list[bytes]) -> bool:
        """Returns whether it removed pages of other identities from a full file system, or a full segment. Raises OSError."""
        now = self._clock()
        if now >= self._searched_s + FULL_S:
            self._searched_s = now
            if self._remove_others(self._owned.path, self._store.layout.size):
                return True
        if now < self._full_until_s or not self._store.full:
            return False
        self._full_until_s = now + FULL_S
        dropped += self._displace()
        return True

    def _remove_others(self, path: Path, needed: int) -> int:
        """Removes unused folders of other identities until the file system has `needed` bytes. Returns how many."""
        try:
            removed = make_room(path, needed, self._files, time.time())
        except OSError as error:
            log.warning("cannot remove pages of other identities", extra={"folder": str(path.parent)}, exc_info=error)
            return 0
        if removed:
            log.info("pages of other identities removed", extra={"folder": str(path.parent), "count": removed})
        return removed

    def _move(self, page: StoredPage) -> list[bytes]:
        """Copies a page to the head. Returns its key if it fails verification. Raises OSError; the page is then where it was."""
        if not self._store.read(page, self._buffer):
            return [self._drop_corrupt(page)]
        source, slot = page.segment, page.slot
        self._pages.move(page, self._store.write(page.key, page.checksum, [self._buffer]))
        self.counters.compacted_bytes += self.page_bytes
        self._reclaim(source, slot)
        return []

    def _displace(self) -> list[bytes]:
        """Removes the segment with the fewest live pages. Returns their keys. Raises OSError."""
        segment = min(self._store.full, key=lambda segment: len(segment.pages))
        pages = list(segment.pages.values())
        self._remove(segment)
        for page in pages:
            self._pages.remove(page)
        self.counters.displaced += len(pages)
        return [page.key for page in pages]

    def _drop_corrupt(self, page: StoredPage) -> bytes:
        if not self.counters.corrupt:
            log.warning("a page on disk fails verification", extra={"path": str(page.segment.path), "slot": page.slot})
        self.counters.corrupt += 1
        return self._drop(page)

    def _drop(self, page: StoredPage) -> bytes:
        self._pages.remove(page)
        self._reclaim(page.segment, page.slot)
        return page.key

    def _reclaim(self, segment: Segment, slot: int) -> None:
        """Removes a full segment without live pages, else marks the slot as dead.

        If that fails, a restart finds the page again, and the segment is the next to be displaced.
        """
        try:
            if segment.pages or segment is self._store.head:
                self._store.mark_dead(segment, slot)
            else:
                self._remove(segment)
        except OSError as error:
            self._record_failure(error)

    def _remove(self, segment: Segment) -> None:
        self._store.remove(segment)
        self.counters.reclaimed_bytes += segment.layout.size

    def _record_failure(self, error: OSError) -> None:
        """Logs the first failure."""
        if not self._has_failed:
            log.warning("cannot write pages to disk", exc_info=error)
        self._has_failed = True
