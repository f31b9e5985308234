"""A process that is killed while it writes and compacts leaves every page that it reported, and no torn one."""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from phalanx_api.engine_config import EvictionPolicy
from tests.runtime.rank.tiers.logs import key_of, size_on_disk
from tests.runtime.rank.tiers.random_writer import LAYOUT, MAX_BYTES, PAGE, open_log, page_of, version_of


def killed_output(folder: Path, seed: int, version: int, policy: str) -> list[str]:
    """Returns what a writer printed until it was killed, at a random moment within some 40 ms; every tenth compacts before."""
    arguments = [str(folder), str(seed), str(version), policy]
    command = [sys.executable, "-m", "tests.runtime.rank.tiers.random_writer", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        lines = [] if seed % 10 != 9 else lines_until_compaction(child.stdout)
        time.sleep(random.Random(seed).uniform(0, 0.04))
        assert child.poll() is None, "the writer ends only when it is killed"
        child.kill()
        return lines + child.stdout.read().splitlines()


def lines_until_compaction(output: IO[str]) -> list[str]:
    lines = [output.readline().rstrip("\n")]
    while lines[-1].split(" ")[2] == "0":
        lines.append(output.readline().rstrip("\n"))
    return lines


@dataclass(slots=True)
class Counts:
    """What the writers of a test did."""

    kills: int = 0
    puts: int = 0
    """That were reported."""
    unreported: int = 0
    """Pages that are whole, although their put was not reported before the kill."""
    compacted_bytes: int = 0
    read: int = 0
    """Pages read after kills, all of them whole."""


def kill_repeatedly(folder: Path, kills: int, policy: EvictionPolicy) -> Counts:
    live: dict[bytes, int] = {}
    page, version, counts = memoryview(bytearray(PAGE)), 0, Counts(kills)
    for seed in range(kills):
        num_bytes = "0"
        for line in killed_output(folder, seed, version, policy):
            number, put_version, num_bytes, *dropped = line.split(" ")
            live[key_of(int(number))] = version = int(put_version)
            counts.puts += 1
            for lost in filter(None, dropped):
                del live[bytes.fromhex(lost)]
        counts.compacted_bytes += int(num_bytes)
        log = open_log(folder, policy)
        keys = set(log.keys())
        assert len(keys - set(live)) <= 1, "the page that was being put"
        assert len(set(live) - keys) <= 1 + LAYOUT.slots, "the pages that were being dropped"
        counts.unreported += len(keys - set(live))
        counts.read += len(keys)
        for key in keys:
            assert log.get(key, page), "no page is torn"
            found = version_of(page)
            assert page == page_of(key, found) and found >= live.get(key, 0), "no wrong page, no former version"
            live[key] = found
            version = max(version, found)
        live = {key: live[key] for key in keys}
        assert size_on_disk(folder) <= log.bytes_on_disk <= MAX_BYTES and log.counters.foreign == 0
        log.close()
        version += 1_000
    assert counts.puts > kills and counts.compacted_bytes > 0, "writers are killed while they write and compact"
    assert len(live) > MAX_BYTES // PAGE // 2, "the log is full"
    return counts


@pytest.mark.system
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_killed_writer_leaves_whole_pages(tmp_path: Path, policy: EvictionPolicy) -> None:
    kill_repeatedly(tmp_path, 20, policy)


@pytest.mark.slow
def test_a_thousand_killed_writers_leave_whole_pages(tmp_path: Path) -> None:
    print(kill_repeatedly(tmp_path, 1000, "w-tinylfu"))
