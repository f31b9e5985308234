"""The benchmark of the adaptive host tier."""

import json
from pathlib import Path

import pytest

from bench.kv_cache.adaptive import PhaseResult, Trial, best_sizes, main, make_requests

TRIAL = Trial(documents=4, phase_requests=30, device=32, floor=32, limit=384, min_gain=0.2, eviction="lru")


def test_sizes_cover_floor_to_limit() -> None:
    sizes = TRIAL.coarse_sizes
    assert sizes == sorted(set(sizes)) and (sizes[0], sizes[-1]) == (32, 384)
    near = TRIAL.sizes_near(128)
    assert 92 >= near[0] >= 32 and 160 <= near[-1] <= 384
    assert TRIAL.sizes_near(32)[0] == 32 and TRIAL.sizes_near(384)[-1] == 384


def test_working_set_doubles_and_halves() -> None:
    blocks = [arrival.blocks[0] // 32 for arrival in make_requests(TRIAL)]
    assert [max(blocks[first : first + 30]) < 4 for first in (0, 30, 60)] == [True, False, True]
    assert max(blocks) < 8


def test_best_size_weighs_hits_against_pages() -> None:
    rates = {100: 0.5, 200: 0.9, 384: 0.95}
    runs = {size: [PhaseResult(rate, size, float(size), 0)] * 3 for size, rate in rates.items()}
    assert best_sizes(TRIAL, runs) == [200, 200, 200]


@pytest.mark.slow
def test_benchmark_compares_all_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Phases are too short for the tier to follow, and the verdict says so."""
    assert main(["--documents", "8", "--phase", "30", "--output", str(tmp_path / "out.json")]) == 1
    output = capsys.readouterr().out
    assert "90 requests, 64 pages on the device, host memory of 64 to 768" in output
    assert "\nadaptive " in output and "\n768 pages " in output and "\nphase 3 ends with " in output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert len(figures["adaptive"]) == len(figures["best"]) == 3 and max(figures["distances"]) < 0
