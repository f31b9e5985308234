"""Fit of the step-time function: grid, hold-out and file. No time is asserted."""

import json
import random
from pathlib import Path

import pytest

from bench.engine.step_fit import Stepper, main, measure
from bench.engine.step_grid import EngineLimits, Point, fit, folds, make_grid, read_model
from phalanx_api.cost import StepModel
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.tiny import save_tiny

TRUTH = StepModel(fixed_s=0.01, token_s=0.0005, knee_tokens=8, context_s=2e-6, attention_s=3e-8, row_s=0.0004, prompt_s=0.02)
LIMITS = EngineLimits(max_num_seqs=16, max_num_batched_tokens=300, max_model_len=2048, num_pages=700, page_size=16)


def test_grid_contains_only_possible_steps() -> None:
    points = make_grid(LIMITS)
    assert all(LIMITS.fits(point) for point in points)
    assert len(set(points)) == len(points) > 25
    assert {point.decodes for point in points} >= {0, 1, 8, 16}
    assert any(point.decodes and point.prompt for point in points)
    assert not LIMITS.fits(Point(0, 0, 0, 0)), "an empty step is none"
    assert not LIMITS.fits(Point(16, 32, 16, 0)), "one row too many"
    assert not LIMITS.fits(Point(8, 2048, 0, 0)), "more pages than there are"


def test_each_point_is_held_out_once() -> None:
    points = make_grid(LIMITS)
    parts = folds(points, random.Random(3))
    assert len(parts) > 1 and sorted(map(str, points)) == sorted(str(point) for part in parts for point in part)


@pytest.mark.parametrize(("noise", "is_good"), [(0.02, True), (0.4, False)])
def test_fit_recovers_the_function_and_reports_holdout_error(noise: float, is_good: bool) -> None:
    rng = random.Random(5)
    points = make_grid(LIMITS)
    biases = {point: rng.uniform(1 - noise, 1 + noise) for point in points}
    times_s = {point: [TRUTH.predict(point.work) * biases[point] for _ in range(5)] for point in points}
    fitted = fit(times_s)
    assert fitted.is_good == is_good
    if is_good:
        assert fitted.model.token_s == pytest.approx(TRUTH.token_s, rel=0.1)
        assert fitted.model.prompt_s == pytest.approx(TRUTH.prompt_s, rel=0.1)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit({Point(1, 32, 0, 0): [0.1]})


def test_slow_point_is_dropped_others_run_each_round() -> None:
    class Slow(Stepper):
        def time(self, point: Point, limit_s: float) -> float | None:
            return None if point.decodes == 3 else super().time(point, limit_s)

    points = [Point(2, 8, 4, 0), Point(3, 8, 0, 0), Point(1, 5, 0, 0)]
    times_s = measure(Slow(FakeRunner(64, 4), 4), points, 3, limit_s=1.0)
    assert {point: len(walls) for point, walls in times_s.items()} == {points[0]: 3, points[2]: 3}


def test_fit_of_a_real_engine_round_trips_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "model")
    output = tmp_path / "fit.json"
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--kv-cache-memory-bytes", str(1 << 20)]
    main(["--model", str(folder), "--output", str(output), "--rounds", "3", *limits])
    written = json.loads(output.read_text())
    assert read_model(output) == StepModel(**written["step_model"])
    assert written["errors"]["held_out"]["num_points"] > 2
    assert written["errors"]["within_bounds"] in (True, False)
    assert written["served"]["model_hash"] and written["load_average"]["after"]
    assert "held out" in capsys.readouterr().out


def test_another_file_is_no_fit(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="contains no step_model"):
        read_model(tmp_path / "other.json")


def test_older_fit_file_loads_without_newer_fields(tmp_path: Path) -> None:
    known = {"fixed_s": 0.01, "token_s": 1e-4, "knee_tokens": 8, "context_s": 0.0, "attention_s": 0.0, "error": 0.05}
    (tmp_path / "fit.json").write_text(json.dumps({"step_model": known}))
    assert read_model(tmp_path / "fit.json") == StepModel(
        fixed_s=0.01, token_s=1e-4, knee_tokens=8, context_s=0.0, attention_s=0.0, error=0.05
    )
