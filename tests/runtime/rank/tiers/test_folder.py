"""One process owns an identity's folder; unused folders of other identities are removed when the disk is full."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.migration.page_orders import DiskChanged, DiskReport
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.folder import DiskUnavailable
from phalanx_runtime.rank.tiers.host_pages import HostPages
from phalanx_runtime.rank.tiers.page_log import FULL_S, PageLog
from tests.polling import wait_until
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.rank.tiers.faulty_files import FULL, FaultyFiles
from tests.runtime.rank.tiers.logs import MAX_BYTES, PAGE, key_of, open_log, put, put_all, segments
from tests.runtime.ranks import with_group
from tests.runtime.tiny import save_tiny

OWN_AND_WAIT = """
import sys
from pathlib import Path
from tests.runtime.rank.tiers.logs import open_log, put
log = open_log(Path(sys.argv[1]))
put(log, 1)
print("owned", flush=True)
sys.stdin.read()
"""


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(DiskUnavailable, match="another process owns the pages"):
        open_log(tmp_path)
    log.close()
    open_log(tmp_path)


def test_a_killed_owner_owns_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWN_AND_WAIT, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None and child.stdout.readline() == b"owned\n"
        with pytest.raises(DiskUnavailable):
            open_log(tmp_path)
        child.kill()
        child.wait()
    assert len(open_log(tmp_path).keys()) == 1


def test_identities_share_no_pages(tmp_path: Path) -> None:
    logs = [open_log(tmp_path, identity=identity) for identity in (b"model, rank 0", b"model, rank 1", b"other")]
    logs.append(PageLog(tmp_path, max_bytes=MAX_BYTES, page_bytes=2 * PAGE, identity=b"other"))
    put(logs[0], 1)
    assert [len(log.keys()) for log in logs] == [1, 0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 4


KINDS = [("first", "auto", 1), ("first", "int8", 1), ("first", "fp8", 1), ("second", "auto", 1), ("first", "auto", 2)]
"""Model, KV dtype and ranks. Pages of int8 and fp8 have equal sizes, and so have those of both models and of both ranks."""


def disks_of(folder: Path, pages: Path, kv_cache_dtype: str, ranks: int) -> list[tuple[DiskPages, int]]:
    """Returns the disk tier of each rank as the loader opens it, and the bytes of a page of all ranks."""

    def load(group: Collective) -> tuple[DiskPages, int]:
        disk = {"host_cache_memory": 1 << 18, "disk_cache_path": str(pages), "disk_cache_bytes": 16 << 20}
        settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 18, "kv_cache_dtype": kv_cache_dtype}
        spec = with_settings(make_spec(folder, group.rank, ranks), **settings, **disk)
        runner, ready = load_rank(spec, group, torch.device("cpu"), System())
        host = runner.page_access().host
        assert isinstance(host, HostPages) and host.disk is not None
        return host.disk, ready.served.page_bytes

    return with_group([ranks], load) if ranks > 1 else [load(SoloCollective())]


def test_models_dtypes_and_ranks_have_pages_of_their_own(tmp_path: Path) -> None:
    """In a copy of the folder, which no process owns, only the first of the kinds finds the page that it wrote."""
    folders = {name: save_tiny(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))}
    ((written, page_bytes),) = disks_of(folders["first"], tmp_path / "pages", "auto", 1)
    reports = list[DiskReport]()
    written.start(reports.append)
    written.put(key_of(1), [memoryview(bytes(page_bytes))])
    wait_until(lambda: DiskChanged([key_of(1)], []) in reports)
    shutil.copytree(tmp_path / "pages", tmp_path / "copy")
    found = []
    for name, kv_cache_dtype, ranks in KINDS:
        for disk, _ in disks_of(folders[name], tmp_path / "copy", kv_cache_dtype, ranks):
            reports.clear()
            disk.start(reports.append)
            found.append([key for report in reports if isinstance(report, DiskChanged) for key in report.added])
    assert found == [[key_of(1)], [], [], [], [], []]
    assert len(list((tmp_path / "copy").iterdir())) == len(found)


def test_ranks_have_disks_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of rank 1 is a file at first. Rank 0 owns its folder no longer, so the next load of both can use it."""
    folder, pages, file = save_tiny(tmp_path / "model"), tmp_path / "pages", tmp_path / "file"
    file.write_bytes(b"")

    def has_disk(paths: Sequence[Path], group: Collective) -> bool:
        disk = {"host_cache_memory": 1 << 18, "disk_cache_path": str(paths[group.rank]), "disk_cache_bytes": 16 << 20}
        spec = with_settings(make_spec(folder, group.rank, 2), dtype="float32", kv_cache_memory_bytes=1 << 18, **disk)
        host = load_rank(spec, group, torch.device("cpu"), System())[0].page_access().host
        assert isinstance(host, HostPages)
        return host.disk is not None

    assert with_group([2], partial(has_disk, (pages, file))) == [False, False]
    reasons = [record.__dict__["why"] for record in caplog.records if record.message == "no pages on disk"]
    assert sorted(reasons)[0] == "no folder on rank 1: see its log" and sorted(reasons)[1].startswith("rank 1: cannot use")
    assert with_group([2], partial(has_disk, (pages, pages))) == [True, True]


