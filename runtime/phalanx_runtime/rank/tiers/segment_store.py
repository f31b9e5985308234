"""The segments of one folder: which exist, which takes the next page, and how pages are written and read."""

import os
from collections.abc import Sequence
from pathlib import Path

from phalanx_runtime.rank.tiers.files import Files
from phalanx_runtime.rank.tiers.folder import LOCK
from phalanx_runtime.rank.tiers.segment import DEAD, Layout, Segment, StoredPage, create, number_of, page_checksum, record, scan


class SegmentStore:
    """Segments of at most `max_bytes`. The newest one, the head, takes pages until its slots are used."""

    def __init__(self, path: Path, identity: bytes, layout: Layout, max_bytes: int, files: Files) -> None:
        self.layout = layout
        """Of new segments."""
        self.full: list[Segment] = []
        """All segments but the head, the oldest first."""
        self.head: Segment | None = None
        self._head_file = -1
        self._path = path
        self._identity = identity
        self._max_bytes = max_bytes
        self._files = files
        self._last_number = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments with those of free slots: an upper bound of the files' sizes."""
        return sum(segment.size for segment in self.full) + (self.head.size if self.head else 0)

    @property
    def room(self) -> int:
        """Bytes that new segments may take."""
        return self._max_bytes - self.num_bytes

    def load(self) -> tuple[list[StoredPage], list[StoredPage], list[str]]:
        """Finds the segments. Returns the newest page of each key, in order, the others, and the names of foreign files.

        Raises OSError. A kill between copy and mark leaves a page in two segments.
        """
        found: dict[bytes, StoredPage] = {}
        former, foreign = [], []
        for name in sorted(set(self._files.names(self._path)) - {LOCK}, key=number_of):
            self._last_number = max(self._last_number, number_of(name))
            scanned = self._scan(name)
            if scanned is None:
                foreign.append(name)
                continue
            segment, pages = scanned
            self.full.append(segment)
            for page in pages:
                if page.key in found:
                    former.append(found.pop(page.key))
                found[page.key] = page
        self._resume()
        return list(found.values()), former, foreign

    def prepare(self) -> bool:
        """Returns whether a page can be written: else a full segment must be removed first."""
        if self.head is not None and self.head.used < self.layout.slots:
            return True
        self._seal()
        return self.room >= self.layout.size

    def write(self, key: bytes, checksum: bytes, parts: Sequence[memoryview]) -> StoredPage:
        """Writes a page to the next slot, after `prepare`. Raises OSError; the slot is then still free."""
        segment = self.head or self._create()
        slot, layout = segment.used, segment.layout
        self._files.write(self._head_file, parts, layout.page_at(slot))
        self._files.write(self._head_file, [record(key, checksum)], layout.record_at(slot))
        segment.used += 1
        return StoredPage(key, checksum, segment, slot)

    def checksum(self, key: bytes, parts: Sequence[memoryview]) -> bytes:
        """Returns the checksum of a page of this folder's identity."""
        return page_checksum(self._identity, key, parts)

    def read(self, page: StoredPage, into: memoryview) -> bool:
        """Returns whether the page is read and is the one that was written; else `into` has other bytes."""
        segment = page.segment
        try:
            file = self._files.open(segment.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            count = self._files.read(file, into, segment.layout.page_at(page.slot))
        except OSError:
            return False
        finally:
            self._files.close(file)
        return count == len(into) and self.checksum(page.key, [into]) == page.checksum

    def mark_dead(self, segment: Segment, slot: int) -> None:
        """Lets no restart find the page in a slot. Raises OSError."""
        at = segment.layout.record_at(slot)
        if segment is self.head:
            self._files.write(self._head_file, [DEAD], at)
            return
        file = self._files.open(segment.path, os.O_WRONLY)
        try:
            self._files.write(file, [DEAD], at)
        finally:
            self._files.close(file)

    def remove(self, segment: Segment) -> None:
        """Removes a full segment's file. Raises OSError; the segment is then still there."""
        self._files.remove(segment.path)
        self.full.remove(segment)

    def close(self) -> None:
        """Closes the head."""
        if self.head is not None:
            self._files.close(self._head_file)
            self.full.append(self.head)
            self.head = None

    def _scan(self, name: str) -> tuple[Segment, list[StoredPage]] | None:
        if not number_of(name):
            return None
        try:
            return scan(self._files, self._path / name, self._identity, self.layout.page_bytes)
        except OSError:
            return None

    def _resume(self) -> None:
        """Continues the newest segment, if it has free slots."""
        if self.full and self.full[-1].layout == self.layout and self.full[-1].used < self.layout.slots:
            self._head_file = self._files.open(self.full[-1].path, os.O_RDWR)
            self.head = self.full.pop()

    def _seal(self) -> None:
        """Counts the head among the full segments."""
        head = self.head
        self.close()
        if head is not None and not head.pages:
            self.remove(head)

    def _create(self) -> Segment:
        self._last_number += 1
        path = self._path / f"{self._last_number:08d}.pages"
        segment = Segment(path, self._last_number, self.layout, self.layout.size)
        self._head_file = create(self._files, segment, self._identity)
        self.head = segment
        return segment
