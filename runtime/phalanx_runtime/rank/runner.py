"""Steps on all ranks: rank 0 sends the plan, every rank computes its part, the first rank of the last stage draws.

With several stages a plan is in each of them in turn, so that as many plans are computed side by side.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.speculation.config import Fitting
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.ports import GrammarCompiler
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.drafting.proposer import Proposer
from phalanx_runtime.rank.memory.page_memory import DraftPages, open_pages
from phalanx_runtime.rank.sampling.grammar_threads import BothGrammars, GrammarService, RemoteGrammars, ThreadedGrammars
from phalanx_runtime.rank.sampling.logprobs import rows_at_once, token_details
from phalanx_runtime.rank.sampling.sampled_rows import SampledRowMirror
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder, PromptPart, prompt_parts
from phalanx_runtime.rank.step.paths import (
    drafted_numbers,
    filled,
    filled_by_numbers,
    grown_shapes,
    nothing,
    num_drafted,
    proposals,
    undrafted,
)
from phalanx_runtime.rank.step.pipeline import Pipeline

POLL_S = 0.001
"""How often a thread looks that waits for a step. It waits for a rank that lags behind rank 0, so hardly ever."""


@dataclass(frozen=True, slots=True)
class _DraftPlan:
    """What came of one plan's drafts: how long they took, shapes that were chosen, and proposals without a token."""

    draft_s: float = 0.0
    shapes: list[list[int]] = field(default_factory=list)
    undrafted: list[tuple[int, list[int]]] = field(default_factory=list)


