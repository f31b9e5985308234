"""Interface of proposers, which draft tokens on the ranks (docs/adr/0009).

    update tables, copy pages -> propose -> the target computes the step with the draft tokens -> sample along each path

The ranks of the first stage draft in the step that verifies. A draft's pages have the target's page numbers, so copies, prefix
sharing and moves apply to both.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import DraftedPath, empty_paths


class Proposer(Protocol):
    """Drafts tokens on a rank of the first stage.

    Sampling with the request's own noise (seed and output index) gives the highest acceptance rate.
    """

    @property
    def caches(self) -> Sequence[LayerCache]:
        """Pages of its own layers; may be empty."""
        ...

    @property
    def name(self) -> bytes:
        """Identifies their contents: a move sends them to the same draft only."""
        ...

    @property
    def can_draft(self) -> bool:
        """Whether `propose` may return draft tokens."""
        ...

    @property
    def failure(self) -> str:
        """Why it can no longer draft; else empty."""
        ...

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """Drafts the paths with `is_drafted`, `depth` tokens each, equally on every rank. A missing token is NO_TOKEN.

        Called for every plan, to backfill `backfills` too. The first draft token has the output index of the path's draw. With
        `growth` the proposer chooses the shape. KV of draft tokens is written to their slots; only the target computes leaves.

        builder: with the plan's pages. rows: state before this step, on the rank that samples draft tokens (one rank, because
        logits differ between machines). Raises PeerLost, and DraftLost if it fails while other ranks wait.
        """
        ...


class Pageless:
    """A proposer without pages."""

    @property
    def caches(self) -> Sequence[LayerCache]:
        """Empty."""
        return ()

    @property
    def name(self) -> bytes:
        """Empty."""
        return b""

    @property
    def can_draft(self) -> bool:
        """False after a failure."""
        return not self.failure

    @property
    def failure(self) -> str:
        """Empty."""
        return ""


class NoProposer(Pageless):
    """Drafts no tokens. `failure`: why a configured draft is missing."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure

    @property
    def can_draft(self) -> bool:
        """False."""
        return False

    @property
    def failure(self) -> str:
        """Why a draft is missing."""
        return self._failure

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """Returns empty paths."""
        return empty_paths(plan)


NO_PROPOSER = NoProposer()
