"""Who drafts tokens on the ranks. A seam: the runner asks before each step, and the drawer compares (docs/adr/0009).

    update tables, copy pages -> propose -> the target computes the step, proposals included -> draw along each path

The ranks of the first stage draft, at the beginning of the step in which their proposals are verified. What lies in the pages of
the draft's own layers is carried by the same page numbers as the target's: copies, sharing, roll-back and moves do it for both.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.paths import DraftedPath


class Proposer(Protocol):
    """Drafts with a model: one of its own, or the target's first layers. One on each rank of the first stage.

    A draft that draws with the request's own noise (`sampling.draw`, the same seed and output index) agrees most often with what
    the target will draw; one that disagrees costs time, never a token.
    """

    @property
    def caches(self) -> Sequence[LayerCache]:
        """Pages of its own layers, as many as the target's; empty when it has none. The runner copies and moves them."""
        ...

    @property
    def name(self) -> bytes:
        """Tells what its pages hold apart: a move carries them to the same draft alone. Empty when it has none."""
        ...

    @property
    def lost(self) -> str:
        """Why it can draft no more; empty while it can. Then no further plan names a path that is drafted."""
        ...

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """The proposals of all paths with `is_drafted`, `depth` tokens each, in their order: the same ones on every rank.

        Where a path has `growth` the proposer chooses its shape, else it has that of the plan.

        Called for every plan, also for one without paths: a draft model computes what `StepPlan.catch_ups` says that it lacks.
        The plan's own token of such a path, at starts[i], is known to all; its first proposal has the output index of its draw.
        What a draft computes of proposals lies in the slots behind it, and no more of them than there are proposals; those
        without children are computed by the target alone.

        The tables of `builder` hold the plan's pages already and copies are made; `builder.tensors` makes the tensors of any plan
        over the same rows, and `builder.params` has how each row is sampled. Two machines may compute different scores, so one
        rank draws and tells its peers. A token of -1 says that there is none: it is equal to no token. `rows`: what is known of
        rows before this step, on the rank that draws the proposals; nothing elsewhere. Raises PeerLost, and DraftLost where it
        fails and other ranks wait.
        """
        ...


class Pageless:
    """What a proposer says of itself that has no pages of its own, and was not lost."""

    @property
    def caches(self) -> Sequence[LayerCache]:
        """None."""
        return ()

    @property
    def name(self) -> bytes:
        """None: it has no pages."""
        return b""

    @property
    def lost(self) -> str:
        """Nothing."""
        return ""