def stale(root: Path, count: int) -> list[Path]:
    """Returns folders of closed logs, the oldest first."""
    folders: list[Path] = []
    for number in range(count):
        log = open_log(root, identity=b"stale %d" % number)
        put_all(log, range(10))
        log.close()
        (new,) = set(root.iterdir()) - set(folders)
        folders.append(new)
    for age, folder in enumerate(reversed(folders)):
        os.utime(folder, (1e9 - age, 1e9 - age))
    return folders


def test_other_identities_stay_while_there_is_room(tmp_path: Path) -> None:
    folders = stale(tmp_path, 3)
    open_log(tmp_path)
    assert all(folder.exists() for folder in folders)


class SmallDisk(FaultyFiles):
    """Has room once at most `limit` segments are there."""

    def __init__(self, root: Path, limit: int) -> None:
        super().__init__()
        self._root = root
        self._limit = limit

    def room(self, folder: Path) -> int:
        return 0 if len(segments(self._root)) > self._limit else 1 << 40


def test_the_oldest_identities_make_room(tmp_path: Path) -> None:
    folders = stale(tmp_path, 3)
    per_folder = len(segments(tmp_path)) // 3
    log = open_log(tmp_path, files=SmallDisk(tmp_path, per_folder))
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert put(log, 1) == []


class FullDisk(SmallDisk):
    """Nothing can be written while it has two segments more than `limit`."""

    def write(self, file: int, parts: Sequence[memoryview], offset: int) -> None:
        if len(segments(self._root)) > self._limit + 1:
            raise OSError(FULL, os.strerror(FULL))
        super().write(file, parts, offset)


def test_an_unused_identity_makes_room_once_needed(tmp_path: Path) -> None:
    """It was used at the start of the log, and unused for an hour as the disk was full. The log searches once a minute."""
    (folder,) = stale(tmp_path, 1)
    os.utime(folder)
    files, now = FullDisk(tmp_path, len(segments(tmp_path)) - 1), 1000.0
    log = PageLog(tmp_path, max_bytes=MAX_BYTES, page_bytes=PAGE, identity=b"model", files=files, clock=lambda: now)
    assert put(log, 1) == [key_of(1)] and folder.exists()
    os.utime(folder, (1e9, 1e9))
    now += FULL_S - 1
    assert put(log, 1) == [key_of(1)] and folder.exists()
    now += 1
    assert put(log, 1) == [] and not folder.exists()
    assert log.keys() == [key_of(1)] and log.counters.unwritten == 2


def test_an_identity_in_recent_use_stays(tmp_path: Path) -> None:
    folders = stale(tmp_path, 2)
    os.utime(folders[1])
    open_log(tmp_path, files=SmallDisk(tmp_path, 0))
    assert [folder.exists() for folder in folders] == [False, True]


def test_an_owned_identity_is_never_removed(tmp_path: Path) -> None:
    folders = stale(tmp_path, 2)
    owner = open_log(tmp_path, identity=b"stale 0")
    os.utime(folders[0], (1e9, 1e9))
    open_log(tmp_path, files=SmallDisk(tmp_path, 0))
    assert [folder.exists() for folder in folders] == [True, False]
    assert len(owner.keys()) == 10


@pytest.mark.parametrize("name", ["notes.txt", "00000009.pages"])
def test_an_identity_with_a_foreign_file_is_left_alone(tmp_path: Path, name: str) -> None:
    (folder,) = stale(tmp_path, 1)
    (folder / name).write_bytes(b"something else")
    os.utime(folder, (1e9, 1e9))
    before = sorted(folder.iterdir())
    open_log(tmp_path, files=SmallDisk(tmp_path, 0))
    assert sorted(folder.iterdir()) == before


def test_folders_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    named = tmp_path / ("0" * 32)
    named.mkdir()
    os.utime(named, (1e9, 1e9))
    (tmp_path / "data").mkdir()
    open_log(tmp_path, files=SmallDisk(tmp_path, -1))
    assert named.exists() and (tmp_path / "data").exists()
