"""The loading benchmark on a tiny model."""

from pathlib import Path

import pytest

from bench.engine.load import main
from tests.runtime.tiny import save_tiny


@pytest.mark.parametrize("flags", [[], ["--quantization", "int4", "--readers", "2"]])
def test_rates_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    main([str(save_tiny(tmp_path / "model", num_hidden_layers=2)), *flags])
    text = capsys.readouterr().out
    assert "GB in 1 files" in text and "share" in text
