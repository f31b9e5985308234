"""The fleet simulator over the traces themselves: a tenth of each load, under every policy."""

import json
import os
from pathlib import Path

import pytest

from bench.simulate.__main__ import main
from bench.simulate.workloads import EVERYONE, LETTERS

pytestmark = pytest.mark.system
TRACES = Path(os.environ.get("PHALANX_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/traces")
def test_the_quick_run_plays_every_load_under_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--traces", str(TRACES), "--quick", "--out", str(out)]) == 0
    played = json.loads(out.read_text())["workloads"]
    assert set(played) == set(LETTERS)
    for name in "ABCD":
        assert set(played[name]) == set(EVERYONE), name
    moved = [one["moves"] for name in LETTERS for policy, each in played[name].items() if policy == "phalanx" for one in each]
    assert sum(moved) > 0
    assert "| C: preemptions against no moves, at most |" in capsys.readouterr().out
