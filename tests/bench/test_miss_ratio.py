"""The benchmark of the miss-ratio curve: exact rates, table and verdicts. No speed is asserted."""

import json
from pathlib import Path

import pytest

from bench.engine.eviction import as_keys
from bench.engine.miss_ratio import cut_blocks, exact_hit_rates, main, run_pool, verdicts


def test_trace_is_compared_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [{"timestamp": 1000 * i, "hash_ids": [0, 1 + i % 7, 10 + i % 7]} for i in range(60)]
    trace.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert main(["--trace", str(trace), "--share", "0.5", "--output", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["prompts"], result["pool"], result["rate"]) == (60, 7, 1)
    assert max(result["error"], result["error_below"]) < 1e-9 and 0 < result["bytes"] and 0 < result["core_share"]
    assert result["tiers_us_per_lookup"] > 0 < result["tiers_share_of_pool"]
    assert "largest error 0.00 points" in capsys.readouterr().out


def test_exact_rates_and_the_pool_agree() -> None:
    prompts = as_keys([[0, 1], [0, 2], [0, 1], [3, 4], [0, 2]])
    assert exact_hit_rates(prompts)[:7] == [0, 0.2, 0.2, 0.4, 0.4, 0.5, 0.5]
    assert run_pool(prompts, 10).found == [0, 1, 2, 0, 2]
    run = run_pool(prompts, 3)
    assert run.evicted[3] == [prompts[1][1], prompts[0][1]] and run.found[4] == 1, "ends of chains are evicted first"
    assert run.in_host(prompts) == [0, 0, 0, 0, 1]
    assert cut_blocks(prompts)[0][:32] == cut_blocks(prompts)[1][:32]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [True, True, True, True]),
        ({"error": 0.02}, [False, True, True, True]),
        ({"error_below": 0.02}, [True, False, True, True]),
        ({"bytes": (8 << 20) + 1}, [True, True, False, True]),
        ({"core_share": 0.011}, [True, True, True, False]),
    ],
    ids=["all hold", "inexact", "inexact when small", "too large", "too slow"],
)
def test_bounds_are_judged(changes: dict[str, float], kept: list[bool]) -> None:
    assert list(verdicts({"error": 0.019, "error_below": 0.019, "bytes": 8 << 20, "core_share": 0.01} | changes).values()) == kept
