"""A soak of a fleet in virtual time."""

from pathlib import Path

import pytest

from bench import totals
from bench.soak.__main__ import main
from bench.soak.record import Settings, read
from bench.soak.virtual import REPLACING, rounds


def test_rounds_follow_from_seed_and_number() -> None:
    settings = Settings("fleet", 3, 2, 0, 0.0)
    drawn = rounds(settings)
    first, second = next(drawn), next(drawn)
    assert next(rounds(settings, 1)) == second and first[1].asks != second[1].asks
    assert (first[1].num_groups, second[1].num_groups) == (2, 2)
    assert first[1].faults and not {fault.kind for fault in first[1].faults} & set(REPLACING)


def test_soak_of_a_fleet_records_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with the folder of a former one continues with the next round."""
    monkeypatch.setenv("PHALANX_TOTALS", str(tmp_path / "totals.jsonl"))
    monkeypatch.setenv("PYTHONPATH", "")
    for _ in range(2):
        main(["--folder", str(tmp_path), "--target", "fleet", "--minutes", "1", "--seed", "2", "--groups", "2"])
    run = read(tmp_path)
    assert run is not None and run.violations == []
    assert [sample.conversations for sample in run.samples if sample.is_idle] == [1, 2]
    assert run.streams["whole"] and not run.streams.get("lost")
    assert [strike.number for strike in run.strikes] == list(range(len(run.strikes)))
    last = run.samples[-1].uses["fleet"]
    assert last.life == "1" and last.values["used_pages"] == last.values["journals"] == 0
    assert {"rss_kib", "anonymous_kib", "descriptors", "tasks", "connections", "log_bytes"} <= set(last.values)
    batches = totals.read(tmp_path / "totals.jsonl")
    total = totals.sums(batches)["soak fleet", ""]
    assert total.counts["virtual hours"] == pytest.approx(run.seconds / 3600)
    assert (total.seed, total.replays) == (2, [])
    wrong = ("streams lost", "streams changed", "violations", "growing slopes", "pieces without a whole stream")
    assert (total.failures, [total.counts[name] for name in wrong]) == (0, [0] * 5)
