"""Who gets proposals in a step, and how many: between the decodes of a step and its prompt tokens.

    offer     lookups find tokens, drafts promise some, each with its chance (`offers`)
    choose    what makes the batch fastest, within rows of scores and tokens of the step (`offers`, `depths`)
    pages     a depth that finds no page is shorter: no request is preempted, and each keeps a page to grow into
    heard     accepted tokens are computed; pages that were taken for the others go back

Where nothing pays nothing is proposed, but for a probe now and then, nor looked at (`probing`). What a draft model lacks of a
request it computes when it is asked again (`catching_up`). A request's tokens depend on none of it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx_api.cost import StepModel
from phalanx_api.speculation import MAX_DEPTH, SpeculationCounts
from phalanx_runtime.core.acceptance import FADE_OF_ENGINE, AcceptanceRates, add_tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.draft_tree import is_chain, levels, part, places
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.speculation.config import Fitting, SpeculationConfig
from phalanx_runtime.core.speculation.draft_backfill import catch_up, mark
from phalanx_runtime.core.speculation.draft_length import StepCosts, could_pay
from phalanx_runtime.core.speculation.offers import (
    Candidate,
    CandidateBuilder,
    CandidateTree,
    DraftBudget,
    Selection,
    choose,
    lags,
    looks_up,
    take_all,
)
from phalanx_runtime.core.speculation.probing import Probing
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import Growth

# What became of all proposals of an engine: counted, and told as `SpeculationCounts`.


class SpeculationCounter:
    """Of one engine, since it started."""

    __slots__ = ("_accepted", "_branched", "_paths", "_proposed", "_saved")

    def __init__(self) -> None:
        self._paths = self._saved = self._branched = 0
        self._proposed, self._accepted = [0] * MAX_DEPTH, [0] * MAX_DEPTH

    def add(self, chunk: ScheduledChunk, accepted: Sequence[int], kept: int) -> None:
        """Of these proposals so many were accepted; their request kept so many tokens."""
        self._paths += chunk.depth > len(chunk.undrafted)
        self._saved += max(0, kept - 1)
        shape = tuple(chunk.parents)
        for node, (level, place) in enumerate(zip(levels(shape), places(shape), strict=True)):
            self._proposed[level] += node not in chunk.undrafted
            self._accepted[level] += node in accepted
            self._branched += place > 0 and node in accepted

    def counts(self, draft_s: float, verify_s: float, lost: str) -> SpeculationCounts:
        """All of it, with the time in drafts, the time that proposals cost their steps, and why there are no drafts any more."""
        longest = max((at + 1 for at, count in enumerate(self._proposed) if count), default=0)
        proposed, accepted = self._proposed[:longest], self._accepted[:longest]
        return SpeculationCounts(
            paths=self._paths,
            proposed=proposed,
            accepted=accepted,
            saved=self._saved,
            draft_s=draft_s,
            verify_s=verify_s,
            lost=lost,
            branched=self._branched,
        )


NEAR = 64
"""Tokens that a draft may lack of a request that is probed for its turn; of those that lack more the one that lacks least is."""
NEW_EVERY = 4
"""Before steps were measured every so many tries what one drafted proposal costs, and no other is made: the fit needs steps of
several kinds. Once they are, the next steps without prompt tokens do until a pass of the draft is known: others teach nothing."""
PROMPT_PART = 4
"""While prompts wait, proposals take at most this part of what decodes leave, of tokens and of the time that a target allows."""


class Speculator:
    """Proposes for the requests of one engine, and learns what became of it."""

    def __init__(self, limits: Limits, pool: PagePool, setting: SpeculationConfig, fitting: Fitting | None = None) -> None:
        self.setting = setting
        self._limits = limits
        self._pool = pool
        self._shares = AcceptanceRates(FADE_OF_ENGINE)
        self._offering = CandidateBuilder(pool, self._shares, fitting)
        self._cost = VerifyCost()
        self._probing = Probing()
        self._tally = SpeculationCounter()
        self._draft_s = 0.0
        self._lost = setting.lost

    def propose(self, making: StepBuilder, model: StepModel | None, running: int, has_prompts: bool) -> None:
        """Adds proposals to the decodes of a step. running: requests that may need a page; they keep one each."""
        decodes, probing = len(making.chunks), self._probing
        if all(chunk.request.proposing is None for chunk in making.chunks):
            return
        if self.setting.is_adaptive and probing.sleeps(making.step, decodes):
            return
        room, costs = self._room(making, has_prompts), self._costs(making, model, has_prompts)
        if costs is not None and costs.behind_s and costs.limit_s < math.inf:
            left_s = costs.limit_s - costs.plain_s - costs.extra_s(1) - costs.pass_s
            making.draft_room = min(making.draft_room, int(left_s / costs.behind_s))
        is_free = not self.setting.is_adaptive or probing.is_next or costs is None
        may_look_up = is_free or (costs is not None and could_pay(costs, decodes, max(1, room)))
        offered = self._offering.offers(making.chunks, may_look_up, may_draft=not self._lost)
        if not offered:
            if not may_look_up:
                probing.found_nothing(making.step, decodes, may_sleep=True)
            return
        most = making.draft_room
        is_new = any(one.is_drafted for one in offered) and (
            making.step % NEW_EVERY == 0 if costs is None else not (has_prompts or self._cost.knows_passes)
        )
        chosen = self._choose(making, offered, model=model, costs=costs, room=room, has_prompts=has_prompts)
        taken = chosen.taken
        if any(taken):
            probing.paid(any(nodes and one.is_drafted for one, nodes in zip(offered, taken, strict=True)))
        elif room > 0:
            may_sleep = costs is not None and not (may_look_up and any(map(looks_up, making.chunks)))
            probing.found_nothing(making.step, decodes, may_sleep)
            if probing.is_due or is_new:
                self._probe(making, offered, taken, costs, is_new)
        for one, found, nodes in zip(offered, chosen.of, taken, strict=True):
            if nodes:
                self._take(making, one, found, nodes, running)
            elif one.missing > max(0, most) and making.draft_room > 0 and self._drafts_pay and not one.chunk.behind:
                catch_up(self._pool, making, one.chunk, one.chunk.start)
                probing.goes_on()

    def follow_prompts(self, making: StepBuilder) -> None:
        """Lets a draft model compute the prompt tokens of a step too, where drafts pay: then they will be wanted."""
        if self._lost or not self._drafts_pay:
            return
        for chunk in making.chunks:
            if not chunk.is_decode and lags(chunk) and _may_get_some(chunk.request) and making.draft_room > 0:
                catch_up(self._pool, making, chunk, chunk.end)

    def draft_s(self, making: StepBuilder) -> float:
        """How long the drafts of a step take, but for those of prompt tokens."""
        behind = sum(len(chunk.behind) for chunk in making.chunks if chunk.is_decode)
        return self._cost.draft_s(_num_passes(making), behind, _further_rows(making))

    def draft_s_behind_decodes(self, making: StepBuilder, draft_s: float) -> float:
        """How much of this measured time of drafts went into proposals: beside prompts no more than is known of passes."""
        if not any(chunk.is_drafted or (chunk.behind and chunk.is_decode) for chunk in making.chunks):
            return 0.0
        is_known = self._cost.pass_s > 0 and making.work.prefill_tokens > 0
        return min(draft_s, self.draft_s(making)) if is_known else draft_s

    def heard(self, chunk: ScheduledChunk, accepted: Sequence[int], kept: int) -> None:
        """Of a request of a finished plan these proposals were accepted. It kept so many tokens: others came after its end."""
        proposing = chunk.request.proposing
        if proposing is None or not chunk.depth:
            return
        self._tally.add(chunk, accepted, kept)
        num_made = chunk.depth - len(chunk.undrafted)
        if not chunk.request.gone or len(accepted) == num_made:
            # A place of a shape that was asked for and left empty brought nothing; what fills up a grown one says nothing.
            unasked = chunk.undrafted if chunk.growth is not None else ()
            for shares in (proposing.shares, self._shares):
                add_tree(shares, chunk.parents, chunk.grades, accepted, unasked)

    def settle(self, chunk: ScheduledChunk) -> None:
        """A chunk of a finished plan is computed, and what was accepted behind it. Pages that were taken for the rest go back."""
        request = chunk.request
        if request.gone:
            return
        if chunk.is_drafted and lags(chunk) and chunk.growth is None and is_chain(chunk.parents):
            # Of a chain the draft computed all but the last; what it left in the slots of a tree it computes again.
            mark(self._pool, None, chunk, min(chunk.end + chunk.depth - 1, request.computed))
        if not chunk.depth and not chunk.strays:
            return
        last = max([request.computed, *(slot + 1 for slot in request.strays)])
        kept = max(chunk.num_pages, self._pool.pages_for(last))
        if len(request.pages) > kept:
            self._pool.give_back(request.pages[kept:])
            del request.pages[kept:]
            if request.sent > kept:
                request.sent, request.is_cut = kept, True

    def learn(self, making: StepBuilder, model: StepModel | None, wall_s: float | None, draft_s: float, lost: str) -> None:
        """A plan is finished: how long it took, how long its drafts took, and whether the ranks can draft no more."""
        self._draft_s += draft_s
        if lost and not self._lost:
            self._lost = lost
        if wall_s is not None and model is not None:
            proposals = sum(chunk.depth for chunk in making.chunks)
            has_trees = any(chunk.has_branches for chunk in making.chunks)
            behind = sum(max(0, len(chunk.behind) - 1) for chunk in making.chunks)
            if self._probing.was_probe(making.step) and not making.plain.prefill_tokens:
                self._probing.took(wall_s / self._cost.costs(model, making.plain).plain_s - 1)
            passes, rows = _num_passes(making), _further_rows(making)
            self._cost.learn(
                model,
                making.plain,
                proposals=proposals,
                depth=passes,
                wall_s=wall_s,
                draft_s=draft_s,
                has_trees=has_trees,
                behind=behind,
                rows=rows,
            )

    def counts(self) -> SpeculationCounts:
        """What became of all proposals."""
        return self._tally.counts(self._draft_s, self._cost.verify_s, self._lost)

    @property
    def _drafts_pay(self) -> bool:
        return not self.setting.is_adaptive or self._probing.drafts_pay

    def _room(self, making: StepBuilder, has_prompts: bool) -> int:
        """How many proposals the step may hold."""
        left = self._limits.max_num_batched_tokens - making.num_tokens
        rows = self._limits.max_draws - (self._limits.max_num_seqs if has_prompts else len(making.chunks))
        return min(rows, left // PROMPT_PART if has_prompts else left)

    def _costs(
        self, making: StepBuilder, model: StepModel | None, has_prompts: bool, has_trees: bool = False
    ) -> StepCosts | None:
        """What the step costs, and how long it may take; None while nothing was measured."""
        if model is None:
            return None
        costs, limits = self._cost.costs(model, making.describe_plain(), has_trees), self._limits
        if limits.itl_target_s is None:
            return costs
        left_s = limits.itl_target_s / limits.plans_in_flight - costs.plain_s
        return replace(costs, limit_s=costs.plain_s + (left_s / PROMPT_PART if has_prompts else left_s))

    def _choose(
        self,
        making: StepBuilder,
        offered: Sequence[Candidate],
        model: StepModel | None,
        costs: StepCosts | None,
        room: int,
        has_prompts: bool,
    ) -> Selection:
        """What each gets: what makes the batch fastest, or all there is."""
        of = DraftBudget(len(making.chunks), room, making.draft_room, self._cost.knows_passes)
        if not self.setting.is_adaptive:
            return take_all(offered, of)
        return choose(offered, costs, lambda: self._costs(making, model, has_prompts, has_trees=True), of)

    def _probe(
        self, making: StepBuilder, offered: Sequence[Candidate], taken: list[list[int]], costs: StepCosts | None, is_new: bool
    ) -> None:
        """One proposal for a request that waited long for one and lacks little, or what it lacks as far as there is room.
        is_new: a draft is to be tried."""
        near = NEAR if self._cost.knows_passes else 0  # a pass is known best where nothing is caught up with
        among = [at for at, one in enumerate(offered) if one.is_drafted or not is_new]
        at = min(among, key=lambda at: (max(near, offered[at].missing), _last_step(offered[at].chunk)))
        one = offered[at]
        if not self._may_probe(one, costs):
            return
        if one.missing <= max(0, making.draft_room):
            self._probing.probes(making.step)
            taken[at] = [0]
        elif making.draft_room > 0:
            self._probing.probes(making.step, is_part=True)
            self._probing.goes_on()
            catch_up(self._pool, making, one.chunk, one.chunk.start)
        else:
            self._cost.doubt_drafts()

    def _may_probe(self, one: Candidate, costs: StepCosts | None) -> bool:
        """Whether one proposal that is due is made. Where only the draft takes too long, that is believed less the next time."""
        if _may_take(costs, one.is_drafted):
            return True
        if _may_take(costs, False):
            self._cost.doubt_drafts()
        return False

    def _take(self, making: StepBuilder, one: Candidate, found: CandidateTree, nodes: list[int], running: int) -> None:
        """Puts proposals into the step, as many as there are pages for."""
        chunk, request, pool, depth = one.chunk, one.chunk.request, self._pool, len(nodes)
        proposing = request.proposing
        assert proposing is not None, "it was offered"
        if one.missing > max(0, making.draft_room):
            return
        chunk.num_pages = pool.pages_for(chunk.end) if chunk.strays else len(request.pages)
        more = pool.pages_for(chunk.end + depth) - len(request.pages)
        if more > 0 and pool.free_pages - more >= running:
            request.pages += pool.take(more) or []
        depth = min(depth, len(request.pages) * pool.page_size - chunk.end)
        if depth < 1:
            return
        self._probing.proposed()
        proposing.last_step = making.step
        nodes = nodes[:depth]
        chunk.depth, chunk.parents, chunk.grades = depth, part(found.parents, nodes), [found.grades[node] for node in nodes]
        chunk.proposed = [found.tokens[node] for node in nodes] if found.tokens else []
        chunk.is_drafted = one.is_drafted
        if chunk.is_drafted and proposing.tree.shape == "best_first" and not is_chain(chunk.parents):
            chunk.growth = Growth(proposing.tree.widths, chunk.num_levels)
        if chunk.is_drafted and lags(chunk):
            catch_up(pool, making, chunk, chunk.start)
            mark(pool, making, chunk, chunk.end)


def _num_passes(making: StepBuilder) -> int:
    """Of the draft: one for each level of the deepest proposals that are drafted."""
    return max((chunk.num_levels for chunk in making.chunks if chunk.is_drafted), default=0)


def _further_rows(making: StepBuilder) -> int:
    """How many rows the passes of the draft have beyond one each: one for each request at each of its levels."""
    return sum(chunk.num_levels for chunk in making.chunks if chunk.is_drafted) - _num_passes(making)


def _may_take(costs: StepCosts | None, is_drafted: bool) -> bool:
    """Whether a step with one proposal takes no longer than it may."""
    return costs is None or costs.plain_s + costs.extra_s(1) + is_drafted * costs.pass_s <= costs.limit_s


def _may_get_some(request: Request) -> bool:
    """Whether a request whose prompt is computed may get proposals: behind its next token, before its last."""
    return request.proposing is not None and request.proposing.most > 0 and request.max_len - len(request.tokens) > 2


def _last_step(chunk: ScheduledChunk) -> int:
    return chunk.request.proposing.last_step if chunk.request.proposing is not None else 0
