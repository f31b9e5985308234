"""Host memory that grows and shrinks."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx_runtime.core.step_plan import HostResize
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.tiers.host_pages import HostPages
from phalanx_runtime.rank.tiers.slot_memory import SEGMENT_SLOTS, CudaPageLock, SlotMemory

MIB = 1 << 20


class FakeLock:
    """Records locked memory by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, num_bytes: int) -> None:
        assert address not in self.locked
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


class FakeRuntime:
    """CUDA's calls, which return the same code."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.code


def resident_bytes() -> int:
    """Memory of this process."""
    (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Rss:")]
    return int(line.split()[1]) << 10


def fill(memory: SlotMemory, slots: range) -> None:
    for slot in slots:
        for layer in range(2):
            memory.row(layer, slot)[:] = slot % 251 + layer


def test_slots_keep_their_content_while_memory_grows_and_shrinks() -> None:
    memory = SlotMemory([8, 12], 10, 1000)
    fill(memory, range(10))
    for num_slots in (200, 64, 65, 10, 1000, 10):
        memory.resize(num_slots)
        assert memory.num_slots == num_slots
        for slot in range(10):
            assert [bytes(part) for part in memory.parts(slot)] == [bytes([slot]) * 8, bytes([slot + 1]) * 12]


def test_removed_slots_return_their_memory() -> None:
    size = MIB // 8
    memory = SlotMemory([size, size], 1024, 1024)
    before = resident_bytes()
    fill(memory, range(1024))
    full = resident_bytes()
    assert full - before > 240 * MIB, "256 MiB are in use"
    memory.resize(SEGMENT_SLOTS)
    assert resident_bytes() - before < 24 * MIB
    assert memory.row(1, SEGMENT_SLOTS - 1)[0] == SEGMENT_SLOTS
    memory.resize(1024)
    assert resident_bytes() - before < 24 * MIB, "memory is taken as slots are filled"
    assert not memory.row(0, 1023).any()


def test_ranks_return_the_memory_of_removed_slots() -> None:
    caches = [LayerCache(torch.ones(4, 2, 64, 512), torch.ones(4, 2, 64, 512))]
    host = HostPages(caches, 512, limit=512)
    before = resident_bytes()
    host.start([(False, slot % 4, slot) for slot in range(512)], must_wait=True)
    assert resident_bytes() - before > 240 * MIB
    host.start([], must_wait=False, resize=HostResize(SEGMENT_SLOTS, [(500, 3)]))
    host.wait()
    assert host.num_slots == SEGMENT_SLOTS
    assert resident_bytes() - before < 40 * MIB


def test_moved_pages_keep_their_content() -> None:
    draw = random.Random(0)
    pages = torch.arange(200 * 8, dtype=torch.float32).view(200, 1, 2, 4)
    caches = [LayerCache(pages.clone(), -pages)]
    host = HostPages(caches, 200, limit=300)
    host.start([(False, page, page) for page in range(200)], must_wait=False)
    place = dict.fromkeys(range(200), 0) | {page: page for page in range(200)}
    for num_slots in (300, 250, 120, 60):
        used = sorted(place.values())
        free = [slot for slot in range(num_slots) if slot not in used]
        moves = []
        for page, slot in list(place.items()):
            if slot >= num_slots:
                if not free:
                    del place[page]
                    continue
                place[page] = free.pop(draw.randrange(len(free)))
                moves.append((slot, place[page]))
        host.start([], must_wait=False, resize=HostResize(num_slots, moves))
    for tensor in caches[0].tensors:
        tensor.zero_()
    assert len(place) == 60
    host.start([(True, page, slot) for page, slot in place.items()], must_wait=True)
    for page in place:
        assert torch.equal(caches[0].k[page], pages[page]) and torch.equal(caches[0].v[page], -pages[page])


def test_memory_of_a_device_is_locked_while_mapped() -> None:
    lock = FakeLock()
    memory = SlotMemory([4096, 100], 130, 150, lock)
    assert len(lock.locked) == 3
    assert sum(lock.locked.values()) <= 150 * 4196 + 3 * 64, "the last segment ends with the limit"
    assert memory.row(0, 129).data_ptr() >= min(lock.locked)
    memory.resize(64)
    assert len(lock.locked) == 1
    memory.row(1, 63)[:] = 7
    memory.resize(150)
    assert len(lock.locked) == 3 and bytes(memory.parts(63)[1]) == b"\7" * 100
    memory.move([(63, 149)])
    assert np.asarray(memory.parts(149)[1]).sum() == 700


class ScarceLock(FakeLock):
    """Refuses all memory but the first segment."""

    def lock(self, address: int, num_bytes: int) -> None:
        if self.locked:
            raise ModelError("1 MiB of host memory cannot be pinned")
        super().lock(address, num_bytes)


def test_added_memory_that_is_not_locked_serves(caplog: pytest.LogCaptureFixture) -> None:
    """The plan that adds it has been made on all ranks."""
    lock = ScarceLock()
    memory = SlotMemory([64, 100], SEGMENT_SLOTS, 3 * SEGMENT_SLOTS, lock)
    memory.resize(2 * SEGMENT_SLOTS)
    fill(memory, range(2 * SEGMENT_SLOTS))
    assert memory.row(1, 100)[0] == 101 and len(lock.locked) == 1
    assert [record.message for record in caplog.records] == ["added host memory is not pinned: its copies are slower"]
    memory.resize(10)
    assert len(lock.locked) == 1 and memory.row(0, 9)[0] == 9
    with pytest.raises(ModelError, match="cannot be pinned"):
        SlotMemory([64], 2 * SEGMENT_SLOTS, 2 * SEGMENT_SLOTS, ScarceLock())


def test_memory_is_mapped_for_the_limit_at_once() -> None:
    """A process that may map no more memory adds slots."""
    code = """
import resource
from pathlib import Path
from tests.runtime.rank.tiers.test_slot_memory import SEGMENT_SLOTS, SlotMemory
memory = SlotMemory([1 << 20], 1, 4 * SEGMENT_SLOTS)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
for num_slots in (4 * SEGMENT_SLOTS, 1, 4 * SEGMENT_SLOTS):
    memory.resize(num_slots)
    memory.row(0, num_slots - 1)[0] = 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_memory_that_cuda_does_not_lock_is_refused() -> None:
    works, fails = FakeRuntime(0), FakeRuntime(2)
    lock = CudaPageLock(works)
    lock.lock(4096, 8192)
    lock.unlock(4096)
    assert works.calls == [(4096, 8192, 0), (4096,)]
    with pytest.raises(ModelError, match="1 MiB of host memory cannot be pinned: CUDA error 2"):
        CudaPageLock(fails).lock(0, MIB)
    with pytest.raises(ModelError, match="cannot be unlocked"):
        CudaPageLock(fails).unlock(0)
