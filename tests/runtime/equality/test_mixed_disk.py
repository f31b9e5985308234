"""Pages, and their parts or states, that a new group reads from disk give the tokens of requests that keep all of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.moves import Arrived
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv import disk_tier, host_loads, windowed_pages
from phalanx_runtime.core.kv.snapshots.sharing import SnapshotSharing
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.model.states.mixers import states_of
from phalanx_runtime.rank.loader import open_host_pages
from phalanx_runtime.rank.memory.kv_cache import divide_caches
from phalanx_runtime.rank.memory.page_memory import page_rows
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.folder import identity_digest
from phalanx_runtime.rank.tiers.host_pages import HostCopies, HostPages
from phalanx_runtime.rank.tiers.opening import PageBytes
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.segment import Layout
from phalanx_runtime.rank.tiers.state_slots import record_bytes
from tests.architectures.tiny import save_model
from tests.polling import wait_until
from tests.runtime.equality.windows import FULL, LIMITS, make_requests, reference
from tests.runtime.moving_engines import Group, running_group, running_groups
from tests.runtime.moving_requests import make_request, undisturbed
from tests.runtime.ranks import PAGE_SIZE, Build
from tests.runtime.tiny import WINDOW, save_tiny

SETUP = replace(FULL, window=WINDOW, num_pages=24, num_parts=16, num_host_pages=120, num_host_parts=80, has_disk=True)
REQUESTS = {handle: request for handle, request in make_requests(8).items() if handle in (3, 4, 5, 6)}
REQUESTS[9] = msgspec.structs.replace(REQUESTS[5], prompt=list(range(175)))
"""Two pairs with a common prefix, then a request that takes all pages of the device."""


@pytest.fixture(autouse=True)
def loads_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups read all that is on disk, also where a busy machine reads more slowly than it computes."""
    for module in (disk_tier, host_loads, windowed_pages):
        monkeypatch.setattr(module, "pays_to_load", lambda *_: True)


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

    def open(self, model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[HostCopies, HostCopies]:
        """Opens host memory over the logs."""
        windows = model.kv.windows
        divided = dict(zip((b"pages", b"parts"), divide_caches(caches, windows, pool.num_parts), strict=True))
        for kind, own in divided.items():
            size = sum(rows.shape[1] for rows in page_rows(own))
            self.logs[kind] = PageLog(self.folder, max_bytes=16 << 20, page_bytes=size, identity=kind)
        disks = DiskPages(self.logs[b"pages"]), DiskPages(self.logs[b"parts"], of_parts=True)
        pages, parts = open_host_pages(caches, windows, pool, disks)
        return pages, ZeroedParts(divided[b"parts"], pool.num_host_parts, disk=disks[1]) if self.is_zeroed else parts

    def open_own(self, model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[HostCopies, HostCopies]:
        """Opens host memory over logs in a folder of its own: for each of several groups."""
        own = Disk(self.folder / str(next(self.numbers)))
        return own.open(model, caches, pool, rank)

    @contextmanager
    def group(self, model: Path) -> Iterator[Group]:
        with running_group(model, [1], replace(SETUP, open_host_pages=self.open), LIMITS) as group:
            yield group
        for log in self.logs.values():
            log.close()


def answers(group: Group, requests: Mapping[int, wire.Request] = REQUESTS) -> dict[int, list[int]]:
    """Returns the tokens of requests, one after the other."""
    tokens: dict[int, list[int]] = {handle: [] for handle in requests}
    finished: list[int] = []

    def receive(frame: wire.FromEngine) -> None:
        if isinstance(frame, wire.Tokens):
            for handle, token in zip(frame.handles, frame.tokens, strict=True):
                tokens[handle].append(token)
            finished.extend(end.handle for end in frame.finished)

    group.channel.listen(receive)
    for handle, request in requests.items():
        group.channel.put(wire.Submit(handle, request))
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


WITH_STATES = Build(
    dtype=torch.float64,
    num_pages=20,
    level="transformers",
    num_snapshots=2,
    num_host_pages=64,
    num_host_snapshots=16,
    has_disk=True,
)
"""The device keeps the pages of one or two prompts."""


def make_prompts() -> dict[int, wire.Request]:
    """Returns a prompt of 90 tokens, a longer one that starts with it, two others, and one that takes all pages of the device."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(size)] for size in (90, 90, 90, 140)]
    prompts.insert(1, [*prompts[0], *range(20)])
    return {
        i: wire.Request(
            id=f"s{i}",
            epoch=0,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=10, seed=i, temperature=float(i % 2)),
        )
        for i, prompt in enumerate(prompts)
    }


@dataclass
class StateDisk:
    """A folder with pages and snapshots of states, which the ranks of one group after the other own."""

    folder: Path
    record_bytes: dict[int, int] = field(default_factory=dict)
    """Of a snapshot, by rank."""
    logs: list[PageLog] = field(default_factory=list)

    def open(self, model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[HostCopies, HostCopies]:
        """Opens host memory over the logs of a rank."""
        sizes = record_bytes(PageBytes(sum(rows.shape[1] for rows in page_rows(caches))), model, pool)
        self.record_bytes[rank] = sizes.part
        kinds = (("pages", sizes.page), ("states", sizes.part))
        logs = [PageLog(self.folder, max_bytes=32 << 20, page_bytes=n, identity=f"{kind} {rank}".encode()) for kind, n in kinds]
        self.logs += logs
        disks = DiskPages(logs[0]), DiskPages(logs[1], of_parts=True)
        return open_host_pages(caches, model.kv.windows, pool, disks, states_of(model))

    def change_records(self) -> int:
        """Changes a byte of each record of the last rank. Returns their number."""
        rank, size = max(self.record_bytes.items())
        num_changed = 0
        for path in (self.folder / identity_digest(b"states %d" % rank, size).hex()).glob("*.pages"):
            data = bytearray(path.read_bytes())
            layout = Layout(size, int.from_bytes(data[12:16], "little"))
            for slot in range((len(data) - layout.pages_at) // size):
                data[layout.page_at(slot) + size // 2] ^= 1
                num_changed += 1
            path.write_bytes(data)
        return num_changed


Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda model_type: save_model(tmp_path_factory.mktemp(model_type), model_type))


@pytest.mark.parametrize(
    ("model_type", "pods", "stages"),
    [("lfm2", [1, 1], 2), ("qwen3_next", [2], 1)],
    ids=["lfm2 pp2", "qwen3_next tp2"],
)
def test_new_group_reads_pages_and_states(
    stateful: Models, tmp_path: Path, model_type: str, pods: list[int], stages: int
) -> None:
    """The third group finds a byte changed in each record of the last rank, and computes these prompts. Only the first stage of
    lfm2 has states."""
    disk, requests, folder = StateDisk(tmp_path), make_prompts(), stateful(model_type)
    build = replace(WITH_STATES, stages=stages, open_host_pages=disk.open)
    expected = reference(folder, requests, replace(WITH_STATES, num_pages=64))
    for turn in range(3):
        with running_group(folder, pods, build, LIMITS) as group:
            assert answers(group, requests) == expected
            assert group.loop is not None
            sharing = group.loop.scheduler.sharing
            assert isinstance(sharing, SnapshotSharing)
            counters, num_loaded = sharing.disk.counters, sharing.snapshots.num_loaded
            if turn == 0:
                disk_keys = sharing.disk.keys, sharing.disk.part_keys
                wait_until(lambda keys=disk_keys: len(keys[0]) > 36 and len(keys[1]) > 6)  # type: ignore[misc]
            elif turn == 1:
                assert counters.fetched == 3 * 11 + 2 and counters.fetched_parts == 4 and not counters.failed
                assert num_loaded >= 4 and sharing.hit_tokens >= 3 * 88 + 104
            else:
                assert counters.failed >= 3 and counters.fetched_parts == 0
        for log in disk.logs:
            log.close()
        if turn == 1:
            assert disk.change_records() >= 4
        disk.logs.clear()
