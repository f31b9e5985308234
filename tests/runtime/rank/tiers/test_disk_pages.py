"""The disk thread of a rank."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx_runtime.core.migration.page_orders import DiskChanged, DiskReport, FetchPages, PagesFetched
from phalanx_runtime.core.step_plan import PoolShape, StepPlan
from phalanx_runtime.model.states.cache import StateKey
from phalanx_runtime.model.states.step import StepRows
from phalanx_runtime.model.states.store import RowStates, StateShape
from phalanx_runtime.rank.tiers import disk_pages
from phalanx_runtime.rank.tiers.disk_pages import DiskPages, max_queued_pages
from phalanx_runtime.rank.tiers.opening import PageBytes
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.state_slots import StateSlots, prepare_states, record_bytes
from tests.polling import wait_until

PAGE_BYTES = 64
KEYS = [bytes([number]) * 16 for number in range(6)]


def content(number: int) -> bytes:
    return bytes([number + 100]) * PAGE_BYTES


def make_log(folder: Path) -> PageLog:
    return PageLog(folder, max_bytes=1 << 20, page_bytes=PAGE_BYTES, identity=b"test", segment_bytes=1 << 14)


def put_all(disk: DiskPages) -> None:
    for number, key in enumerate(KEYS):
        half = PAGE_BYTES // 2
        disk.put(key, [memoryview(content(number)[:half]), memoryview(content(number)[half:])])


def changes(reports: list[DiskReport]) -> list[DiskChanged]:
    return [report for report in reports if isinstance(report, DiskChanged)]


def num_written(reports: list[DiskReport]) -> int:
    return sum(len(report.added) for report in changes(reports))


def test_pages_are_written_and_read_with_reports(tmp_path: Path) -> None:
    disk, reports = DiskPages(make_log(tmp_path)), list[DiskReport]()
    slots: dict[int, bytes] = {}
    steps = list[int]()
    put_all(disk)
    disk.start(reports.append)
    wait_until(lambda: num_written(reports) == len(KEYS))
    order = FetchPages(number=3, keys=[*KEYS[:3], b"?" * 16, KEYS[3]], slots=[9, 8, 7, 6, 5], step=11)
    disk.fetch(order, steps.append, lambda slot, page: slots.update({slot: bytes(page)}), reports.append)
    wait_until(lambda: any(isinstance(report, PagesFetched) for report in reports))
    assert changes(reports)[:7] == [DiskChanged([], []), *(DiskChanged([key], []) for key in KEYS)]
    fetched = next(report for report in reports if isinstance(report, PagesFetched))
    assert (fetched.number, fetched.count) == (3, 3)
    assert steps == [11]
    assert {slot: slots[slot] for slot in (9, 8, 7)} == {9: content(0), 8: content(1), 7: content(2)}
    wait_until(lambda: reports[-1] == DiskChanged([], [b"?" * 16]))


def test_a_page_that_is_stored_again_is_reported_again(tmp_path: Path) -> None:
    """Another rank may have lost it: then rank 0 forgets the key until all ranks have it again."""
    disk, reports = DiskPages(make_log(tmp_path)), list[DiskReport]()
    put_all(disk)
    put_all(disk)
    disk.start(reports.append)
    expected = [DiskChanged([key], []) for key in [*KEYS, *KEYS]]
    wait_until(lambda: [report for report in reports if report != DiskChanged([], [])] == expected)


def test_a_restart_reports_the_pages_on_disk(tmp_path: Path) -> None:
    pages = make_log(tmp_path)
    for number, key in enumerate(KEYS):
        pages.put(key, [memoryview(content(number))])
    pages.close()
    reports = list[DiskReport]()
    DiskPages(make_log(tmp_path)).start(reports.append)
    assert reports == [DiskChanged(KEYS, [])], "at once: the first request finds them"


def test_bytes_of_compaction_and_removed_segments_are_reported(tmp_path: Path) -> None:
    """Pages with a use between stay, in segments whose other pages were dropped."""
    log = PageLog(tmp_path, max_bytes=1 << 18, page_bytes=PAGE_BYTES, identity=b"test", write_budget=1e9)
    for number in range(2 * log.capacity):
        if number >= log.capacity and number % 64 == 0:
            for kept in range(0, log.capacity, 4):
                if kept.to_bytes(16, "big") in log:
                    log.put(kept.to_bytes(16, "big"), [memoryview(content(1))])
        log.put(number.to_bytes(16, "big"), [memoryview(content(1))])
        log.compact(float(number))
    assert log.counters.compacted_bytes > 0 and log.counters.reclaimed_bytes > 0
    disk, reports = DiskPages(log), list[DiskReport]()
    disk.start(reports.append)
    wait_until(lambda: bool(reports))
    (first,) = reports
    assert isinstance(first, DiskChanged)
    assert (first.compacted_bytes, first.reclaimed_bytes) == (log.counters.compacted_bytes, log.counters.reclaimed_bytes)
    disk.put(b"?" * 16, [memoryview(content(2))])
    wait_until(lambda: any(b"?" * 16 in report.added for report in reports if isinstance(report, DiskChanged)))
    changes = [report for report in reports if isinstance(report, DiskChanged)]
    assert sum(report.reclaimed_bytes for report in changes) == log.counters.reclaimed_bytes, "each byte is reported once"


def test_compaction_runs_between_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while pages are stored so often that the disk is never idle for long. Each turn uses three in four pages."""
    monkeypatch.setattr(disk_pages, "IDLE_S", 3600.0)
    log = PageLog(tmp_path, max_bytes=1 << 18, page_bytes=PAGE_BYTES, identity=b"test", write_budget=1e9)
    for number in range(log.capacity):
        log.put(number.to_bytes(16, "big"), [memoryview(content(1))])
    disk, reports = DiskPages(log), list[DiskReport]()
    disk.start(reports.append)
    for number in range(log.capacity, 2 * log.capacity, 64):
        for kept in range(0, log.capacity, 4):
            disk.put(kept.to_bytes(16, "big"), [memoryview(content(1))])
        for new in range(number, number + 64):
            disk.put(new.to_bytes(16, "big"), [memoryview(content(1))])
        wait_until(lambda last=new: any(last.to_bytes(16, "big") in report.added for report in changes(reports)))  # type: ignore[misc]
        if log.counters.compacted_bytes:
            break
    wait_until(lambda: sum(report.compacted_bytes for report in changes(reports)) > 0)


