"""The target's first layers as its draft, on the ranks of the first stage. Implements `proposer.Proposer`.

It writes the keys and values of the first layers into the target's own pages; the verification writes the same there again. So
it has no pages, no prompts to compute, and never lags.

What fails costs speed, never a token. The only rank of a stage forgets the draft and says why, as of a draft model. Several are
in a pass together, and one that fails leaves the others in it: so the group starts anew, without the draft.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.errors import DraftLost, PeerLost
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit
from phalanx_runtime.rank.drafting.draft_passes import draft
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition, DraftSampler
from phalanx_runtime.rank.drafting.proposer import Pageless
from phalanx_runtime.rank.sampling.draw import Rivals
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.paths import DraftedPath, nothing

log = logging.getLogger(__name__)


class SelfDraft(Pageless):
    """Drafts with the first `num_layers` layers, through an exit where there is one. `peers` are the ranks of the stage."""

    def __init__(
        self, model: Decoder, caches: Sequence[LayerCache], peers: Collective, num_layers: int, through: Exit | None = None
    ) -> None:
        self._model = model
        self._own = list(caches[:num_layers])
        self._peers = peers
        self._exit = through
        self._lost = ""

    @property
    def lost(self) -> str:
        """Why it can draft no more; empty while it can."""
        return self._lost

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """The drafted paths. Raises PeerLost, DraftLost."""
        if self._lost:
            return nothing(plan)
        try:
            return self._draft(plan, builder, rows)
        except PeerLost:
            raise
        except Exception as error:  # whatever it is, the target goes on without
            self._lost = f"a step of the self-draft failed: {error}"
            if self._peers.world_size > 1:
                log.exception("the self-draft failed: the group starts anew without speculation")
                raise DraftLost(self._lost) from error
            log.exception("the self-draft failed: the group goes on without speculation")
            return nothing(plan)

    def _draft(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        def states(small: StepPlan) -> Tensor:
            return self._model.states(builder.tensors(small), self._own, [len(self._own)])[0]

        return draft(plan, builder.params, states, partial(self._choose, DraftSampler(rows)))

    def _choose(self, ahead: DraftSampler, states: Tensor, places: Sequence[DraftPosition], count: int) -> list[Rivals]:
        """Drawn on the first rank of the stage, and told to the others."""
        scores = self._peers.gather(self._model.state_scores(states if self._exit is None else self._exit(states)))
        if self._peers.world_size == 1:
            assert scores is not None, "the only rank gathers"
            return ahead.draw(scores, places, count)
        told = None if scores is None else msgspec.msgpack.encode(ahead.draw(scores, places, count))
        return msgspec.msgpack.decode(self._peers.broadcast(told), type=list[Rivals])
