"""A process that writes, reads and compacts a log until it is killed.

    python -m tests.runtime.rank.tiers.random_writer FOLDER SEED FIRST_VERSION POLICY

Prints a line after each put: number and version of the page, bytes that compaction wrote so far, then the hexadecimal keys of
dropped pages.
"""

import hashlib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.segment import Layout
from tests.runtime.rank.tiers.logs import key_of

PAGE = 48 << 10
LAYOUT = Layout(PAGE, 4)
MAX_BYTES = 32 * LAYOUT.size
NUMBERS = 160
PARTS = 6


def open_log(folder: Path, policy: EvictionPolicy) -> PageLog:
    return PageLog(folder, max_bytes=MAX_BYTES, page_bytes=PAGE, identity=b"killed", eviction=policy, write_budget=1e12)


def page_of(key: bytes, version: int) -> bytes:
    """A page that starts with its version."""
    start = version.to_bytes(8, "little")
    return start + hashlib.shake_128(start + key).digest(PAGE - 8)


def version_of(page: Sequence[int]) -> int:
    return int.from_bytes(bytes(page[:8]), "little")


def main(folder: Path, seed: int, version: int, policy: EvictionPolicy) -> None:
    chance, log, page = random.Random(seed), open_log(folder, policy), memoryview(bytearray(PAGE))
    print("ready", flush=True)
    while True:
        number, version = chance.randrange(NUMBERS), version + 1
        key = key_of(number)
        if key in log:
            assert log.get(key, page) and page == page_of(key, version_of(page))
            continue
        content = memoryview(page_of(key, version))
        dropped = log.put(key, [content[at : at + PAGE // PARTS] for at in range(0, PAGE, PAGE // PARTS)])
        dropped += log.compact(version) if chance.random() < 0.8 else []
        compacted = log.counters.compacted_bytes
        os.write(1, f"{number} {version} {compacted} {' '.join(lost.hex() for lost in dropped)}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cast(EvictionPolicy, sys.argv[4]))