def test_failed_fetch_is_answered(tmp_path: Path) -> None:
    """Also one that fails in a call of the rank; later ones work."""
    disk, reports = DiskPages(make_log(tmp_path)), list[DiskReport]()
    put_all(disk)
    disk.start(reports.append)
    wait_until(lambda: num_written(reports) == len(KEYS))

    def fail(step: int) -> None:
        raise RuntimeError("the rank lost its device")

    for number, wait in enumerate((fail, lambda step: None)):
        order = FetchPages(number=number, keys=KEYS[:2], slots=[0, 1], step=1)
        disk.fetch(order, wait, lambda slot, page: None, reports.append)
    wait_until(lambda: sum(isinstance(report, PagesFetched) for report in reports) == 2)
    assert [report.count for report in reports if isinstance(report, PagesFetched)] == [0, 2]


def test_many_keys_are_reported_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pages, "MAX_REPORTED_KEYS", 4)
    pages = make_log(tmp_path)
    for number, key in enumerate(KEYS):
        pages.put(key, [memoryview(content(number))])
    reports = list[DiskReport]()
    DiskPages(pages).start(reports.append)
    assert reports == [DiskChanged(KEYS[:4], [], has_more=True), DiskChanged(KEYS[4:], [])]


def test_queue_has_a_bound_in_bytes() -> None:
    assert [max_queued_pages(size) for size in (1 << 20, 2 << 20, 64 << 20)] == [128, 64, 16]
    assert [max_queued_pages(size, 2) for size in (1 << 20, 100 << 20)] == [128, 2], "snapshots may be large"


