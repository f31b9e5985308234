"""The bench of sliding windows counts requests that fit a pool."""

import pytest

from bench.kv_cache.windows import Load, hold, main, mixed_pool
from phalanx_runtime.core.step_plan import PoolShape


def test_a_window_lets_more_requests_run_at_once() -> None:
    load = Load(prompt=700, output=20, requests=12, step_tokens=512)
    every, windowed = hold(PoolShape(96, 16), load), hold(PoolShape(96, 16, window=64), load)
    assert every is not None and windowed is not None
    assert every.requests == pytest.approx(2, abs=0.3), "1,536 tokens hold two requests"
    assert windowed.tokens < every.tokens / 2 and windowed.requests > 2 * every.requests
    assert hold(PoolShape(40, 16), load) is None


def test_parts_let_more_requests_run_at_once() -> None:
    """One of six layers attends to all tokens: 96 pages of all layers."""
    load = Load(prompt=700, output=20, requests=12, step_tokens=512)
    pool = mixed_pool(96, 64, 6, load, longest=2000)
    assert pool.num_pages + 5 * pool.num_parts <= 6 * 96 < pool.num_pages + 5 * pool.num_parts + 5
    every, mixed = hold(PoolShape(96, 16), load), hold(pool, load, 6)
    assert every is not None and mixed is not None
    assert mixed.tokens < every.tokens / 2 and mixed.requests > 2 * every.requests


def test_the_table_has_a_row_per_length(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--window", "64", "--pool-tokens", "800", "--requests", "4", "--output", "8", "--step-tokens", "512"]
    main(["--prompts", "400", "1000", *sizes])
    header, _, fits, long = capsys.readouterr().out.splitlines()
    assert header.count("|") == fits.count("|") == long.count("|")
    assert "does not fit" in long and "does not fit" not in fits
