"""The disk tier returns what was put, within its bytes, by any policy."""

import random
from pathlib import Path

import pytest

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.rank.tiers.compaction import SPARE_SEGMENTS
from phalanx_runtime.rank.tiers.page_log import PageLog
from tests.runtime.core.reference_caches import make_slow
from tests.runtime.rank.tiers.faulty_files import BROKEN, FaultyFiles
from tests.runtime.rank.tiers.logs import (
    CAPACITY,
    LAYOUT,
    MAX_BYTES,
    PAGE,
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


def test_a_page_comes_back_from_its_parts(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert put(log, 1) == []
    assert key_of(1) in log and key_of(2) not in log
    assert get(log, key_of(1)) == page_of(key_of(1))
    assert get(log, key_of(2)) is None
    assert (log.counters.writes, log.counters.reads, log.counters.hits) == (1, 2, 1)


def test_pages_survive_the_process(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put_all(log, range(20))
    log.close()
    log = open_log(tmp_path)
    assert log.keys() == [key_of(number) for number in range(20)]
    assert [get(log, key) for key in log.keys()] == [page_of(key) for key in log.keys()]
    put_all(log, range(20, 40))
    assert wrong_pages(log) == [] and len(log.keys()) == 40
    assert len(segments(tmp_path)) == -(-40 // LAYOUT.slots), "the newest segment is continued"


def test_a_present_page_is_not_written_twice(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put(log, 1)
    assert put(log, 1, version=1) == []
    assert get(log, key_of(1)) == page_of(key_of(1)) and log.counters.writes == 1


def test_the_newest_record_of_a_key_wins(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = open_log(tmp_path, files=files)
    put(log, 1)
    files.errors["open"] = BROKEN  # the record of a dropped page cannot be marked
    put_all(log, range(100, 100 + CAPACITY))
    assert key_of(1) not in log and files.raised > 0
    files.errors.clear()
    put(log, 1, version=1)
    log.close()
    assert get(open_log(tmp_path), key_of(1)) == page_of(key_of(1), 1)


def test_other_sizes_are_rejected(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    put(log, 1)
    with pytest.raises(ValueError, match="a page has"):
        log.put(key_of(2), [memoryview(bytes(PAGE + 1))])
    with pytest.raises(ValueError, match="a page has"):
        log.get(key_of(1), memoryview(bytearray(PAGE - 1)))
    assert get(log, key_of(1)) is not None


def test_pages_too_large_for_the_bound_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PageLog(tmp_path, max_bytes=1000, page_bytes=400, identity=b"model")


def test_a_page_may_have_many_parts(tmp_path: Path) -> None:
    page = memoryview(bytes(range(256)) * 10)
    log = PageLog(tmp_path, max_bytes=1 << 20, page_bytes=2560, identity=b"model")
    assert log.put(key_of(1), [page[at : at + 1] for at in range(2560)]) == []
    into = memoryview(bytearray(2560))
    assert log.get(key_of(1), into) and into == page


@pytest.mark.parametrize("idle", [True, False], ids=["compacted", "busy"])
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_bound_holds_under_each_policy(tmp_path: Path, policy: EvictionPolicy, idle: bool) -> None:
    log, chance, live = open_log(tmp_path, eviction=policy), random.Random(1), set[bytes]()
    for turn in range(1500):
        number = int(chance.paretovariate(0.5)) % (3 * CAPACITY)
        if not log.get(key_of(number), memoryview(bytearray(PAGE))):
            live.add(key_of(number))
            live -= set(put(log, number))
        if idle:
            live -= set(log.compact(turn))
        if turn % 16 == 0:
            assert size_on_disk(tmp_path) <= log.bytes_on_disk <= MAX_BYTES
            assert len(live) <= log.capacity and sorted(log.keys()) == sorted(live)
    assert wrong_pages(log) == [] and log.counters.corrupt == 0
    assert log.counters.evicted > 0
    is_in_order = policy == "fifo"
    assert (log.counters.displaced > 0) == (not idle and not is_in_order)
    assert (log.counters.compacted_bytes > 0) == (idle and not is_in_order)


@pytest.mark.parametrize("policy", [policy for policy in EVICTION_POLICIES if policy != "adaptive"])
def test_victims_are_those_of_the_policy(tmp_path: Path, policy: EvictionPolicy) -> None:
    log, reference, chance = open_log(tmp_path, eviction=policy), make_slow(policy, CAPACITY), random.Random(2)
    for turn in range(1200):
        key = key_of(number := int(chance.paretovariate(0.4)) % (4 * CAPACITY))
        if key in log:
            assert get(log, key) == page_of(key)
            reference.hit(key)
        else:
            victims = [reference.victim(lambda _: True)] if len(log.keys()) == CAPACITY else []
            for victim in victims:
                reference.remove(victim)
            assert put(log, number) == victims
            reference.insert(key)
        reference.release(key)
        assert log.compact(turn) == []
    assert log.counters.evicted > 100 and log.counters.displaced == 0


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_restart_finds_the_live_pages_only(tmp_path: Path, policy: EvictionPolicy) -> None:
    log, chance = open_log(tmp_path, eviction=policy), random.Random(4)
    for turn in range(8 * CAPACITY):
        number = int(chance.paretovariate(0.4)) % (3 * CAPACITY)
        if get(log, key_of(number)) is None:
            put(log, number)
        if turn % 3:
            log.compact(turn)
        if turn % CAPACITY == 0:
            keys = log.keys()
            log.close()
            log = open_log(tmp_path, eviction=policy)
            assert sorted(log.keys()) == sorted(keys)
    assert wrong_pages(log) == [] and log.counters.corrupt == 0


def test_dead_segments_are_removed_at_once(tmp_path: Path) -> None:
    log = open_log(tmp_path, eviction="fifo")
    put_all(log, range(10 * CAPACITY))
    assert log.counters.displaced == log.counters.compacted_bytes == 0
    assert len(segments(tmp_path)) <= CAPACITY // LAYOUT.slots + 2


def test_compaction_keeps_pages_that_are_in_use(tmp_path: Path) -> None:
    """Pages in use are spread over all segments; without compaction they go with their segment."""
    kept = {}
    for idle in (True, False):
        log = open_log(tmp_path / str(idle))
        used = range(0, CAPACITY, 2)
        put_all(log, range(CAPACITY))
        for number in range(CAPACITY, 3 * CAPACITY):
            for key in map(key_of, used):
                get(log, key)
            put(log, number)
            if idle:
                log.compact(number)
        kept[idle] = sum(key_of(number) in log for number in used)
        assert wrong_pages(log) == []
    assert kept[True] == len(used) > kept[False]


def churn(log: PageLog, turns: int, seed: int) -> None:
    """Reads and writes pages of unequal popularity, without compaction."""
    chance = random.Random(seed)
    for _ in range(turns):
        number = int(chance.paretovariate(0.3)) % (3 * CAPACITY)
        if get(log, key_of(number)) is None:
            put(log, number)


def test_compaction_stays_within_its_budget(tmp_path: Path) -> None:
    log, copied = open_log(tmp_path, eviction="lfu", write_budget=PAGE / 40), []
    for second in range(8 * CAPACITY):
        churn(log, 1, seed=second)
        log.compact(second)
        copied.append(log.counters.compacted_bytes)
        assert copied[-1] <= PAGE * second / 40
    assert copied[-1] > 0 and log.counters.displaced > 0, "the budget is the limit"


def test_idle_compaction_ends_with_spare_segments(tmp_path: Path) -> None:
    log = open_log(tmp_path, eviction="lfu")
    churn(log, 8 * CAPACITY, seed=1)
    before, keys = log.bytes_on_disk, log.keys()
    assert before > MAX_BYTES - SPARE_SEGMENTS * LAYOUT.size
    for second in range(1000):
        log.compact(second)
    assert log.bytes_on_disk <= MAX_BYTES - SPARE_SEGMENTS * LAYOUT.size
    assert size_on_disk(tmp_path) <= log.bytes_on_disk and log.keys() == keys
    copied = log.counters.compacted_bytes
    log.compact(2000)
    assert 0 < copied == log.counters.compacted_bytes and wrong_pages(log) == []


def test_pages_of_a_larger_log_are_found(tmp_path: Path) -> None:
    log = open_log(tmp_path, max_bytes=20 * MAX_BYTES)
    put_all(log, range(4 * CAPACITY))
    log.close()
    log = open_log(tmp_path)
    assert 0 < len(log.keys()) <= CAPACITY
    assert wrong_pages(log) == [] and size_on_disk(tmp_path) <= log.bytes_on_disk <= MAX_BYTES
    put_all(log, range(4 * CAPACITY, 8 * CAPACITY))
    assert wrong_pages(log) == [] and log.bytes_on_disk <= MAX_BYTES
