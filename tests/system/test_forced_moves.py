"""Two hundred moves at random indexes, forced by a router over real engines: greedy, seeded, JSON schema, n = 2."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.moves import through_router as router_moves

pytestmark = pytest.mark.system


def test_tokens_are_equal_after_many_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    output = tmp_path / "figures.json"
    assert router_moves.main(["--moves", "200", "--rounds", "1", "--json", str(output)]) == 0, output.read_text()
    figures = json.loads(output.read_text())
    assert figures["violations"] == []
    assert figures["moves by end"]["moved"] >= 200 and figures["bytes"] > 0
    assert {kind.split(",")[0] for kind in figures["moved by kind"]} == set(router_moves.KINDS)
