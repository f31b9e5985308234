"""A model of its own that drafts. Implements `proposer.Proposer`.

It is held and computed by the first rank of the first stage alone: drafts are small, and a pass without an exchange is over
before the ranks would have met. The others are told the proposals of a step in one message.

Its keys and values lie in the pages of the target's numbers; plans tell what it lacks there. What fails here costs speed, never a
token and never the group: the rank forgets the draft, says why, and the plans name no drafted path any more.
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
from phalanx_runtime.rank.sampling.draw import Rivals
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.paths import DraftedPath, nothing, num_drafted

log = logging.getLogger(__name__)


class DraftModel:
    """The draft on the rank that computes it. `builder` makes its tensors; `peers` are the ranks of the stage.

    name: tells its weights apart.
    """

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
        self._lost = ""

    @property
    def caches(self) -> Sequence[LayerCache]:
        """Pages of its layers."""
        return self._caches

    @property
    def name(self) -> bytes:
        """Tells its weights apart."""
        return self._name

    @property
    def lost(self) -> str:
        """Why it can draft no more; empty while it can."""
        return self._lost

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """The drafted paths. Raises PeerLost."""
        drafted = nothing(plan) if self._model is None else self._try(self._model, plan, rows)
        if drafted and self._peers.world_size > 1:
            self._peers.broadcast(msgspec.msgpack.encode(drafted))
        return drafted

    def _try(self, model: Model, plan: StepPlan, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        try:
            return self._draft(model, plan, rows)
        except Exception as error:  # whatever it is, the target goes on without
            log.exception("the draft model failed: the group goes on without speculation")
            self._lost = f"a step of the draft model failed: {error}"
            self._model = None
            return nothing(plan)

    def _draft(self, model: Model, plan: StepPlan, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        self._builder.update(plan)
        ahead = DraftSampler(rows)

        def states(small: StepPlan) -> Tensor:
            batch = self._builder.tensors(small)
            batch.tokens.clamp_(max=model.vocab_size - 1)  # ids behind its vocabulary are no tokens of anybody's
            return model.hidden(batch, self._caches)

        def choose(hidden: Tensor, places: Sequence[DraftPosition], count: int) -> list[Rivals]:
            scores = model.scores(hidden)[:, : self._vocab_size]
            missing = self._vocab_size - scores.shape[1]
            return ahead.draw(pad(scores, (0, missing), value=-torch.inf) if missing else scores, places, count)

        return draft(plan, self._builder.params, states, choose)


class FailedDraft(Pageless):
    """What is left of a draft that could not be loaded: it says why, and plans name no drafted path."""

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def lost(self) -> str:
        """Why it can draft nothing."""
        return self._why

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """That there is none, for each proposal asked for."""
        return nothing(plan)


class RemoteDraft(Pageless):
    """The draft on the other ranks of the first stage: what they are told of it. The rank that drafts has its pages."""

    def __init__(self, peers: Collective) -> None:
        self._peers = peers

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        """The drafted paths. Raises PeerLost."""
        if not num_drafted(plan):
            return []
        return msgspec.msgpack.decode(self._peers.broadcast(None), type=list[DraftedPath])
