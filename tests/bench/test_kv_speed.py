"""The comparison of steps over compressed pages runs in each of its modes."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench.kv_cache.speed import calibrate, compare
from tests.runtime.tiny import save_tiny

DEFAULTS = {"calibrated": False, "expanded": False, "prompt": 0, "requests": 2, "pairs": 2, "threads": 1, "dtype": "float32"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"calibrated": True}, {"prompt": 16}, {"prompt": 16, "expanded": True}],
    ids=["decode", "calibrated", "chunk", "expanded"],
)
def test_every_comparison_gives_times_and_their_ratio(tmp_path: Path, changes: dict[str, bool | int]) -> None:
    folder = save_tiny(tmp_path / "model")
    if "calibrated" in changes:
        calibrate(folder)
    row = compare(folder, "int8", 32, Namespace(**{**DEFAULTS, **changes}))
    dtype, context, other, step, ratio, interval = (cell.strip() for cell in row.strip("|").split("|"))
    low, high = map(float, interval.split(" to "))
    assert (dtype, context) == ("int8", "32")
    assert min(float(other), float(step)) >= 0 and low <= float(ratio) <= high
