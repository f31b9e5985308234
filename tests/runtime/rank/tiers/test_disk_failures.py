"""A disk that is full, broken or read-only costs pages, never an exception, a wrong page or the bound."""

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx_runtime.rank.tiers.folder import DiskUnavailable
from phalanx_runtime.rank.tiers.page_log import FULL_S, PageLog
from tests.runtime.rank.tiers.faulty_files import BROKEN, FULL, READ_ONLY, FaultyFiles
from tests.runtime.rank.tiers.logs import (
    CAPACITY,
    LAYOUT,
    MAX_BYTES,
    PAGE,
    get,
    key_of,
    open_log,
    put,
    put_all,
    size_on_disk,
    wrong_pages,
)


@pytest.mark.parametrize("error", [FULL, BROKEN, READ_ONLY])
@pytest.mark.parametrize("operation", ["create", "write", "remove", "open", "read"])
def test_a_failing_operation_costs_pages_only(tmp_path: Path, operation: str, error: int) -> None:
    files = FaultyFiles()
    log = open_log(tmp_path, files=files)
    put_all(log, range(CAPACITY + 1))
    files.errors[operation] = error
    live = set(log.keys())
    for number in range(CAPACITY, 3 * CAPACITY):
        live.add(key_of(number))
        live -= set(put(log, number))
        before = set(log.keys())
        get(log, key_of(number - 20))
        live -= before - set(log.keys())
        live -= set(log.compact(number))
        assert set(log.keys()) == live
        assert size_on_disk(tmp_path) <= log.bytes_on_disk <= MAX_BYTES
    assert files.raised > 0
    assert (log.counters.unwritten > 0) == (operation in ("create", "write", "remove"))
    assert (log.counters.corrupt > 0) == (operation in ("open", "read"))
    files.errors.clear()
    put_all(log, range(3 * CAPACITY, 4 * CAPACITY))
    assert wrong_pages(log) == [] and key_of(4 * CAPACITY - 1) in log
    log.close()
    log = open_log(tmp_path)
    assert wrong_pages(log) == [] and log.bytes_on_disk <= MAX_BYTES and log.counters.foreign == 0


@pytest.mark.parametrize(("error", "num_lost"), [(FULL, LAYOUT.slots), (errno.EDQUOT, LAYOUT.slots), (BROKEN, 0)])
def test_a_full_disk_costs_a_segment_a_minute(tmp_path: Path, error: int, num_lost: int) -> None:
    """Others take the room of each segment that the log removes."""
    files, now = FaultyFiles(), 1000.0
    log = PageLog(tmp_path, max_bytes=MAX_BYTES, page_bytes=PAGE, identity=b"model", files=files, clock=lambda: now)
    put_all(log, range(CAPACITY))
    files.errors["write"] = error
    for turn in range(2):
        lost = [key_of(number) for number in range(turn * num_lost, (turn + 1) * num_lost)]
        assert put(log, CAPACITY) == [*lost, key_of(CAPACITY)]
        for number in range(CAPACITY + 1, 2 * CAPACITY):
            assert put(log, number) == [key_of(number)]
        now += FULL_S
    assert log.counters.unwritten == 2 * CAPACITY and log.counters.dropped == 2 * num_lost
    assert all(get(log, key_of(number)) for number in range(2 * num_lost, CAPACITY))
    files.errors.clear()
    assert key_of(CAPACITY) not in put(log, CAPACITY) and wrong_pages(log) == []


def test_a_failing_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    log = open_log(tmp_path, files=files)
    files.errors["write"] = FULL
    with caplog.at_level(logging.WARNING):
        put_all(log, range(10))
    assert [record.message for record in caplog.records] == ["cannot write pages to disk"]


@pytest.mark.parametrize("operation", ["create", "names"])
def test_a_folder_that_fails_has_no_disk_tier(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    files.errors[operation] = READ_ONLY
    with pytest.raises(DiskUnavailable, match="Read-only"):
        open_log(tmp_path, files=files)
    open_log(tmp_path)


def test_a_file_as_folder_has_no_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskUnavailable, match="cannot use"):
        open_log(tmp_path / "file")


def test_a_segment_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put_all(log, range(3))
    log.close()
    files = FaultyFiles()
    files.errors["read"] = BROKEN
    log = open_log(tmp_path, files=files)
    assert log.keys() == [] and log.counters.foreign == 1
    log.close()
    assert len(open_log(tmp_path).keys()) == 3


def test_a_deleted_folder_costs_pages_only(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put_all(log, range(10))
    for path in list(tmp_path.rglob("*.pages")):
        path.unlink()
    assert wrong_pages(log) == [] and log.keys() == [] and log.counters.corrupt == 10
    put_all(log, range(10, 20))
    assert wrong_pages(log) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_real_full_disk_costs_pages_only(small_disk: Path) -> None:
    page_bytes = 9000

    def opened() -> PageLog:
        return PageLog(small_disk, max_bytes=1 << 20, page_bytes=page_bytes, identity=b"model", segment_bytes=1 << 15)

    log, page = opened(), bytearray(page_bytes)
    for number in range(100):
        log.put(key_of(number), [memoryview(bytes([number]) * page_bytes)])
        assert key_of(number) in log, "new pages replace old ones"
        log.compact(number)
    assert log.counters.unwritten == 0 and log.counters.displaced > 20
    (small_disk / "other").write_bytes(b"")
    for turn in range(2):
        keys = log.keys()
        assert len(keys) > 20
        for number in range(100):
            if log.get(key_of(number), memoryview(page)):
                assert page == bytes([number]) * page_bytes
        assert log.counters.corrupt == 0 and log.keys() == keys, turn
        log.close()
        log = opened()
    log.close()


def test_a_file_system_filled_by_others_costs_new_pages(small_disk: Path) -> None:
    """A log of which no segment is full has nothing to replace."""
    log = PageLog(small_disk, max_bytes=1 << 20, page_bytes=9000, identity=b"model", segment_bytes=1 << 15)
    log.put(key_of(0), [memoryview(bytes(9000))])
    with pytest.raises(OSError, match="No space"), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(4096))
    assert log.put(key_of(1), [memoryview(bytes(9000))]) == [key_of(1)]
    assert log.keys() == [key_of(0)] and log.counters.unwritten == 1
    log.close()


def test_a_real_disk_that_becomes_read_only(small_disk: Path) -> None:
    log = open_log(small_disk)
    put_all(log, range(LAYOUT.slots * 2))
    log.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DiskUnavailable, match="Read-only"):
        open_log(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    log = open_log(small_disk)
    assert len(log.keys()) == LAYOUT.slots * 2 and wrong_pages(log) == []
    log.close()
