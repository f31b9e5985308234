"""A ring of records in a buffer of fixed size, which another process may read while it is written.

    buffer   SEGMENTS of equal size; the oldest is overwritten as a whole
    segment  magic, sequence number, clock offset, then records
    record   length, CRC-32, payload; a length of 0 ends the segment

A reader copies the buffer and takes from each segment the records before the first torn one. A writer that opens a used buffer
continues it, so the records of a process that died stay until they are overwritten.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SEGMENTS = 16
MIN_BYTES = SEGMENTS * 1024
_MAGIC = b"PLX1"
_MAX_SEQUENCE = 1 << 62
"""A header beyond it is corrupt."""
_HEADER = struct.Struct("<4sQd")
_RECORD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class RingRecord:
    """One record of a ring."""

    clock_offset_s: float  # Unix time less the writer's clock, when the segment began
    payload: bytes


class RingWriter:
    """Appends records to `buffer`, which has at least `MIN_BYTES`. `clock_offset`: Unix time less the writer's clock."""

    def __init__(self, buffer: memoryview, clock_offset: Callable[[], float]) -> None:
        if len(buffer) < MIN_BYTES:
            raise ValueError(f"a ring needs {MIN_BYTES} bytes, not {len(buffer)}")
        self._buffer = buffer
        self._clock_offset = clock_offset
        self._size = len(buffer) // SEGMENTS
        starts = [_HEADER.unpack_from(buffer, index * self._size) for index in range(SEGMENTS)]
        sequences = [sequence if magic == _MAGIC and sequence < _MAX_SEQUENCE else 0 for magic, sequence, _ in starts]
        self._sequence = max(sequences)
        self._segment = sequences.index(self._sequence) if self._sequence else SEGMENTS - 1
        self._at = self._end = 0
        self._begin_segment()

    def append(self, payload: bytes) -> None:
        """Writes a record, in place of the oldest segment if the present one is full. Drops one longer than a segment."""
        size = _RECORD.size + len(payload)
        if size + _RECORD.size > self._size - _HEADER.size:
            return
        if self._at + size + _RECORD.size > self._end:
            self._begin_segment()
        body = self._at + _RECORD.size
        self._buffer[body : body + len(payload)] = payload
        _RECORD.pack_into(self._buffer, body + len(payload), 0, 0)
        _RECORD.pack_into(self._buffer, self._at, len(payload), zlib.crc32(payload))
        self._at = body + len(payload)

    def _begin_segment(self) -> None:
        self._segment = (self._segment + 1) % SEGMENTS
        self._sequence += 1
        start = self._segment * self._size
        self._at, self._end = start + _HEADER.size, start + self._size
        _RECORD.pack_into(self._buffer, self._at, 0, 0)
        _HEADER.pack_into(self._buffer, start, _MAGIC, self._sequence, self._clock_offset())


def read_ring(buffer: bytes) -> list[RingRecord]:
    """Returns the records, oldest first. `buffer`: a copy; records that were being written are absent."""
    size = len(buffer) // SEGMENTS
    found = []
    for start in range(0, SEGMENTS * size, size) if size > _HEADER.size else ():
        magic, sequence, offset_s = _HEADER.unpack_from(buffer, start)
        if magic == _MAGIC:
            found.append((sequence, [RingRecord(offset_s, payload) for payload in _payloads(buffer, start, size)]))
    return [record for _, records in sorted(found, key=lambda pair: pair[0]) for record in records]


def _payloads(buffer: bytes, start: int, size: int) -> list[bytes]:
    payloads, at, end = [], start + _HEADER.size, start + size
    while at + _RECORD.size <= end:
        length, checksum = _RECORD.unpack_from(buffer, at)
        payload = buffer[at + _RECORD.size : at + _RECORD.size + length]
        if not length or at + _RECORD.size + length > end or zlib.crc32(payload) != checksum:
            break
        payloads.append(payload)
        at += _RECORD.size + length
    return payloads
