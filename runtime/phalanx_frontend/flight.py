"""The flight recorder of a process: a ring in a file, which survives the process and which another one reads.

A file costs nothing to read from outside: neither the event loop of a router nor the steps of a rank wait for a reader.
"""

import fcntl
import logging
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from phalanx_api.flight.entries import ClockOffset, Entry, GroupSize, ProcessKind, Recording, TimedEntry
from phalanx_api.flight.ring import MIN_BYTES, RingWriter, read_ring

log = logging.getLogger(__name__)

ROUTER_BYTES, RANK_BYTES = 8 << 20, 4 << 20
_SUFFIX = ".ring"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class FlightRecorder(Protocol):
    """Keeps the latest entries."""

    def record(self, entry: Entry) -> None:
        """Appends an entry, whose clock is `time.monotonic`."""
        ...


class _NoFlightRecorder:
    def record(self, entry: Entry) -> None:
        pass


NO_FLIGHT_RECORDER: FlightRecorder = _NoFlightRecorder()


class FileRecorder:
    """Implements FlightRecorder. One process writes a file."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Opens `path`, and continues it if it has this size. Raises OSError, also while another process writes it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size != num_bytes:
            path.unlink()  # another process may have mapped it, so it is not truncated
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)  # else a full disk ends this process at a later write
            self._map = mmap.mmap(self._file.fileno(), num_bytes)
        except OSError:
            self._file.close()
            raise
        self._ring = RingWriter(memoryview(self._map), lambda: time.time() - time.monotonic())

    def record(self, entry: Entry) -> None:
        """See FlightRecorder."""
        self._ring.append(_encode(entry))

    def close(self) -> None:
        """Lets another process write the file."""
        self._file.close()


def open_recorder(folder: Path | None, name: str, num_bytes: int) -> FlightRecorder:
    """Returns the recorder of process `name`: one that keeps nothing without a folder, or with one that cannot be written."""
    if folder is None:
        return NO_FLIGHT_RECORDER
    try:
        return FileRecorder(folder / f"{name}{_SUFFIX}", num_bytes)
    except OSError as error:
        log.warning("no flight recorder", extra={"folder": str(folder), "why": str(error)})
        return NO_FLIGHT_RECORDER


def rank_name(rank: int) -> str:
    """Returns the name of a rank's recorder."""
    return f"rank-{rank}"


def read_recordings(folder: Path, *, pod: str, group: str = "", since_s: float = 0.0) -> Iterator[Recording]:
    """Yields the recordings in a folder, with the entries since Unix time `since_s`. Raises OSError."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        name, _, number = path.name.removesuffix(_SUFFIX).partition("-")
        kind: ProcessKind = "rank" if name == "rank" else "router"
        entries, unknown = _entries(path.read_bytes(), since_s)
        rank = int(number) if number.isdecimal() else 0
        yield Recording(kind=kind, pod=pod, group=group, rank=rank, entries=entries, unknown=unknown)


def _entries(buffer: bytes, since_s: float) -> tuple[list[TimedEntry], int]:
    """Entries since a time, and before them the last ones about each group, which hold until the next."""
    entries, unknown = [], 0
    groups: dict[tuple[type, str], TimedEntry] = {}
    for record in read_ring(buffer) if len(buffer) >= MIN_BYTES else ():
        try:
            entry = _decode(record.payload)
        except msgspec.DecodeError:
            unknown += 1
            continue
        timed = TimedEntry(entry.at + record.clock_offset_s, entry)
        if timed.unix_s >= since_s:
            entries.append(timed)
        elif isinstance(entry, ClockOffset | GroupSize):
            groups[type(entry), entry.group] = timed
    return [*groups.values(), *entries], unknown


def print_recordings(folder: Path | None, *, pod: str, group: str = "", seconds: float | None = None) -> Iterator[str]:
    """Yields a JSON line per recording of a folder, with the entries of the last `seconds`. Raises OSError."""
    since_s = 0.0 if seconds is None else time.time() - seconds
    if folder is not None:
        for recording in read_recordings(folder, pod=pod, group=group, since_s=since_s):
            yield msgspec.json.encode(recording).decode()
