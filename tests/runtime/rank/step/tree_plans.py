"""Plans of one decode with a draft tree."""

from phalanx_api import wire
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan


def plan_of(parents: list[int], own: int = 1, start: int = 5, computed: int = 0) -> StepPlan:
    """Row 0 has a tree after its own tokens, the first `computed` nodes computed before; row 1 decodes plainly."""
    count = own + len(parents) - computed
    path = DraftPath(request=0, depth=len(parents) - computed if own else count - 1, parents=parents)
    rows = [NewRow(row, wire.Sampling(max_tokens=1, seed=row, temperature=0.0)) for row in (0, 1)]
    pages = [list(range(2, 8)), [8, 9]]
    return StepPlan(
        step=1,
        admitted=rows,
        rows=[0, 1],
        starts=[start, 6],
        counts=[count, 1],
        pages=pages,
        tokens=list(range(count + 1)),
        draws=[(0, 0), (1, 0)],
        paths=[path],
    )
