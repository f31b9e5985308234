"""Adds draft tokens to the decodes of a step, before its prompt tokens, and learns from the results.

candidates   n-gram matches and drafts (`candidates`)
selection    the fastest within logits rows and tokens of the step (`draft_length`); rare where they do not pay (`probing`)
pages        without preemption; each running request keeps a page to grow
result       accepted tokens count as computed; pages of rejected ones are released
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx_api.cost import StepModel
from phalanx_api.speculation import MAX_DEPTH, SpeculationCounts
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.draft_tree import (
    ENGINE_DECAY,
    AcceptanceRates,
    add_tree,
    is_chain,
    levels,
    restrict_tree,
    sibling_ranks,
)
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request, RequestPages
from phalanx_runtime.core.speculation.candidates import (
    Candidate,
    CandidateBuilder,
    CandidateTree,
    DraftBudget,
    Selection,
    needs_backfill,
    select_all,
    select_fastest,
    uses_ngrams,
)
from phalanx_runtime.core.speculation.config import Fitting, SpeculationConfig, accept_all
from phalanx_runtime.core.speculation.draft_backfill import add_backfill, mark_drafted
from phalanx_runtime.core.speculation.draft_length import StepCosts, could_pay
from phalanx_runtime.core.speculation.probing import Probing
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ChunkDraft, ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import TreeBounds


class SpeculationCounter:
    """Counts draft tokens since the start."""

    __slots__ = ("_accepted", "_branched", "_drafted", "_paths", "_saved")

    def __init__(self) -> None:
        self._paths = self._saved = self._branched = 0
        self._drafted, self._accepted = [0] * MAX_DEPTH, [0] * MAX_DEPTH

    def add(self, draft: ChunkDraft, accepted: Sequence[int], num_kept: int) -> None:
        """Counts the draft tokens of a chunk. `num_kept`: new output tokens."""
        self._paths += draft.depth > len(draft.undrafted)
        self._saved += max(0, num_kept - 1)
        shape = tuple(draft.parents)
        for node, (level, rank) in enumerate(zip(levels(shape), sibling_ranks(shape), strict=True)):
            self._drafted[level] += node not in draft.undrafted
            self._accepted[level] += node in accepted
            self._branched += rank > 0 and node in accepted

    def counts(self, draft_s: float, verify_s: float, draft_failure: str) -> SpeculationCounts:
        """Returns the counts."""
        num_levels = max((level + 1 for level, count in enumerate(self._drafted) if count), default=0)
        return SpeculationCounts(
            paths=self._paths,
            drafted=self._drafted[:num_levels],
            accepted=self._accepted[:num_levels],
            saved=self._saved,
            draft_s=draft_s,
            verify_s=verify_s,
            draft_failure=draft_failure,
            branched=self._branched,
        )


SMALL_BACKFILL = 64
"""Tokens up to which backfills count as equal in the choice of a probe."""
FIRST_PROBE_INTERVAL = 4
"""Steps between probes before step times are known: the fit needs plain steps too."""
PROMPT_PART = 4
"""While prompts wait, draft tokens get 1 / PROMPT_PART of the remaining tokens and time."""


class Speculator:
    """Speculation of one engine."""

    def __init__(self, limits: Limits, pool: PagePool, config: SpeculationConfig, fitting: Fitting = accept_all) -> None:
        self.config = config
        self._limits = limits
        self._pool = pool
        self._rates = AcceptanceRates(ENGINE_DECAY)
        self._candidates = CandidateBuilder(pool, self._rates, fitting)
        self._cost = VerifyCost()
        self._probing = Probing()
        self._counter = SpeculationCounter()
        self._draft_s = 0.0
        self._draft_failure = config.draft_failure

    def propose(self, builder: StepBuilder, model: StepModel | None, num_running: int, has_prompts: bool) -> None:
        """Adds draft tokens to a step of decodes. `num_running`: requests that keep a page each."""
        decodes, probing = len(builder.chunks), self._probing
        if all(chunk.request.speculation.method == "none" for chunk in builder.chunks):
            return
        if self.config.is_adaptive and probing.skip(builder.step, decodes):
            return
        room, costs = self._room(builder, has_prompts), self._costs(builder, model, has_prompts)
        _limit_backfill(builder, costs)
        is_free = not self.config.is_adaptive or probing.is_due_next or costs is None
        may_look_up = is_free or (costs is not None and could_pay(costs, decodes, max(1, room)))
        candidates = self._candidates.build(builder.chunks, may_look_up, may_draft=not self._draft_failure)
        if not candidates:
            if not may_look_up:
                probing.record_unpaid(builder.step, decodes, may_skip=True)
            return
        backfill_budget = builder.backfill_budget
        selection = self._select(builder, candidates, model=model, costs=costs, room=room, has_prompts=has_prompts)
        nodes = selection.nodes
        if any(nodes):
            probing.record_paid(any(n and candidate.is_drafted for candidate, n in zip(candidates, nodes, strict=True)))
        elif room > 0:
            may_skip = costs is not None and not (may_look_up and any(map(uses_ngrams, builder.chunks)))
            probing.record_unpaid(builder.step, decodes, may_skip)
            measures_passes = self._measures_passes(builder, candidates, costs, has_prompts)
            if probing.is_due or measures_passes:
                self._probe(builder, candidates, nodes, costs, measures_passes)
        for candidate, tree, selected in zip(candidates, selection.trees, nodes, strict=True):
            if selected:
                self._add_draft(builder, candidate, tree, selected, num_running)
            elif candidate.num_missing > max(0, backfill_budget) and self._may_backfill(builder, candidate.chunk):
                add_backfill(self._pool, builder, candidate.chunk, candidate.chunk.start)
                probing.search_next()

    def follow_prompts(self, builder: StepBuilder) -> None:
        """Lets a draft model compute the step's prompt tokens, while drafts pay."""
        if self._draft_failure or not self._drafts_pay:
            return
        for chunk in builder.chunks:
            if not chunk.is_decode and needs_backfill(chunk) and _may_get_drafts(chunk.request) and builder.backfill_budget > 0:
                add_backfill(self._pool, builder, chunk, chunk.end)

    def draft_s(self, builder: StepBuilder) -> float:
        """Returns the expected time of the decodes' drafts."""
        backfilled = sum(len(chunk.backfill) for chunk in builder.chunks if chunk.is_decode)
        return self._cost.draft_s(_num_passes(builder), backfilled, _num_further_rows(builder))

    def decode_draft_s(self, builder: StepBuilder, draft_s: float) -> float:
        """Returns the decodes' part of a measured draft time; with prompts at most the expected time."""
        if not any(chunk.draft.is_drafted or (chunk.backfill and chunk.is_decode) for chunk in builder.chunks):
            return 0.0
        is_shared = self._cost.pass_s > 0 and builder.work.prefill_tokens > 0
        return min(draft_s, self.draft_s(builder)) if is_shared else draft_s

    def record_result(self, chunk: ScheduledChunk, accepted: Sequence[int], num_kept: int) -> None:
        """Records the accepted draft tokens of a chunk. `num_kept`: new output tokens."""
        speculation, draft = chunk.request.speculation, chunk.draft
        if not draft.depth:
            return
        self._counter.add(draft, accepted, num_kept)
        num_drafted = draft.depth - len(draft.undrafted)
        if not chunk.request.has_ended or len(accepted) == num_drafted:
            # A missing token counts as rejected, except in a shape of the ranks, where it is padding.
            unverified = draft.undrafted if draft.tree_bounds is not None else ()
            for rates in (speculation.rates, self._rates):
                add_tree(rates, draft.parents, draft.grades, accepted, unverified)

    def settle(self, chunk: ScheduledChunk) -> None:
        """Releases the pages of rejected draft tokens of a committed chunk."""
        request, draft, pages = chunk.request, chunk.draft, chunk.request.pages
        if request.has_ended:
            return
        if draft.is_drafted and needs_backfill(chunk) and draft.tree_bounds is None and is_chain(draft.parents):
            # The draft model computed a chain except its last token. A tree's KV is out of place.
            mark_drafted(self._pool, chunk, min(chunk.end + draft.depth - 1, request.num_computed))
        if not draft.depth and not chunk.misplaced:
            return
        end = max([request.num_computed, *(slot + 1 for slot in pages.misplaced)])
        num_kept = max(chunk.num_own_pages, self._pool.pages_for(end))
        if len(pages.ids) > num_kept:
            self._pool.truncate(pages, num_kept)
            if pages.num_sent > num_kept:
                pages.num_sent, pages.must_truncate = num_kept, True

    def learn(
        self, builder: StepBuilder, model: StepModel | None, wall_s: float | None, draft_s: float, draft_failure: str
    ) -> None:
        """Records the times of a committed step."""
        self._draft_s += draft_s
        self._draft_failure = self._draft_failure or draft_failure
        if wall_s is None or model is None:
            return
        plain = builder.plain_work
        if self._probing.was_probe(builder.step) and not plain.prefill_tokens:
            self._probing.record_cost(wall_s / self._cost.costs(model, plain).plain_s - 1)
        self._cost.learn(
            model,
            plain,
            num_draft_tokens=sum(chunk.draft.depth for chunk in builder.chunks),
            passes=_num_passes(builder),
            wall_s=wall_s,
            draft_s=draft_s,
            has_trees=any(chunk.draft.has_branches for chunk in builder.chunks),
            backfilled=sum(max(0, len(chunk.backfill) - 1) for chunk in builder.chunks),
            further_rows=_num_further_rows(builder),
        )

    def counts(self) -> SpeculationCounts:
        """Returns the counters since the start."""
        return self._counter.counts(self._draft_s, self._cost.verify_s, self._draft_failure)

    @property
    def _drafts_pay(self) -> bool:
        return not self.config.is_adaptive or self._probing.drafts_pay

    def _room(self, builder: StepBuilder, has_prompts: bool) -> int:
        tokens = self._limits.max_num_batched_tokens - builder.num_tokens
        rows = self._limits.max_logits_rows - (self._limits.max_num_seqs if has_prompts else len(builder.chunks))
        return min(rows, tokens // PROMPT_PART if has_prompts else tokens)

    def _costs(
        self, builder: StepBuilder, model: StepModel | None, has_prompts: bool, has_trees: bool = False
    ) -> StepCosts | None:
        if model is None:
            return None
        costs, limits = self._cost.costs(model, builder.measure_plain_work(), has_trees), self._limits
        if limits.itl_target_s is None:
            return costs
        left_s = limits.itl_target_s / limits.plans_in_flight - costs.plain_s
        return replace(costs, limit_s=costs.plain_s + (left_s / PROMPT_PART if has_prompts else left_s))

    def _select(
        self,
        builder: StepBuilder,
        candidates: Sequence[Candidate],
        *,
        model: StepModel | None,
        costs: StepCosts | None,
        room: int,
        has_prompts: bool,
    ) -> Selection:
        budget = DraftBudget(
            decodes=len(builder.chunks),
            draft_tokens=room,
            backfill=builder.backfill_budget,
            has_pass_time=self._cost.has_pass_time,
        )
        if not self.config.is_adaptive:
            return select_all(candidates, budget)
        return select_fastest(candidates, costs, lambda: self._costs(builder, model, has_prompts, has_trees=True), budget)

    def _measures_passes(
        self, builder: StepBuilder, candidates: Sequence[Candidate], costs: StepCosts | None, has_prompts: bool
    ) -> bool:
        """Returns whether this step probes to measure draft passes; once step times are known, only without prompts."""
        if not any(candidate.is_drafted for candidate in candidates):
            return False
        if costs is None:
            return builder.step % FIRST_PROBE_INTERVAL == 0
        return not (has_prompts or self._cost.has_pass_time)

    def _probe(
        self,
        builder: StepBuilder,
        candidates: Sequence[Candidate],
        nodes: list[list[int]],
        costs: StepCosts | None,
        measures_passes: bool,
    ) -> None:
        """Selects one draft token, or a part of its backfill, of the longest unprobed request with a small backfill."""
        small = SMALL_BACKFILL if self._cost.has_pass_time else 0  # passes are measured best without backfill
        eligible = [i for i, candidate in enumerate(candidates) if candidate.is_drafted or not measures_passes]
        chosen = min(
            eligible,
            key=lambda i: (max(small, candidates[i].num_missing), candidates[i].chunk.request.speculation.last_step),
        )
        candidate = candidates[chosen]
        if not self._may_probe(candidate, costs):
            return
        if candidate.num_missing <= max(0, builder.backfill_budget):
            self._probing.start(builder.step)
            nodes[chosen] = [0]
        elif builder.backfill_budget > 0:
            self._probing.start(builder.step, is_partial=True)
            self._probing.search_next()
            add_backfill(self._pool, builder, candidate.chunk, candidate.chunk.start)
        else:
            self._cost.doubt_drafts()

    def _may_probe(self, candidate: Candidate, costs: StepCosts | None) -> bool:
        """Returns whether the time limit allows one draft token."""
        if _fits_limit(costs, candidate.is_drafted):
            return True
        if _fits_limit(costs, False):
            self._cost.doubt_drafts()
        return False

    def _may_backfill(self, builder: StepBuilder, chunk: ScheduledChunk) -> bool:
        return builder.backfill_budget > 0 and self._drafts_pay and not chunk.backfill

    def _add_draft(
        self, builder: StepBuilder, candidate: Candidate, tree: CandidateTree, nodes: list[int], num_running: int
    ) -> None:
        """Adds the selected nodes, as many as fit the pages."""
        chunk, pool = candidate.chunk, self._pool
        pages, speculation = chunk.request.pages, chunk.request.speculation
        if candidate.num_missing > max(0, builder.backfill_budget):
            return
        chunk.num_own_pages = pool.pages_for(chunk.end) if chunk.misplaced else len(pages.ids)
        num_new = pool.pages_for(chunk.end + len(nodes)) - len(pages.ids)
        if num_new > 0 and pool.free_pages - num_new >= num_running:
            pages.ids += pool.allocate(num_new) or []
        depth = min(len(nodes), self._end_of_pages(pages, chunk.end + len(nodes), num_running) - chunk.end)
        if depth < 1:
            return
        self._probing.record_draft()
        speculation.last_step = builder.step
        nodes = nodes[:depth]
        draft = ChunkDraft(
            depth=depth,
            tokens=[tree.tokens[node] for node in nodes] if tree.tokens else [],
            parents=restrict_tree(tree.parents, nodes),
            grades=[tree.grades[node] for node in nodes],
            is_drafted=candidate.is_drafted,
        )
        if draft.is_drafted and speculation.tree.shape == "best_first" and draft.has_branches:
            draft = replace(draft, tree_bounds=TreeBounds(speculation.tree.widths, draft.num_levels))
        chunk.draft = draft
        if draft.is_drafted and needs_backfill(chunk):
            add_backfill(pool, builder, chunk, chunk.start)
            builder.drafted_pages.update(mark_drafted(pool, chunk, chunk.end))

    def _end_of_pages(self, pages: RequestPages, end: int, num_running: int) -> int:
        """Returns the end of the slots of a request, which gets parts for the tokens before `end` if its pages have parts."""
        size, parts = self._pool.page_size, self._pool.parts
        if parts is None:
            return len(pages.ids) * size
        num_pages = min(self._pool.pages_for(end), len(pages.ids))
        if parts.free_parts >= num_pages - pages.part_end + num_running:
            parts.extend(pages, num_pages)
        return pages.part_end * size


def _limit_backfill(builder: StepBuilder, costs: StepCosts | None) -> None:
    if costs is not None and costs.backfill_token_s and costs.limit_s < math.inf:
        left_s = costs.limit_s - costs.plain_s - costs.extra_s(1) - costs.pass_s
        builder.backfill_budget = min(builder.backfill_budget, int(left_s / costs.backfill_token_s))


def _num_passes(builder: StepBuilder) -> int:
    return max((chunk.draft.num_levels for chunk in builder.chunks if chunk.draft.is_drafted), default=0)


def _num_further_rows(builder: StepBuilder) -> int:
    num_rows = sum(chunk.draft.num_levels for chunk in builder.chunks if chunk.draft.is_drafted)
    return num_rows - _num_passes(builder)


def _fits_limit(costs: StepCosts | None, is_drafted: bool) -> bool:
    return costs is None or costs.plain_s + costs.extra_s(1) + is_drafted * costs.pass_s <= costs.limit_s


def _may_get_drafts(request: Request) -> bool:
    """Returns whether a request has room for draft tokens after its next token."""
    return request.speculation.max_tokens > 0 and request.remaining_output > 2