def test_pages_beyond_the_queue_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread starts with the reports."""
    pages = make_log(tmp_path)
    monkeypatch.setattr(disk_pages, "MAX_QUEUED_BYTES", 20 * pages.page_bytes)
    disk, reports = DiskPages(pages), list[DiskReport]()
    for number in range(20 + 5):
        disk.put(number.to_bytes(16, "little"), [memoryview(content(1))])
    assert disk.num_unqueued == 5
    disk.start(reports.append)
    wait_until(lambda: num_written(reports) == 20)
    assert sum(report.unwritten for report in reports if isinstance(report, DiskChanged)) == 5


class GatedLog(PageLog):
    """Writes each page once it is let, and records the order of calls."""

    calls: list[str]
    may_write: threading.Semaphore

    def put(self, key: bytes, parts: Sequence[memoryview]) -> list[bytes]:
        self.may_write.acquire()
        self.calls.append("put")
        return super().put(key, parts)

    def get(self, key: bytes, into: memoryview) -> bool:
        self.calls.append("get")
        return super().get(key, into)


def test_a_read_comes_before_waiting_writes(tmp_path: Path) -> None:
    log = GatedLog(tmp_path, max_bytes=1 << 20, page_bytes=PAGE_BYTES, identity=b"test", segment_bytes=1 << 14)
    log.calls, log.may_write = [], threading.Semaphore(1)
    log.put(KEYS[0], [memoryview(content(0))])
    disk, reports = DiskPages(log), list[DiskReport]()
    disk.start(reports.append)
    for number in range(16):
        disk.put(bytes([number]) * 16, [memoryview(content(number))])
    disk.fetch(FetchPages(number=1, keys=KEYS[:1], slots=[0], step=1), lambda step: None, lambda *_: None, reports.append)
    log.may_write.release(2)
    wait_until(lambda: PagesFetched(1, 1) in reports)
    log.may_write.release(16)
    wait_until(lambda: log.calls.count("put") == 17)
    assert log.calls.index("get") <= 2, "after the page that was being written"


class ReadStates(RowStates):
    """Records which snapshots are read."""

    slots: list[int]

    def read_snapshot(self, slot: int, num_tokens: int) -> list[memoryview] | None:
        self.slots.append(slot)
        return super().read_snapshot(slot, num_tokens)


class Stateful:
    """A model with states of one row, two snapshots on the device, and two in host memory."""

    def __init__(self) -> None:
        shape = {StateKey(0, "conv", 0): StateShape((2,), torch.bfloat16)}
        self.states = ReadStates(shape, 1, torch.device("cpu"), num_snapshots=2)
        self.states.slots = []
        self.states.open_host(2)
        self.mixers = SimpleNamespace(mixers=[self], states=self.states)


@pytest.mark.parametrize(("kind", "size"), [(Stateful, 8 + 4), (object, 8)], ids=["states", "none"])
def test_snapshots_are_written_and_read(tmp_path: Path, kind: type[object], size: int) -> None:
    """Those of other tokens than their key's are not written. A rank without states keeps records for the keys.

    They are read in host memory, which has them already, unless another one has taken their place there.
    """
    model, saved = kind(), torch.tensor([[1.0, 2.0]])
    states = model.states if isinstance(model, Stateful) else None
    if states is not None:
        states.prepare([], [(0, 0)])
        states.begin(StepRows((0,), (0,), (8,)))
        states.scatter({StateKey(0, "conv", 0): saved}, [0])
    sizes = record_bytes(PageBytes(64), model, PoolShape(4, 8, 4, num_host_snapshots=2))
    assert (sizes.part, sizes.parts_per_page) == (size, 0.5)
    log = PageLog(tmp_path, max_bytes=1 << 20, page_bytes=sizes.part, identity=sizes.part_kind.encode())
    disk, reports = DiskPages(log, of_parts=True, min_queued=2), list[DiskReport]()
    disk.start(reports.append)
    plan = StepPlan(
        step=1,
        admitted=[],
        rows=[],
        starts=[],
        counts=[],
        pages=[],
        tokens=[],
        draws=[],
        state_stores=[(0, 2), (1, 2)],
        state_keys=[(KEYS[0], 8), (KEYS[1], 16)],
    )
    prepare_states(model, plan, disk)
    keys = KEYS[:1] if states is not None else KEYS[:2]
    wait_until(lambda: num_written(reports) == len(keys))
    order = FetchPages(number=1, keys=KEYS[:2], slots=[3, 2], step=1, is_part=True)
    disk.fetch(order, lambda step: None, StateSlots(states, disk).write, reports.append)
    wait_until(lambda: any(isinstance(report, PagesFetched) for report in reports))
    assert [report.count for report in reports if isinstance(report, PagesFetched)] == [len(keys)]
    if states is not None:
        assert states.slots == [0, 2]
        states.zero(1)
        states.prepare([(0, 3)], [])
        assert states.read(0, 8) == saved.bfloat16().view(torch.uint8).numpy().tobytes()
