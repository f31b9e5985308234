"""Pages and parts that a new group reads from disk give the tokens of requests that keep all pages and parts."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.moves import Arrived
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.loader import open_host_pages
from phalanx_runtime.rank.memory.kv_cache import divide_caches
from phalanx_runtime.rank.memory.page_memory import page_rows
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.host_pages import HostCopies, HostPages
from phalanx_runtime.rank.tiers.page_log import PageLog
from tests.polling import wait_until
from tests.runtime.equality.windows import FULL, LIMITS, make_requests, reference
from tests.runtime.moving_engines import Group, running_group, running_groups
from tests.runtime.moving_requests import make_request, undisturbed
from tests.runtime.ranks import PAGE_SIZE
from tests.runtime.tiny import WINDOW, save_tiny

SETUP = replace(FULL, window=WINDOW, num_pages=24, num_parts=16, num_host_pages=120, num_host_parts=80, has_disk=True)
REQUESTS = {handle: request for handle, request in make_requests(8).items() if handle in (3, 4, 5, 6)}
REQUESTS[9] = msgspec.structs.replace(REQUESTS[5], prompt=list(range(175)))
"""Two pairs with a common prefix, then a request that takes all pages of the device."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(
        tmp_path_factory.mktemp("tiny") / "model",
        "gemma3_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    return reference(model, REQUESTS)


class ZeroedParts(HostPages):
    """Gets zeros instead of the parts that are read from disk."""

    def write(self, slot: int, page: memoryview) -> None:
        super().write(slot, memoryview(bytes(len(page))))


@dataclass
class Disk:
    """A folder with pages and parts, which one group after the other owns."""

    folder: Path
    is_zeroed: bool = False
    """Whether parts that are read are zeros."""
    logs: dict[bytes, PageLog] = field(default_factory=dict)
    numbers: "count[int]" = field(default_factory=count)

    def open(self, caches: list[LayerCache], windows: Sequence[int | None], pool: PoolShape) -> tuple[HostCopies, HostCopies]:
        """Opens host memory over the logs, in place of `open_host_pages`."""
        divided = dict(zip((b"pages", b"parts"), divide_caches(caches, windows, pool.num_parts), strict=True))
        for kind, own in divided.items():
            size = sum(rows.shape[1] for rows in page_rows(own))
            self.logs[kind] = PageLog(self.folder, max_bytes=16 << 20, page_bytes=size, identity=kind)
        disks = DiskPages(self.logs[b"pages"]), DiskPages(self.logs[b"parts"], of_parts=True)
        pages, parts = open_host_pages(caches, windows, pool, disks)
        return pages, ZeroedParts(divided[b"parts"], pool.num_host_parts, disk=disks[1]) if self.is_zeroed else parts

    def open_own(self, caches: list[LayerCache], windows: Sequence[int | None], pool: PoolShape) -> tuple[HostCopies, HostCopies]:
        """Opens host memory over logs in a folder of its own: for each of several groups."""
        own = Disk(self.folder / str(next(self.numbers)))
        return own.open(caches, windows, pool)

    @contextmanager
    def group(self, model: Path) -> Iterator[Group]:
        with running_group(model, [1], replace(SETUP, open_host_pages=self.open), LIMITS) as group:
            yield group
        for log in self.logs.values():
            log.close()


def answers(group: Group, handles: Iterable[int] = REQUESTS) -> dict[int, list[int]]:
    """Returns the tokens of requests, one after the other."""
    tokens: dict[int, list[int]] = {handle: [] for handle in handles}
    finished: list[int] = []

    def receive(frame: wire.FromEngine) -> None:
        if isinstance(frame, wire.Tokens):
            for handle, token in zip(frame.handles, frame.tokens, strict=True):
                tokens[handle].append(token)
            finished.extend(end.handle for end in frame.finished)

    group.channel.listen(receive)
    for handle in handles:
        group.channel.put(wire.Submit(handle, REQUESTS[handle]))
        wait_until(lambda handle=handle: handle in finished)  # type: ignore[misc]
    group.channel.check()
    return tokens


def test_new_group_reads_pages_and_parts(model: Path, expected: dict[int, list[int]], tmp_path: Path) -> None:
    """The first group stores what the requests repeat; parts that are zeros after they were read change tokens."""
    whole = Disk(tmp_path)
    for is_first in (True, False):
        with whole.group(model) as group:
            for _ in range(4 if is_first else 1):
                assert answers(group) == expected
            assert group.loop is not None
            disk = group.loop.scheduler.sharing.disk
            if is_first:
                wait_until(lambda disk=disk: len(disk.keys) > 24 and len(disk.part_keys) > 6)  # type: ignore[misc]
                continue
            assert disk.counters.fetched > 10 and disk.counters.fetched_parts >= 3 and not disk.counters.failed
            assert group.loop.scheduler.pool.host_parts.counters.loaded >= 3
    with Disk(tmp_path, is_zeroed=True).group(model) as group:
        assert answers(group) != expected
        assert group.loop is not None and group.loop.scheduler.sharing.disk.counters.fetched_parts > 0


def test_other_groups_pull_pages_and_parts_on_disk(model: Path, tmp_path: Path) -> None:
    """Other prompts take all memory of the holder; it reads its disk for the pull."""
    sizes = {"num_pages": 60, "num_parts": 40, "num_host_pages": 64, "num_host_parts": 24}
    build = replace(SETUP, **sizes, open_host_pages=Disk(tmp_path).open_own)  # type: ignore[arg-type]
    request = make_request("pulled", prompt=100)
    keys = PrefixKeys(root_key("tiny"), PAGE_SIZE).extend(request.prompt)
    with running_groups(model, [[1], [1]], build) as groups:
        mover = groups.mover
        (plain,) = undisturbed(mover, [request])
        loop = groups.groups[0].loop
        assert loop is not None
        pool, disk = loop.scheduler.pool, loop.scheduler.sharing.disk
        undisturbed(mover, [msgspec.structs.replace(request, id="again")])
        for number in range(12):
            undisturbed(mover, [make_request(f"evicts {number}", prompt=150, max_tokens=4)])
        assert not pool.match(keys[-1:]) and keys[-1] not in pool.host and keys[-1] not in pool.host_parts
        wait_until(lambda: disk.keys.issuperset(keys) and keys[-1] in disk.part_keys)
        stream, arrived = mover.pull(request, keys, 0, 1)
        assert isinstance(arrived, Arrived) and arrived.num_computed == len(keys) * PAGE_SIZE, arrived
        mover.until(lambda: stream.finish is not None)
        assert stream.tokens == plain.tokens
        assert disk.counters.fetched > 0 and disk.counters.fetched_parts > 0 and pool.host.counters.sent > 0
        mover.settle()
