"""Draft model. Implements `proposer.Proposer`.

The first rank of the first stage computes it alone, because a pass is shorter than a collective, and broadcasts the draft tokens
of a step to its stage. If it fails, later plans have no drafted paths.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.drafting.draft_passes import draft
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition, DraftSampler
from phalanx_runtime.rank.drafting.proposer import Pageless
from phalanx_runtime.rank.sampling.gumbel import RankedTokens
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import DraftedPath, empty_paths, num_drafted

log = logging.getLogger(__name__)


class DraftModel:
    """The draft model on the rank that computes it. `peers`: the ranks of the stage."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        builder: BatchBuilder,
        vocab_size: int,
        peers: Collective,
        name: bytes = b"",
    ) -> None:
        self._model: Model | None = model
        self._caches = caches
        self._builder = builder
        self._vocab_size = vocab_size
        self._peers = peers
        self._name = name
        self._failure = ""

    @property
    def caches(self) -> Sequence[LayerCache]:
        """KV caches of the draft model."""
        return self._caches

    @property
    def name(self) -> bytes:
        """Identifies its weights."""
        return self._name

    @property
    def can_draft(self) -> bool:
        """False after a failure."""
        return not self._failure

    @property
    def failure(self) -> str:
        """Reason of the failure."""
        return self._failure

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """Drafts and broadcasts. Raises PeerLost."""
        drafted = empty_paths(plan) if self._model is None else self._try_draft(self._model, plan, rows)
        if drafted and self._peers.world_size > 1:
            self._peers.broadcast(msgspec.msgpack.encode(drafted))
        return drafted

    def _try_draft(self, model: Model, plan: StepPlan, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        try:
            return self._draft(model, plan, rows)
        except Exception as error:  # no failure of a draft ends the target
            log.exception("the draft model failed: the group continues without speculation")
            self._failure = f"a step of the draft model failed: {error}"
            self._model = None
            return empty_paths(plan)

    def _draft(self, model: Model, plan: StepPlan, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        self._builder.update(plan)
        sampler = DraftSampler(rows)

        def states(draft_plan: StepPlan) -> Tensor:
            batch = self._builder.tensors(draft_plan)
            batch.tokens.clamp_(max=model.vocab_size - 1)  # the target may pad its vocabulary further
            return model.hidden(batch, self._caches)

        def sample(hidden: Tensor, positions: Sequence[DraftPosition], count: int) -> list[RankedTokens]:
            logits = model.logits(hidden)[:, : self._vocab_size]
            missing = self._vocab_size - logits.shape[1]
            return sampler.sample(pad(logits, (0, missing), value=-torch.inf) if missing else logits, positions, count)

        return draft(plan, self._builder.params, states, sample)


class RemoteDraft(Pageless):
    """The draft model, on the other ranks of the stage."""

    def __init__(self, peers: Collective) -> None:
        self._peers = peers

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """Receives the drafted paths. Raises PeerLost."""
        if not num_drafted(plan):
            return []
        return msgspec.msgpack.decode(self._peers.broadcast(None), type=list[DraftedPath])
