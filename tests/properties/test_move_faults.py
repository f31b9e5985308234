"""A fault at each step of a move of the real router and engines, in virtual time: a short `python -m bench.moves.faults`.

`tests/system/test_move_faults.py` runs each cell more often.
"""

import json
from pathlib import Path

import pytest

from bench.moves.faults import cells, main, run_cell
from bench.virtual.world import STEPS
from tests.properties.defective_machines import DEFECTIVE
from tests.properties.move_faults import check_step_faults
from tests.slow_cases import some


@pytest.mark.parametrize("step", STEPS)
def test_failed_move_loses_no_index_stream_or_page(step: str) -> None:
    check_step_faults(step, 1)


def test_failed_routers_stream_is_found_during_a_move() -> None:
    """Its leader continues it, and the next router adopts it there, at any step of the move."""
    results = [run_cell(cell, 4) for cell in cells(" / router / killed")]
    assert len(results) == len(STEPS)
    assert {result.cell: result.violations for result in results if result.violations} == {}
    assert [result.cell for result in results if not result.resumed] == []


@pytest.mark.parametrize("defect", some(DEFECTIVE, *[*DEFECTIVE][:2]))
def test_a_machine_with_a_mistake_is_found(defect: str) -> None:
    machines, cell, disconnect_share = DEFECTIVE[defect]
    assert any(run_cell(cell, 8, 1000 * i, machines, disconnect_share).violations for i in range(8))


def test_results_can_be_written_down(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert main(["--runs", "2", "--only", "freeze / source / killed", "--json", str(results)]) == 0
    (result,) = json.loads(results.read_text())
    assert (result["cell"], result["struck"], result["violations"]) == ("freeze / source / killed", 2, [])
    assert sum(result["ends"].values()) >= 2
