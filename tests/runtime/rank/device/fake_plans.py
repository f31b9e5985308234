"""Plans of steps that continue the rows of `FakeRank`."""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_runtime.core.step_plan import LAST_SAMPLED, DraftPath, NewRow, StepPlan
from tests.runtime.rank.device.fake_rank import SAMPLING


def decode(step: int) -> StepPlan:
    at = 38 + step
    return StepPlan(
        step=step,
        admitted=[],
        rows=[0, 1],
        starts=[at, at],
        counts=[1, 1],
        pages=[[], []],
        tokens=[LAST_SAMPLED] * 2,
        draws=[(0, step - 1), (1, step - 1)],
    )


def mixed(step: int) -> StepPlan:
    """Two decodes, and the first chunk of a prompt."""
    return StepPlan(
        step=step,
        admitted=[NewRow(2, SAMPLING)],
        rows=[0, 1, 2],
        starts=[40, 40, 0],
        counts=[1, 1, 200],
        pages=[[], [], list(range(10, 23))],
        tokens=[LAST_SAMPLED] * 2 + [9] * 200,
        draws=[(0, 1), (1, 1)],
    )


def speculative(step: int) -> StepPlan:
    """A chain of draft tokens and a tree."""
    return StepPlan(
        step=step,
        admitted=[NewRow(2, SAMPLING)],
        rows=[0, 2],
        starts=[40, 0],
        counts=[4, 5],
        pages=[[], [30]],
        tokens=[9, 3, 4, 5, 9, 6, 7, 8, 8],
        draws=[(0, 1), (1, 0)],
        paths=[DraftPath(request=0, depth=3), DraftPath(request=1, depth=4, parents=[-1, 0, 0, 1])],
    )


def prompts(step: int, rows: Sequence[int], sampling: wire.Sampling, left_rows: Sequence[int] = ()) -> StepPlan:
    """A prompt of one token in each of these rows, after requests left others."""
    return StepPlan(
        step=step,
        admitted=[NewRow(row, sampling, 1, [9]) for row in rows],
        rows=list(rows),
        starts=[0] * len(rows),
        counts=[1] * len(rows),
        pages=[[100 + row] for row in rows],
        tokens=[9] * len(rows),
        draws=[(at, 0) for at in range(len(rows))],
        left_rows=list(left_rows),
    )


def with_logprobs(step: int) -> StepPlan:
    """A row with logprobs, after its only chunk."""
    sampling = wire.Sampling(max_tokens=50, seed=5, logprobs=3)
    return StepPlan(
        step=step,
        admitted=[NewRow(3, sampling)],
        rows=[3],
        starts=[0],
        counts=[7],
        pages=[[31]],
        tokens=[9] * 7,
        draws=[(0, 0)],
    )
