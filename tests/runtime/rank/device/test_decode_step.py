"""Which plans are decode steps that a graph can compute."""

import pytest

from phalanx_runtime.core.step_plan import DraftPath, StepPlan
from phalanx_runtime.rank.device.decode_step import GraphObstacle, decode_obstacle


def decode(*draws: tuple[int, int], starts: tuple[int, ...] = (5, 9), counts: tuple[int, ...] = (1, 1)) -> StepPlan:
    return StepPlan(
        step=3,
        admitted=[],
        rows=[4, 7][: len(counts)],
        starts=list(starts[: len(counts)]),
        counts=list(counts),
        pages=[[] for _ in counts],
        tokens=[1] * sum(counts),
        draws=list(draws),
        paths=[DraftPath(request=0, depth=1)] if counts[:1] == (2,) else [],
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (decode((0, 0), (1, 3)), None),
        (decode((1, 3), (0, 0)), "draws"),
        (decode(counts=()), "no row"),
        (decode((0, 0), (1, 0), counts=(2, 1)), "drafts"),
        (decode((0, 0), (1, 0), counts=(1, 3)), "chunk"),
        (decode((0, 0)), "draws"),
        (decode((0, 0), (0, 1)), "draws"),
        (decode((0, 0), (1, 0), (1, 1)), "draws"),
    ],
)
def test_a_decode_step_has_one_token_per_row(plan: StepPlan, expected: GraphObstacle | None) -> None:
    assert decode_obstacle(plan) == expected
