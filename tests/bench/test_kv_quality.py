"""The bench of compressed pages on a tiny model with random weights."""

from pathlib import Path

import pytest
import torch

from bench.kv_cache.quality import measure, report
from phalanx_runtime.commands import CalibrationSpec
from phalanx_runtime.fitting.calibrate import calibrate
from phalanx_runtime.model.attention.calibration import write_calibration
from phalanx_runtime.model.attention.page_format import FORMATS
from tests.runtime.tiny import save_tiny

SIZES = {"length": 64, "texts": 2, "parts": 2}


def test_figures_of_each_format_are_reported(tmp_path: Path) -> None:
    found = measure(save_tiny(tmp_path / "model"), "some words of a text " * 40, SIZES)
    assert [quality.kv_cache_dtype for quality in found] == list(FORMATS)
    errors = {quality.kv_cache_dtype: sum(quality.kl_millinats) for quality in found}
    assert 0 < errors["int8"] < errors["int4"], "the codes were read"
    assert all(0 < share <= 1 for quality in found for share in quality.agreement)
    assert report(found, 64).count("\n") == 1 + len(FORMATS)


def test_calibrated_pages_are_measured_beside_others(tmp_path: Path) -> None:
    folder, text = save_tiny(tmp_path / "model"), "some words of a text " * 40
    spec = CalibrationSpec(model_dir=str(folder), out="", tokens=200, dtype="float32")
    write_calibration(tmp_path / "pages.kv", *calibrate(spec, torch.device("cpu"), lambda: 0.0))
    found = measure(folder, text, SIZES, calibrations=[tmp_path / "pages.kv"])
    assert [one.calibration for one in found] == ["", "pages"] * len(FORMATS)
    assert len({sum(one.kl_millinats) for one in found}) == 2 * len(FORMATS), "the calibration changed codes"
    assert report(found, 64).count(", pages |") == len(FORMATS)


def test_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="fewer than 64 tokens"):
        measure(save_tiny(tmp_path / "model"), "few words", SIZES)
