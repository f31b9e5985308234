"""A fault at each step of a move, in virtual time, 20 times in each of the 120 cells."""

import pytest

from bench.virtual.world import STEPS
from tests.properties.move_faults import check_step_faults
from tests.slow_cases import some

pytestmark = pytest.mark.system


@pytest.mark.parametrize("step", some(STEPS, "freeze"))
def test_failed_move_loses_no_index_stream_or_page(step: str) -> None:
    check_step_faults(step, 20)
