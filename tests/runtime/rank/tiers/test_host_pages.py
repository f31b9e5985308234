"""Copies between pages and slots, by the thread of a rank."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import page_rows
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.host_pages import MAX_UNREPORTED, NO_HOST_PAGES, HostPages, copy_runs
from phalanx_runtime.rank.tiers.page_log import PageLog

COPIES = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), max_size=30)


def make_pages() -> list[LayerCache]:
    numbers = torch.arange(6 * 2 * 4 * 8, dtype=torch.float32).view(6, 2, 4, 8)
    return [LayerCache(numbers.clone() + layer, -numbers - layer) for layer in range(2)]


@given(COPIES)
def test_runs_have_all_copies_in_order(copies: list[tuple[bool, int, int]]) -> None:
    runs = list(copy_runs(copies))
    flat = [(run.is_load, page, slot) for run in runs for page, slot in zip(run.pages, run.slots, strict=True)]
    assert flat == copies
    for run in runs:
        targets = run.pages if run.is_load else run.slots
        assert len(set(targets)) == len(targets)


@given(COPIES)
def test_copies_are_executed_in_order(copies: list[tuple[bool, int, int]]) -> None:
    caches = make_pages()
    expected = [[tensor.clone() for tensor in cache.tensors] for cache in caches]
    slots = [[torch.zeros_like(tensor[:4]) for tensor in cache.tensors] for cache in caches]
    host = HostPages(caches, 4)
    for first in range(0, len(copies), 4):
        host.start(copies[first : first + 4], must_wait=bool(first % 8))
    host.wait()
    for is_load, page, slot in copies:
        for layer, stored in zip(expected, slots, strict=True):
            for tensor, kept in zip(layer, stored, strict=True):
                if is_load:
                    tensor[page] = kept[slot]
                else:
                    kept[slot] = tensor[page]
    for cache, layer in zip(caches, expected, strict=True):
        for tensor, right in zip(cache.tensors, layer, strict=True):
            assert torch.equal(tensor, right)
    loads = [sum(is_load for is_load, _, _ in copies[first : first + 4]) for first in range(0, len(copies), 4)]
    assert [host.take_loads()[0] for count in loads if count] == [count for count in loads if count], "one of each plan"
    assert host.take_loads() == (0, 0.0)


def test_times_of_unreported_loads_are_bounded() -> None:
    """Rank 0 alone reports them."""
    host = HostPages(make_pages(), 4)
    for slot in range(MAX_UNREPORTED + 3):
        host.start([(True, 0, slot % 4)], must_wait=True)
    assert [host.take_loads()[0] for _ in range(MAX_UNREPORTED + 1)] == [1] * MAX_UNREPORTED + [0]


def test_first_layers_are_ready_before_the_others() -> None:
    numbers = torch.arange(64 * 4096, dtype=torch.float32).view(64, 1, 16, 256)
    caches = [LayerCache(numbers + layer, -numbers - layer) for layer in range(24)]
    expected = [[tensor.clone() for tensor in cache.tensors] for cache in caches]
    host = HostPages(caches, 64)
    pages = range(64)
    host.start([(False, page, page) for page in pages], must_wait=True)
    for cache in caches:
        for tensor in cache.tensors:
            tensor.zero_()
    host.start([(True, page, page) for page in pages], must_wait=False)
    for layer, (cache, right) in enumerate(zip(caches, expected, strict=True)):
        assert host.wait_for_layer(layer) >= 0
        assert all(torch.equal(tensor, one) for tensor, one in zip(cache.tensors, right, strict=True))
    host.wait()
    assert host.wait_for_layer(23) == 0.0
    assert host.take_loads()[0] == 64


class RecordedDisk(DiskPages):
    """Records what it gets, each page once it is let."""

    def __init__(self, pages: PageLog) -> None:
        super().__init__(pages)
        self.pages = list[tuple[bytes, bytes]]()
        self.may_put = threading.Event()

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self.may_put.wait()
        self.pages.append((key, b"".join(parts)))


def make_disk(folder: Path, caches: list[LayerCache]) -> tuple[RecordedDisk, list[bytes]]:
    """Returns a disk, and what it should get of each page."""
    rows = page_rows(caches)
    pages = [b"".join(row[page].numpy().tobytes() for row in rows) for page in range(6)]
    return RecordedDisk(PageLog(folder, max_bytes=1 << 20, page_bytes=len(pages[0]), identity=b"test")), pages


def test_layers_are_ready_before_the_disk_has_pages(tmp_path: Path) -> None:
    """A plan that stores a page and loads two."""
    caches = make_pages()
    disk, pages = make_disk(tmp_path, caches)
    host = HostPages(caches, 4, disk=disk)
    host.start([(False, 0, 0), (False, 1, 1)], must_wait=True)
    caches[1].k[2:4] = 0
    host.start([(False, 5, 2), (True, 2, 0), (True, 3, 1)], [b"k" * 16], must_wait=False)
    waiting = threading.Thread(target=host.wait_for_layer, args=(1,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive() and not disk.pages
    assert torch.equal(caches[1].k[2:4], caches[1].k[:2])
    disk.may_put.set()
    host.wait()
    assert disk.pages == [(b"k" * 16, pages[5])] and host.take_loads()[0] == 2


def test_a_disk_gets_each_page_of_a_slot(tmp_path: Path) -> None:
    caches = make_pages()
    disk, pages = make_disk(tmp_path, caches)
    disk.may_put.set()
    host = HostPages(caches, 4, disk=disk)
    copies = [(False, 0, 2), (True, 3, 2), (False, 1, 2), (False, 4, 1)]
    host.start(copies, [bytes([number]) * 16 for number in range(3)], must_wait=True)
    assert disk.pages == [(bytes([number]) * 16, pages[page]) for number, page in enumerate((0, 1, 4))]
    assert torch.equal(caches[0].k[3], caches[0].k[0])


def test_failed_copy_ends_the_wait() -> None:
    host = HostPages(make_pages(), 2)
    with pytest.raises(IndexError):
        host.start([(False, 77, 0)], must_wait=True)
    with pytest.raises(IndexError):
        host.wait()
    with pytest.raises(IndexError):
        host.wait_for_layer(0)


def test_no_host_memory_has_no_copies() -> None:
    NO_HOST_PAGES.start([], [], must_wait=False)
    NO_HOST_PAGES.wait()
    assert NO_HOST_PAGES.take_loads() == (0, 0.0)


def test_a_rank_without_a_disk_stores_in_memory() -> None:
    """Plans have keys if a disk is configured, also where its folder cannot be used."""
    caches = make_pages()
    stored = caches[0].tensors[0][1].clone()
    host = HostPages(caches, 4)
    host.start([(False, 1, 2)], [b"k" * 16], must_wait=True)
    caches[0].tensors[0][1].zero_()
    host.start([(True, 1, 2)], must_wait=True)
    assert torch.equal(caches[0].tensors[0][1], stored)
