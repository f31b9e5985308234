"""Segments of the disk tier: files that hold pages of one size, filled once from the first slot to the last.

    segment header | one record per slot | padding to 4096 | one page per slot
    segment header: magic, version, slots, bytes of a page, digest of the identity, checksum of these
    record: magic, key, checksum of the page, checksum of these           zeros: free slot; another magic: dead slot

A page is written before its record, so a process that dies leaves a free slot, or a record whose page is whole. After a power
failure anything may be on disk: each read of a page compares its checksum. No write waits for the disk (fsync).

All records are in one place, so that an index is rebuilt with one read per segment, independent of the size of pages.
"""

import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from phalanx_runtime.rank.tiers.files import Files

KEY_BYTES = 16
DIGEST_BYTES = 16
MAGIC = b"PHXPAGES"
VERSION = 1
NAME = re.compile(r"(\d{8,})\.pages")
_HEADER = Struct("<8sIIQ16s")
_SUM = Struct("<I")
_RECORD = Struct("<4s16s16sI")
_LIVE = b"page"
DEAD = memoryview(b"dead")
"""Replaces the magic of a record: 4 bytes that no block boundary divides."""
_RECORDS_AT = 64
_ALIGNMENT = 4096
_FREE = bytes(_RECORD.size)


def page_checksum(identity: bytes, key: bytes, parts: Iterable[memoryview]) -> bytes:
    """Returns the first 16 bytes of SHA-256 of the identity's digest, the key and the page."""
    hasher = hashlib.sha256(identity + key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in a segment, in bytes."""

    page_bytes: int
    slots: int

    @staticmethod
    def within(page_bytes: int, size: int) -> "Layout":
        """Returns the layout with the most slots, at least one, in `size` bytes."""
        slots = (size - _RECORDS_AT) // (_RECORD.size + page_bytes)
        while slots > 1 and Layout(page_bytes, slots).size > size:  # because of the padding
            slots -= 1
        return Layout(page_bytes, max(1, slots))

    @property
    def pages_at(self) -> int:
        """Offset of the first page."""
        return -(-self.record_at(self.slots) // _ALIGNMENT) * _ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes of a full segment."""
        return self.page_at(self.slots)

    def record_at(self, slot: int) -> int:
        """Offset of a record."""
        return _RECORDS_AT + slot * _RECORD.size

    def page_at(self, slot: int) -> int:
        """Offset of a page."""
        return self.pages_at + slot * self.page_bytes


@dataclass(slots=True, eq=False)
class StoredPage:
    """A page on disk. `number`: its index in the eviction policy."""

    key: bytes
    checksum: bytes
    segment: "Segment"
    slot: int
    number: int = -1


@dataclass(slots=True, eq=False)
class Segment:
    """A segment and its live pages, by key."""

    path: Path
    number: int
    """Later segments have larger numbers."""
    layout: Layout
    size: int
    """Bytes on disk once all slots are filled."""
    used: int = 0
    """Slots before it are filled or damaged."""
    pages: dict[bytes, StoredPage] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        """Slots without a live page."""
        return self.layout.slots - len(self.pages)


def create(files: Files, segment: Segment, identity: bytes) -> int:
    """Returns the descriptor of a new segment's file, with its header. Raises OSError."""
    file = files.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        header = _HEADER.pack(MAGIC, VERSION, segment.layout.slots, segment.layout.page_bytes, identity)
        files.write(file, [memoryview(header + _SUM.pack(zlib.crc32(header)))], 0)
    except OSError:
        files.close(file)
        with suppress(OSError):  # the next start removes it
            files.remove(segment.path)
        raise
    return file


def record(key: bytes, checksum: bytes) -> memoryview:
    """Returns the record of a page."""
    start = _LIVE + key + checksum
    return memoryview(start + _SUM.pack(zlib.crc32(start)))


def scan(files: Files, path: Path, identity: bytes, page_bytes: int) -> tuple[Segment, list[StoredPage]] | None:
    """Returns a segment of this identity and the pages that its records name, in order; None if the file is foreign.

    A damaged file that starts as a segment, or with zeros as after a power failure, is one without slots. Raises OSError.
    """
    file = files.open(path, os.O_RDONLY)
    try:
        size = files.size(file)
        header = _read(files, file, _HEADER.size + _SUM.size, 0)
        if any(header) and not MAGIC.startswith(header[: len(MAGIC)]):
            return None
        segment = Segment(path, number_of(path.name), Layout(page_bytes, 0), size)
        if len(header) < _HEADER.size + _SUM.size or zlib.crc32(header[:-4]) != _SUM.unpack(header[-4:])[0]:
            return segment, []
        _, version, slots, *owner = _HEADER.unpack(header[:-4])
        if (version, owner) != (VERSION, [page_bytes, identity]):
            return None
        layout = segment.layout = Layout(page_bytes, slots)
        segment.size = max(size, layout.size)
        records = _read(files, file, slots * _RECORD.size, layout.record_at(0))
        pages = [StoredPage(key, checksum, segment, slot) for slot, key, checksum in _valid(segment, records)]
        return segment, [page for page in pages if layout.page_at(page.slot + 1) <= size]
    finally:
        files.close(file)


def number_of(name: str) -> int:
    """Returns the number in the name of a segment, 0 for other names."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _valid(segment: Segment, records: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields slot, key and checksum of each whole record, and sets `used`."""
    whole = records[: len(records) // _RECORD.size * _RECORD.size]
    for slot, (magic, key, checksum, value) in enumerate(_RECORD.iter_unpack(whole)):
        at = slot * _RECORD.size
        raw = whole[at : at + _RECORD.size]
        if raw != _FREE:
            segment.used = slot + 1
            if magic == _LIVE and zlib.crc32(raw[:-4]) == value:
                yield slot, key, checksum


def _read(files: Files, file: int, size: int, offset: int) -> bytes:
    data = bytearray(size)
    count = files.read(file, memoryview(data), offset)
    return bytes(data[:count])
