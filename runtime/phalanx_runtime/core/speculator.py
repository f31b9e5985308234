"""Who gets proposals in a step, and how many: between the decodes of a step and its prompt tokens.

    offer     lookups find tokens, up to the first that cannot be drawn, drafts promise some; each with its chance (`acceptance`)
    choose    depths that make the batch fastest (`depths`), within rows of scores and tokens of the step
    pages     a depth that finds no page is shorter: no request is preempted, and each keeps a page to grow into
    heard     accepted tokens are computed; pages that were taken for the others go back

Where nothing pays nothing is proposed, but for a probe now and then. A request's tokens depend on none of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.speculation import MAX_DEPTH, Method, SpeculationCounts
from phalanx_runtime.core.acceptance import (
    FADE_OF_ENGINE,
    Shares,
    add_path,
    chances,
    draft_grades,
    lookup_grades,
)
from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.depths import Offer, StepCosts, choose_depths
from phalanx_runtime.core.making import Chunk, Making
from phalanx_runtime.core.pages import PagePool
from phalanx_runtime.core.proposing import Proposing
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.verify_cost import VerifyCost

PROBE_EVERY = 16
"""Steps without a proposal, though some were offered, after which one request gets one: shares and costs change."""
PROMPT_PART = 4
"""While prompts wait, proposals take at most this part of what decodes leave, of tokens and of the time that a target allows."""
Fitting = Callable[[int, Sequence[int], int], int]
"""How many of these tokens a row may draw one after the other, from this output index on, by what its request allows."""


@dataclass(frozen=True, slots=True)
class Speculating:
    """How an engine speculates: what requests get that do not say, the most tokens for one in a step, and whether depths follow
    what pays. `drafts`: the methods that its ranks can draft by; a lookup needs none. `lost`: why they cannot after all."""

    method: Method = "none"
    num_tokens: int = 4
    is_adaptive: bool = True
    drafts: frozenset[Method] = frozenset()
    lost: str = ""


@dataclass(slots=True)
class _Offered:
    chunk: Chunk
    tokens: list[int]
    grades: list[int]
    offer: Offer


class Speculator:
    """Proposes for the requests of one engine, and learns what became of it."""

    def __init__(self, limits: Limits, pool: PagePool, setting: Speculating, fitting: Fitting | None = None) -> None:
        self.setting = setting
        self._limits = limits
        self._pool = pool
        self._fitting = fitting
        self._shares = Shares(FADE_OF_ENGINE)
        self._cost = VerifyCost()
        self._barren = 0
        """Steps since the last proposal, in which some were offered."""
        self._may_catch_up = 0
        """Tokens that drafts may compute in this step beside their own."""
        self._paths = self._saved = 0
        self._proposed, self._accepted = [0] * MAX_DEPTH, [0] * MAX_DEPTH
        self._draft_s = 0.0
        self._lost = setting.lost

    def begin(self, asked: wire.Request) -> Proposing | Refuse | None:
        """What is kept for a new request; None when nothing is to be proposed for it; or why it cannot be served so.

        One that has begun elsewhere goes on without proposals where they cannot be made.
        """
        wanted = asked.speculation
        method = self.setting.method if wanted.method is None else wanted.method
        if method == "none":
            return None
        if method != "ngram" and method not in self.setting.drafts:
            if asked.epoch > 0 or asked.delivered:
                return None
            names = ", ".join(sorted({"none", "ngram", *self.setting.drafts}))
            return Refuse(400, "unsupported_speculation", f"speculative.method {method} is not offered here; there are {names}")
        most = self.setting.num_tokens if wanted.num_tokens is None else wanted.num_tokens
        return Proposing(method, max(0, min(most, MAX_DEPTH)))

    def propose(self, making: Making, model: StepModel | None, running: int, has_prompts: bool) -> None:
        """Adds proposals to the decodes of a step. running: requests that may need a page; they keep one each."""
        self._may_catch_up = self._limits.max_num_batched_tokens
        offered = [one for one in map(self._offer, making.chunks) if one is not None]
        if not offered:
            return
        room, costs = self._room(making, has_prompts), self._costs(making, model, has_prompts)
        offers = [one.offer for one in offered]
        depths = self._depths(offers, costs, len(making.chunks), room)
        if not any(depths) and room > 0:
            self._barren += 1
            oldest = min(range(len(offered)), key=lambda at: _last_step(offered[at].chunk))
            if self._barren > PROBE_EVERY and _may_take(costs, offers[oldest]):
                depths[oldest] = 1
        for one, depth in zip(offered, depths, strict=True):
            if depth:
                self._take(making, one, depth, running)

    def draft_s(self, making: Making) -> float:
        """How long the drafts of a step take."""
        return self._cost.pass_s * max((chunk.depth for chunk in making.chunks if chunk.is_drafted), default=0)

    def heard(self, chunk: Chunk, run: int, kept: int) -> None:
        """A request of a finished plan was given a run of so many tokens, of which it kept some: others came after its end."""
        proposing, accepted = chunk.request.proposing, max(0, run - 1)
        if proposing is None or not chunk.depth:
            return
        self._paths += 1
        self._saved += max(0, kept - 1)
        for at in range(chunk.depth):
            self._proposed[at] += 1
            self._accepted[at] += at < accepted
        if not chunk.request.gone or accepted == chunk.depth:
            add_path(proposing.shares, chunk.grades, accepted)
            add_path(self._shares, chunk.grades, accepted)

    def settle(self, chunk: Chunk) -> None:
        """A chunk of a finished plan is computed, and what was accepted behind it. Pages that were taken for the rest go back."""
        request = chunk.request
        if request.gone:
            return
        if request.proposing is not None and chunk.is_drafted:
            request.proposing.missing_from = None
        if not chunk.depth:
            return
        kept = max(chunk.num_pages, self._pool.pages_for(request.computed))
        if len(request.pages) > kept:
            self._pool.give_back(request.pages[kept:])
            del request.pages[kept:]
            if request.sent > kept:
                request.sent, request.is_cut = kept, True

    def learn(self, making: Making, model: StepModel | None, wall_s: float | None, draft_s: float, lost: str) -> None:
        """A plan is finished: how long it took, how long its drafts took, and whether the ranks can draft no more."""
        self._draft_s += draft_s
        if lost and not self._lost:
            self._lost = lost
        if wall_s is not None and model is not None:
            deepest = max((chunk.depth for chunk in making.chunks if chunk.is_drafted), default=0)
            proposals = sum(chunk.depth for chunk in making.chunks)
            self._cost.learn(model, making.plain, proposals, deepest, wall_s, draft_s)

    def counts(self) -> SpeculationCounts:
        """What became of all proposals."""
        longest = max((at + 1 for at, count in enumerate(self._proposed) if count), default=0)
        return SpeculationCounts(
            self._paths,
            self._proposed[:longest],
            self._accepted[:longest],
            self._saved,
            self._draft_s,
            self._cost.verify_s,
            self._lost,
        )

    def _offer(self, chunk: Chunk) -> _Offered | None:
        """What could be proposed behind a decode."""
        request = chunk.request
        proposing = request.proposing
        if proposing is None or chunk.end != len(request.tokens) or not request.num_output:
            return None
        most = min(proposing.most, request.max_len - len(request.tokens) - 1)
        if most < 1:
            return None
        if proposing.method == "ngram":
            tokens, agreed = proposing.lookup.find(request.tokens, most)
            tokens = tokens[: self._num_fitting(request, tokens)]
            grades = lookup_grades(agreed, len(tokens))
        elif self._lost or not self._catches_up(chunk, proposing):
            return None
        else:
            tokens, grades = [], draft_grades(most)
        if not grades:
            return None
        offer = Offer(chances(proposing.shares, self._shares, grades), proposing.method != "ngram")
        return _Offered(chunk, tokens, grades, offer)

    def _num_fitting(self, request: Request, tokens: list[int]) -> int:
        """How many of these the request may draw. Unknown where the rank that draws is another, or does not know it yet."""
        if self._fitting is None or request.row is None or not request.sent:
            return len(tokens)
        return self._fitting(request.row, tokens, request.num_output)

    def _catches_up(self, chunk: Chunk, proposing: Proposing) -> bool:
        """Whether a draft model may compute in this step what came without it. A longer request goes on without proposals."""
        missing = 0 if proposing.missing_from is None else chunk.start - proposing.missing_from
        if missing > self._may_catch_up:
            return False
        self._may_catch_up -= missing
        return True

    def _room(self, making: Making, has_prompts: bool) -> int:
        """How many proposals the step may hold."""
        left = self._limits.max_num_batched_tokens - making.num_tokens
        rows = self._limits.max_draws - (self._limits.max_num_seqs if has_prompts else len(making.chunks))
        return min(rows, left // PROMPT_PART if has_prompts else left)

    def _costs(self, making: Making, model: StepModel | None, has_prompts: bool) -> StepCosts | None:
        """What the step costs, and how long it may take; None while nothing was measured."""
        if model is None:
            return None
        costs, limits = self._cost.costs(model, making.describe(with_proposals=False)), self._limits
        if limits.itl_target_s is None:
            return costs
        left_s = limits.itl_target_s / limits.plans_in_flight - costs.plain_s
        return replace(costs, limit_s=costs.plain_s + (left_s / PROMPT_PART if has_prompts else left_s))

    def _depths(self, offers: list[Offer], costs: StepCosts | None, decodes: int, room: int) -> list[int]:
        return choose_depths(offers, costs, decodes, room) if self.setting.is_adaptive else _all(offers, room)

    def _take(self, making: Making, one: _Offered, depth: int, running: int) -> None:
        """Puts proposals into the step, as many as there are pages for."""
        chunk, request, pool = one.chunk, one.chunk.request, self._pool
        chunk.num_pages = len(request.pages)
        more = pool.pages_for(chunk.end + depth) - len(request.pages)
        if more > 0 and pool.free_pages - more >= running:
            request.pages += pool.take(more) or []
        depth = min(depth, len(request.pages) * pool.page_size - chunk.end)
        if depth < 1:
            return
        proposing = request.proposing
        assert proposing is not None, "it was offered"
        self._barren, proposing.last_step = 0, making.step
        chunk.depth, chunk.grades, chunk.proposed = depth, one.grades[:depth], one.tokens[:depth]
        chunk.is_drafted = one.offer.is_drafted
        if chunk.is_drafted and proposing.missing_from is not None:
            chunk.behind = request.tokens[proposing.missing_from : chunk.start]


def _all(offers: list[Offer], room: int) -> list[int]:
    """All that is offered, in turns while there is room."""
    depths = [0] * len(offers)
    for position in range(max(len(offer.chances) for offer in offers)):
        for at, offer in enumerate(offers):
            if position < len(offer.chances) and room > 0:
                depths[at] += 1
                room -= 1
    return depths


def _may_take(costs: StepCosts | None, offer: Offer) -> bool:
    """Whether a step with one proposal takes no longer than it may."""
    return costs is None or costs.plain_s + costs.extra_s(1) + offer.is_drafted * costs.pass_s <= costs.limit_s


def _last_step(chunk: Chunk) -> int:
    return chunk.request.proposing.last_step if chunk.request.proposing is not None else 0
