"""The benchmark of the console."""

import pytest

from bench.router import console_view

pytestmark = pytest.mark.system


def test_a_small_fleet_is_drawn_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert console_view.main(["--groups", "4", "--streams", "20", "--frames", "3"]) in (0, 1)
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "ms" in rows["a frame"] and "%" in rows["router CPU"]