class ModelRunner:
    """One rank's weights, pages and rows. On rank 0 it is the engine's `StepRunner`; the other ranks `follow`."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        builder: BatchBuilder,
        pool: PoolShape,
        pipeline: Pipeline,
        sampler: Sampler,
        proposer: Proposer | None = None,
    ) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        """What time in drafts is told by: the clock that whoever drives this runner tells steps by."""
        self._model = model
        self._caches = caches
        self._builder = builder
        self._pool = pool
        self._pipeline = pipeline
        self._sampler = sampler
        self._proposer = proposer
        self._all_caches = [*caches, *(proposer.caches if proposer is not None else ())]
        self._latest = _DraftPlan()
        self._drafts: deque[_DraftPlan] = deque()
        """Of the plans that were started and not finished."""
        self._done: deque[StepResult] = deque()
        self._step_done = 0
        self._orders = GrammarService(sampler.grammars, pipeline.give) if pipeline.draws and pipeline.world.rank else None
        is_drafter = proposer is not None and not proposer.lost and pipeline.world.rank == 0
        self._followed = SampledRowMirror(sampler.vocab_size, sampler.grammars) if is_drafter and not pipeline.draws else None

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        return self._pool

    @property
    def caches(self) -> list[LayerCache]:
        """The memory of this rank's pages: the target's layers."""
        return self._caches

    def draft_pages(self) -> DraftPages | None:
        """The same with the layers of a draft behind them; None where no draft has pages, or it can draft no more."""
        if self._proposer is None or not self._proposer.caches or self._proposer.lost:
            return None
        # A draft may catch up in full pages while they are read for a move.
        return DraftPages(self._proposer.name, partial(open_pages, self._all_caches, is_still=False))

    @property
    def lost_draft(self) -> str:
        """Why this rank can draft no more; empty while it can, or never was to."""
        return "" if self._proposer is None else self._proposer.lost

    def wait_for(self, step: int) -> None:
        """Returns when this rank has computed a step that it was or will soon be told of. Any thread may call it."""
        while self._step_done < step:
            time.sleep(POLL_S)

    def grammars(self) -> GrammarCompiler | None:
        """Those that requests are drawn with, this rank's own or those of the drawer, and those that they are drafted with. Only
        on rank 0, once."""
        if self._pipeline.draws:
            return None if self._sampler.grammars is None else ThreadedGrammars(self._sampler.grammars)
        far = RemoteGrammars(self._pipeline.ask)
        self._pipeline.listen(far.hear)
        if self._followed is None or self._sampler.grammars is None:
            return far
        return BothGrammars(far, ThreadedGrammars(self._sampler.grammars))

    @property
    def fitting(self) -> Fitting | None:
        """Tells which tokens a row may draw; None when this rank does not draw."""
        return self._sampler.num_fitting if self._pipeline.draws else None

    @property
    def depth(self) -> int:
        """How many plans are computed side by side: one in each stage."""
        return self._pipeline.stage.count

    def start(self, plan: StepPlan) -> None:
        """Sends the plan to all ranks and computes this rank's part. Only on rank 0. Raises PeerLost."""
        self._pipeline.tell(plan)
        result = self._step(plan)
        self._drafts.append(self._latest)
        if result is not None:
            self._done.append(result)

    def finish(self) -> StepResult:
        """The tokens of the oldest plan that was started, after all ranks computed it. Only on rank 0. Raises PeerLost."""
        result = self._done.popleft() if self._pipeline.draws else self._pipeline.result()
        made = self._drafts.popleft()
        if self._proposer is None:
            return result
        return msgspec.structs.replace(
            result, draft_s=made.draft_s, lost=self._proposer.lost, shapes=made.shapes, undrafted=made.undrafted
        )

    def follow(self) -> None:
        """Obeys rank 0, step after step, sleeping between them, until it is dismissed. Raises PeerLost when rank 0 is gone."""
        while (order := self._pipeline.told()) is not None:
            if isinstance(order, StepPlan):
                result = self._step(order)
                if result is not None:
                    self._pipeline.give(result)
            elif self._orders is not None:
                self._orders.obey(order)
        if self._orders is not None:
            self._orders.close()
        if self._pipeline.draws:
            self._pipeline.give(None)

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks. Only on rank 0."""
        self._pipeline.tell(None)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult | None:
        """This rank's part of a step; the result on the drawer, nothing elsewhere."""
        result = self._compute(plan)
        self._step_done = plan.step
        return result

    def _compute(self, plan: StepPlan) -> StepResult | None:
        pipeline, stage = self._pipeline, self._pipeline.stage
        if pipeline.draws:
            for new in plan.admitted:
                self._sampler.admit(new)
        before: Tensor | None = None
        self._prepare(plan)
        if stage.is_first:
            plan = self._drafted(plan)
        elif plan.rows:
            plan, before = self._received(plan)
        hidden = self._model.hidden(self._builder.tensors(plan), self._caches, before) if plan.rows else None
        if not stage.is_last:
            if hidden is not None:
                self._hand_on(plan, hidden)
            return None
        scores, told = (None, []) if hidden is None else self._scores(plan, hidden)
        if not pipeline.draws:
            return None
        if scores is None:
            return StepResult(step=plan.step, tokens=[], prompt_details=told)
        asked = [(plan.rows[request], index) for request, index in plan.draws]
        drawn = self._sampler.draw(scores, asked, proposals(plan) if plan.paths else ())
        return StepResult(
            step=plan.step,
            tokens=drawn.tokens,
            details=drawn.details,
            ended=drawn.ended,
            prompt_details=told,
            failed=drawn.failed,
            over=drawn.over,
            runs=drawn.runs,
            taken=drawn.taken,
        )

    def _prepare(self, plan: StepPlan) -> None:
        """Copies pages, brings the rows' tables up to date, and puts in place what trees left elsewhere."""
        for source, target in plan.copies:
            for cache in self._all_caches:
                cache.k[target].copy_(cache.k[source])
                cache.v[target].copy_(cache.v[source])
        self._builder.update(plan)
        if plan.strays:
            lie, belong = self._builder.strays(plan)
            for cache in self._caches:
                for part in (cache.k, cache.v):
                    slots = part.view(-1, part.shape[-1])
                    slots.index_copy_(0, belong, slots.index_select(0, lie))

    def _drafted(self, plan: StepPlan) -> StepPlan:
        """The plan with what the ranks of the first stage drafted for it."""
        if self._proposer is None:
            return filled(plan, nothing(plan)) if num_drafted(plan) else plan
        began = self.clock()
        if self._followed is not None:
            self._followed.follow(plan)
        rows = self._sampler.rows if self._followed is None else self._followed.rows
        drafted = self._proposer.propose(plan, self._builder, rows) if plan.rows else []
        draft_s = self.clock() - began
        plan = filled(plan, drafted) if drafted else plan
        self._latest = _DraftPlan(draft_s, grown_shapes(plan), undrafted(plan))
        if self._followed is not None:
            self._followed.proposed(plan)
        return plan

    def _hand_on(self, plan: StepPlan, hidden: Tensor) -> None:
        """Gives the next stage what it computes with: the hidden states, and what was drafted, for the drawer."""
        if num_drafted(plan):
            self._pipeline.hand_on(torch.tensor(drafted_numbers(plan), device=hidden.device))
        self._pipeline.hand_on(hidden)

    def _received(self, plan: StepPlan) -> tuple[StepPlan, Tensor]:
        """The plan and the hidden states, as the stage before handed them on."""
        hidden = self._builder.empty(len(plan.tokens), self._model.width)
        count = num_drafted(plan)
        if count:
            drafted = self._pipeline.receive(torch.zeros(2 * count, dtype=torch.int64, device=hidden.device))
            plan = filled_by_numbers(plan, drafted.tolist())
        return plan, self._pipeline.receive(hidden)

    def _scores(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor | None, list[tuple[int, int, list[wire.TokenDetail]]]]:
        """On the drawer all scores of the drawn tokens and the details of told prompt tokens; elsewhere nothing."""
        num_draws = len(plan.draws) + sum(plan.depths)
        scores = self._pipeline.peers.gather(self._model.scores(hidden[:num_draws])) if num_draws else None
        parts = prompt_parts(plan, self._builder.params)
        return scores, self._tell(parts, hidden[num_draws:]) if parts else []

    def _tell(self, parts: list[PromptPart], hidden: Tensor) -> list[tuple[int, int, list[wire.TokenDetail]]]:
        """Details of prompt tokens, parallel to the rows of `hidden`. Scores are made for few at once; nothing elsewhere."""
        tokens = [token for part in parts for token in part.tokens]
        tops = [part.top for part in parts for _ in part.tokens]
        details: list[wire.TokenDetail] = []
        size = rows_at_once(self._model.vocab_size)
        for first in range(0, len(tokens), size):
            some = slice(first, first + size)
            scores = self._pipeline.peers.gather(self._model.scores(hidden[some]))
            if scores is not None:
                details += token_details(scores, tokens[some], tops[some])
        ends = accumulate(len(part.tokens) for part in parts)
        return [(part.request, part.start, details[end - len(part.tokens) : end]) for part, end in zip(parts, ends, strict=True)]
