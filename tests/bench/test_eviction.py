"""Comparison of eviction policies: traces, table and verdicts. No speed is asserted."""

import json
from pathlib import Path

import pytest

from bench.engine.eviction import PolicyResult, main, make_trace, read_trace, verdicts
from phalanx_api.engine_config import EVICTION_POLICIES


def test_every_policy_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[0, 1 + i % 7, 10 + i % 7] for i in range(60)]
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in prompts))
    main(["--trace", str(trace), "--share", "0.5", "--repetitions", "1", "--output", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["prompts"], result["footprint"], result["pool"]) == (60, 15, 7)
    assert [policy["policy"] for policy in result["policies"]] == list(EVICTION_POLICIES)
    for policy in result["policies"]:
        assert policy["operations"] == 180 and 0 < policy["hit_rate"] < 1 and policy["evicted"] > 0
    assert "w-tinylfu" in capsys.readouterr().out


def test_equal_ids_are_equal_pages(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [3, 4]}\n{"hash_ids": [3, 5]}\n')
    first, second = read_trace(trace)
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize("kind", ["zipf", "scan", "loop", "shift"])
def test_synthetic_traces_share_their_first_page(kind: str) -> None:
    prompts = make_trace(kind, 60)
    assert len(prompts) == 60 and len({keys[0] for keys in prompts}) == 1
    assert prompts == make_trace(kind, 60)


@pytest.mark.parametrize(
    ("adaptive_hits", "cpu_s", "kept"),
    [(98, 0.001, [True, True]), (97, 0.001, [False, True]), (98, 0.0011, [True, False])],
    ids=["both", "too few hits", "too slow"],
)
def test_bounds_are_judged(adaptive_hits: int, cpu_s: float, kept: list[bool]) -> None:
    results = [PolicyResult("lru", 100, 1000, 0, 0.001 * 10), PolicyResult("adaptive", adaptive_hits, 1000, 0, cpu_s * 10)]
    assert list(verdicts(results).values()) == [kept[0], kept[1]]
