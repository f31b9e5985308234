"""A fault at each step of a move, in virtual time, over the real router and engines: `python -m bench.moves.faults`, much shorter.

`tests/system/test_move_faults.py` runs each cell more often.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.moves.faults import cells, main, run_cell
from bench.virtual.world import STEPS
from tests.properties.worse_machines import WORSE


def check_step(step: str, runs: int) -> None:
    """Fails unless all is well, so many times in each cell of this step."""
    results = [run_cell(cell, runs) for cell in cells(f"{step} / ")]
    assert len(results) == 15
    assert {result.cell: result.wrong for result in results if result.wrong} == {}
    assert {result.cell: result.struck for result in results if result.struck < runs} == {}
    ends = sum((result.ends for result in results), Counter[str]())
    assert ends["moved"] > 0
    assert STEPS.index(step) > STEPS.index("ready") or sum(ends.values()) > ends["moved"]


@pytest.mark.parametrize("step", STEPS)
def test_failed_move_loses_no_index_stream_or_page(step: str) -> None:
    check_step(step, 1)


def test_failed_routers_stream_is_found_during_a_move() -> None:
    """A leader lets it go on, and the next router adopts it there, wherever the move stood."""
    results = [run_cell(cell, 4) for cell in cells(" / router / killed")]
    assert len(results) == len(STEPS)
    assert {result.cell: result.wrong for result in results if result.wrong} == {}
    assert [result.cell for result in results if not result.resumed] == []


@pytest.mark.parametrize("worse", WORSE)
def test_a_machine_with_a_mistake_is_found(worse: str) -> None:
    machines, cell, leave_share = WORSE[worse]
    assert any(run_cell(cell, 8, 1000 * i, machines, leave_share).wrong for i in range(8))


def test_results_can_be_written_down(tmp_path: Path) -> None:
    told = tmp_path / "results.json"
    assert main(["--runs", "2", "--only", "freeze / source / killed", "--json", str(told)]) == 0
    (result,) = json.loads(told.read_text())
    assert (result["cell"], result["struck"], result["wrong"]) == ("freeze / source / killed", 2, [])
    assert sum(result["ends"].values()) >= 2
