"""A damaged log opens, keeps the pages that are whole, and never returns a wrong one."""

import os
import shutil
from pathlib import Path

import pytest

from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.segment import DEAD, Layout, record
from tests.runtime.rank.tiers.faulty_files import FaultyFiles, Killed
from tests.runtime.rank.tiers.logs import (
    CAPACITY,
    LAYOUT,
    MAX_BYTES,
    get,
    key_of,
    open_log,
    page_of,
    put,
    put_all,
    segments,
    size_on_disk,
    wrong_pages,
)

SLOTS = LAYOUT.slots


def written(folder: Path, count: int) -> list[Path]:
    """Writes pages to a log and closes it. Returns its segments."""
    log = open_log(folder)
    put_all(log, range(count))
    log.close()
    return segments(folder)


def readable(log: PageLog) -> list[int]:
    """Returns which of the first pages the log returns. Fails if it returns a wrong one."""
    assert wrong_pages(log) == []
    return [number for number in range(CAPACITY) if get(log, key_of(number))]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["oldest", "middle", "newest"])
def test_a_segment_torn_anywhere_keeps_its_whole_pages(tmp_path: Path, at: int) -> None:
    source = written(tmp_path / "source", 3 * SLOTS)[at]
    data, others = source.read_bytes(), [number for number in range(3 * SLOTS) if number // SLOTS != at]
    ends = [64 + 40 * slot for slot in range(SLOTS + 1)] + [LAYOUT.page_at(slot) for slot in range(SLOTS + 1)]
    near = {end + change for end in ends for change in (-1, 0, 1)} & set(range(len(data) + 1))
    for size in sorted({*range(0, 184, 9), *near, *range(184, LAYOUT.pages_at, 601), *range(LAYOUT.pages_at, len(data), 11)}):
        folder = tmp_path / "torn"
        shutil.copytree(tmp_path / "source", folder)
        torn = folder / source.relative_to(tmp_path / "source")
        torn.write_bytes(data[:size])
        log = open_log(folder)
        whole = [at * SLOTS + slot for slot in range(SLOTS) if LAYOUT.page_at(slot + 1) <= size]
        assert readable(log) == sorted(others + whole) and log.counters.corrupt == 0
        put_all(log, range(3 * SLOTS))
        assert readable(log) == list(range(3 * SLOTS))
        log.close()
        shutil.rmtree(folder)


def test_any_changed_byte_costs_at_most_its_segment(tmp_path: Path) -> None:
    damaged = written(tmp_path, 3 * SLOTS)[1]
    data, lost = damaged.read_bytes(), []
    offsets = [*range(0, 64), *range(64, LAYOUT.record_at(SLOTS), 3), *range(LAYOUT.pages_at - 1, len(data), 3)]
    for offset in offsets:
        damaged.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
        log = open_log(tmp_path)
        lost.append(3 * SLOTS - len(readable(log)))
        log.close()
    assert set(lost) == {0, 1, SLOTS}
    assert lost[:44] == [SLOTS] * 44, "the header"
    assert lost.count(0) == 64 - 44 + 1, "padding"
    assert lost[64:].count(1) == len(lost) - 65, "a record or a page"


def test_a_header_of_zeros_is_ours(tmp_path: Path) -> None:
    damaged = written(tmp_path, 3 * SLOTS)[1]
    for size in (0, 7, LAYOUT.size):
        damaged.write_bytes(bytes(size))
        log = open_log(tmp_path)
        assert len(readable(log)) == 2 * SLOTS and not damaged.exists() and log.counters.foreign == 0
        log.close()


@pytest.mark.parametrize("name", ["00000002.pages", "99999999.pages", "00000001.pages.old", "notes.txt", "lost+found"])
def test_foreign_files_are_reported_and_left_alone(tmp_path: Path, name: str) -> None:
    first = written(tmp_path, SLOTS)[0]
    foreign = first.with_name(name)
    foreign.write_bytes(b"something else")
    log = open_log(tmp_path)
    assert log.counters.foreign == 1 and len(readable(log)) == SLOTS
    put_all(log, range(5 * CAPACITY))
    assert foreign.read_bytes() == b"something else"
    assert size_on_disk(tmp_path) - foreign.stat().st_size <= MAX_BYTES
    log.close()
    log = open_log(tmp_path)
    assert wrong_pages(log) == [] and len(log.keys()) == CAPACITY and log.counters.unwritten == 0


def test_a_segment_of_another_identity_is_foreign(tmp_path: Path) -> None:
    other = open_log(tmp_path / "other", identity=b"another model")
    put(other, 1)
    other.close()
    own = written(tmp_path / "own", SLOTS)[0]
    foreign = own.with_name("00000007.pages")
    shutil.copy(segments(tmp_path / "other")[0], foreign)
    log = open_log(tmp_path / "own")
    assert log.counters.foreign == 1 and readable(log) == list(range(SLOTS)) and foreign.exists()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_foreign(tmp_path: Path, kind: str) -> None:
    first = written(tmp_path / "log", SLOTS)[0]
    odd = first.with_name("00000002.pages")
    target = tmp_path / "target"
    target.write_bytes(b"")
    {"folder": lambda: odd.mkdir(), "link": lambda: odd.symlink_to(target), "pipe": lambda: os.mkfifo(odd)}[kind]()
    log = open_log(tmp_path / "log")
    assert log.counters.foreign == 1 and readable(log) == list(range(SLOTS))
    assert os.path.lexists(odd) and target.exists()


def test_a_page_under_another_key_is_never_returned(tmp_path: Path) -> None:
    """Records that are whole but in the wrong place, as after a write that the disk misplaced."""
    path = written(tmp_path, SLOTS)[0]
    data = bytearray(path.read_bytes())
    first, second, third = (LAYOUT.record_at(slot) for slot in range(3))
    data[first:second], data[second:third] = data[second:third], data[first:second]
    path.write_bytes(data)
    log = open_log(tmp_path)
    assert readable(log) == [2] and log.counters.corrupt == 2


def test_a_record_with_another_key_finds_nothing(tmp_path: Path) -> None:
    """The record is whole, and its checksum is that of the page in its slot."""
    path = written(tmp_path, SLOTS)[0]
    data = bytearray(path.read_bytes())
    start = LAYOUT.record_at(0)
    forged = record(key_of(7), bytes(data[start + 20 : start + 36]))
    data[start : start + len(forged)] = forged
    path.write_bytes(data)
    log = open_log(tmp_path)
    assert key_of(7) in log and readable(log) == [1, 2] and log.counters.corrupt == 1


def test_damage_found_by_compaction_is_dropped(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put_all(log, range(CAPACITY))
    for path in segments(tmp_path):
        data = bytearray(path.read_bytes())
        data[LAYOUT.page_at(1)] ^= 1
        path.write_bytes(data)
    dropped = []
    for number in range(CAPACITY, 2 * CAPACITY):
        put_all(log, range(0, CAPACITY, 2))  # a use of those that are there
        put(log, number)
        dropped += log.compact(number)
    assert dropped and log.counters.corrupt == len(dropped) and log.counters.compacted_bytes > 0
    assert wrong_pages(log) == []


def test_former_copy_of_a_dropped_page_stays_lost(tmp_path: Path) -> None:
    """A kill between copy and mark leaves a page in two segments, of which the log knows the newer one."""
    first = written(tmp_path, SLOTS)[0]
    data = bytearray(first.read_bytes())
    for slot in range(1, SLOTS):
        data[LAYOUT.record_at(slot) : LAYOUT.record_at(slot) + len(DEAD)] = DEAD
    data[LAYOUT.page_at(0)] ^= 1
    first.with_name("00000009.pages").write_bytes(data)
    log = open_log(tmp_path)
    assert readable(log) == [1, 2] and log.counters.corrupt == 1
    log.close()
    log = open_log(tmp_path)
    assert key_of(0) not in log and readable(log) == [1, 2]


def write_and_compact(log: PageLog, done: list[int]) -> None:
    """Writes pages in two waves, so that compaction copies some. `done`: the pages that were put, in order."""
    for number in range(CAPACITY + 40):
        if number >= CAPACITY:
            put_all(log, range(0, CAPACITY, 4))  # a use of those that are there
        put(log, number)
        done.append(number)
        log.compact(number)


def test_a_kill_at_any_byte_leaves_whole_pages(tmp_path: Path) -> None:
    files, steps = FaultyFiles(), 1 << 30
    files.life = steps
    log = open_log(tmp_path / "whole", files=files)
    write_and_compact(log, [])
    assert log.counters.compacted_bytes > 0
    end = steps - files.life
    start = (CAPACITY + 1) * (LAYOUT.page_bytes + 40)
    for life in {*range(0, 200, 9), *range(start, end, 61)}:
        files, done = FaultyFiles(), list[int]()
        folder = tmp_path / str(life)
        log = open_log(folder, files=files)
        files.life = life
        with pytest.raises(Killed):
            write_and_compact(log, done)
        live = set(log.keys())
        log.close()
        log = open_log(folder)
        assert len(live - set(log.keys())) <= 1, "the victim of the last page"
        assert len(set(log.keys()) - live) <= 1, "the last page"
        assert wrong_pages(log) == [] and log.counters.corrupt == 0
        assert size_on_disk(folder) <= log.bytes_on_disk <= MAX_BYTES
        put_all(log, range(CAPACITY))
        assert wrong_pages(log) == [] and page_of(key_of(3)) == get(log, key_of(3))
        log.close()
        shutil.rmtree(folder)


def test_another_segment_size_is_no_obstacle(tmp_path: Path) -> None:
    def opened(slots: int) -> PageLog:
        return PageLog(
            tmp_path,
            max_bytes=MAX_BYTES * 4,
            page_bytes=LAYOUT.page_bytes,
            identity=b"model",
            segment_bytes=Layout(LAYOUT.page_bytes, slots).size,
        )

    for turn, slots in enumerate([3, 7, 1, 5]):
        log = opened(slots)
        assert len(readable(log)) == 10 * turn
        put_all(log, range(10 * turn, 10 * turn + 10))
        log.close()
