"""The fleet simulator over the traces: a tenth of each workload, under every policy."""

import json
import os
from pathlib import Path

import pytest

from bench.simulate.__main__ import main
from bench.simulate.workloads import LETTERS, POLICIES

pytestmark = pytest.mark.system
TRACES = Path(os.environ.get("PHALANX_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/traces")
def test_quick_run_plays_every_workload_under_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--traces", str(TRACES), "--quick", "--out", str(out)]) == 0
    played = json.loads(out.read_text())["workloads"]
    assert set(played) == set(LETTERS)
    for name in "ABCD":
        assert set(played[name]) == set(POLICIES), name
    moves = [run["moves"] for name in LETTERS for policy, runs in played[name].items() if policy == "phalanx" for run in runs]
    assert sum(moves) > 0
    assert "| C: preemptions against no moves, at most |" in capsys.readouterr().out
