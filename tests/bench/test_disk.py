"""The bench of the disk tier on small logs."""

from pathlib import Path

import pytest

from bench.kv_cache.disk import kept_table, measure_checksums, measure_compaction, measure_opening, measure_rates, rate_table


def test_rates_of_log_and_plain_file_are_reported(tmp_path: Path) -> None:
    rates = measure_rates(tmp_path, page_bytes=6000, count=20, pairs=2) + measure_checksums(6000, pairs=2, repeat=2)
    assert [rate.name.split(" ")[0].strip(",") for rate in rates] == ["write", "read", "read", "checksum", "checksum"]
    assert all(rate.ours > 0 and rate.theirs > 0 for rate in rates)
    assert rate_table(rates).count("\n") == 1 + len(rates)
    assert list(tmp_path.iterdir()) == []


def test_opening_is_timed_for_each_policy(tmp_path: Path) -> None:
    found = list(measure_opening(tmp_path, [30]))
    assert [policy for _, policy, _, _ in found] == ["lru", "lfu", "fifo", "w-tinylfu", "adaptive"]


@pytest.mark.slow
def test_compaction_keeps_more_pages(tmp_path: Path) -> None:
    busy, idle = (measure_compaction(tmp_path, "lru", budget, segments=34) for budget in (0, 4))
    assert busy.displaced > 0 == busy.compacted and idle.compacted > 0
    assert busy.hit_ratio < idle.hit_ratio <= 1
    assert kept_table([busy, idle]).count("\n") == 3
