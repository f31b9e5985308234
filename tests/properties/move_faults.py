"""Checks of moves with a fault at one of their steps."""

from collections import Counter

from bench.moves.faults import cells, run_cell
from bench.virtual.world import STEPS


def check_step_faults(step: str, runs: int) -> None:
    """Runs each cell of a step `runs` times. Fails unless all runs are correct and some moves complete."""
    results = [run_cell(cell, runs) for cell in cells(f"{step} / ")]
    assert len(results) == 15
    assert {result.cell: result.violations for result in results if result.violations} == {}
    assert {result.cell: result.struck for result in results if result.struck < runs} == {}
    ends = sum((result.ends for result in results), Counter[str]())
    assert ends["moved"] > 0
    assert STEPS.index(step) > STEPS.index("ready") or sum(ends.values()) > ends["moved"]
