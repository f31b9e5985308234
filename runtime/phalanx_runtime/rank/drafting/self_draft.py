"""Self-draft: the target's first layers draft, on the ranks of the first stage. Implements `proposer.Proposer`.

Verification writes the same KV to the same slots again: no own pages, no backfill. After a failure the group continues without
drafts; with several ranks in the stage, which wait in a collective, it restarts without.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.errors import DraftLost, PeerLost
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.logits import gather_logits
from phalanx_runtime.rank.drafting.draft_passes import draft
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition, DraftSampler
from phalanx_runtime.rank.drafting.proposer import Pageless
from phalanx_runtime.rank.sampling.gumbel import RankedTokens
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import DraftedPath, empty_paths

log = logging.getLogger(__name__)


def no_exit(states: Tensor) -> Tensor:
    """Identity. states: [n, hidden]."""
    return states


class SelfDraft(Pageless):
    """Drafts with the first `num_layers` layers and an exit. `peers`: the ranks of the stage."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache],
        peers: Collective,
        num_layers: int,
        exit_layer: Callable[[Tensor], Tensor] = no_exit,
    ) -> None:
        self._model = model
        self._caches = list(caches[:num_layers])
        self._peers = peers
        self._exit = exit_layer
        self._failure = ""

    @property
    def failure(self) -> str:
        """Reason of a failure."""
        return self._failure

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """Drafts. Raises PeerLost, DraftLost."""
        if self._failure:
            return empty_paths(plan)
        try:
            return self._draft(plan, builder, rows)
        except PeerLost:
            raise
        except Exception as error:  # no failure of a draft ends the target
            self._failure = f"a step of the self-draft failed: {error}"
            if self._peers.world_size > 1:
                log.exception("the self-draft failed: the group restarts without speculation")
                raise DraftLost(self._failure) from error
            log.exception("the self-draft failed: the group continues without speculation")
            return empty_paths(plan)

    def _draft(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        def states(draft_plan: StepPlan) -> Tensor:
            return self._model.states(builder.tensors(draft_plan), self._caches, [len(self._caches)])[0]

        return draft(plan, builder.params, states, partial(self._sample, DraftSampler(rows)))

    def _sample(
        self, sampler: DraftSampler, states: Tensor, positions: Sequence[DraftPosition], count: int
    ) -> list[RankedTokens]:
        logits = gather_logits(self._model, self._model.state_logits(self._exit(states)), self._peers)
        if self._peers.world_size == 1:
            assert logits is not None, "the only rank gathers"
            return sampler.sample(logits, positions, count)
        message = None if logits is None else msgspec.msgpack.encode(sampler.sample(logits, positions, count))
        return msgspec.msgpack.decode(self._peers.broadcast(message), type=list[RankedTokens])
