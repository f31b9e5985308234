"""Who gets proposals in a step, and how many: between the decodes of a step and its prompt tokens.

    offer     lookups find tokens, up to the first that cannot be drawn, drafts promise some; each with its chance (`acceptance`)
    choose    depths that make the batch fastest (`depths`), within rows of scores and tokens of the step
    pages     a depth that finds no page is shorter: no request is preempted, and each keeps a page to grow into
    heard     accepted tokens are computed; pages that were taken for the others go back

Where nothing pays nothing is proposed, but for a probe now and then. A request's tokens depend on none of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.speculation import CHAIN, MAX_DEPTH, Method, SpeculationCounts, Tree
from phalanx_runtime.core.acceptance import FADE_OF_ENGINE, Shares, add_tree, share_of
from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.candidates import Candidates, drafted, looked_up
from phalanx_runtime.core.depths import Offer, StepCosts, choose_all, choose_depths
from phalanx_runtime.core.lookup import AT_ONCE, PLACES
from phalanx_runtime.core.making import Chunk, Making
from phalanx_runtime.core.pages import PagePool
from phalanx_runtime.core.plan import Growth
from phalanx_runtime.core.proposing import Proposing
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.trees import is_chain, levels, part, places
from phalanx_runtime.core.verify_cost import VerifyCost

PROBE_EVERY = 16
"""Steps without a proposal, though some were offered, after which one request gets one: shares and costs change."""
PROBE_SHARE = 0.01
"""Of the time, at most, that dear probes take: the next one waits accordingly, at most twice as long as the last did."""
LONGEST_REST = 512
PROMPT_PART = 4
"""While prompts wait, proposals take at most this part of what decodes leave, of tokens and of the time that a target allows."""
Fitting = Callable[[int, Sequence[int], int], int]
"""How many of these tokens a row may draw one after the other, from this output index on, by what its request allows."""


@dataclass(frozen=True, slots=True)
class Speculating:
    """How an engine speculates: what requests get that do not say, the most tokens for one in a step, how they may branch, and
    whether all follows what pays. `drafts`: the methods that its ranks can draft by; a lookup needs none. `lost`: why they cannot
    after all."""

    method: Method = "none"
    num_tokens: int = 4
    is_adaptive: bool = True
    drafts: frozenset[Method] = frozenset()
    lost: str = ""
    tree: Tree = CHAIN


@dataclass(frozen=True, slots=True)
class _Offered:
    """What could be proposed behind a decode: in one line, and as it may branch, which is the same where it may not."""

    chunk: Chunk
    chain: Candidates
    tree: Candidates
    is_drafted: bool


@dataclass(slots=True)
class _Left:
    """What one step may still do beside its own work: places that lookups enter, tokens that a draft model catches up with."""

    places: int
    tokens: int


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
        self._rest = PROBE_EVERY
        """How many these are until the next probe."""
        self._probed: int | None = None
        """The step of the latest probe."""
        self._paths = self._saved = self._branched = 0
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
        tree = self.setting.tree if wanted.tree is None else wanted.tree
        return Proposing(method, max(0, min(most, MAX_DEPTH)), tree)

    def propose(self, making: Making, model: StepModel | None, running: int, has_prompts: bool) -> None:
        """Adds proposals to the decodes of a step. running: requests that may need a page; they keep one each."""
        left = _Left(AT_ONCE, self._limits.max_num_batched_tokens)
        offered = [one for chunk in making.chunks if (one := self._offer(chunk, left)) is not None]
        if not offered:
            return
        room = self._room(making, has_prompts)
        of, taken = self._choose(making, offered, model, room, has_prompts)
        if any(taken):
            self._rest = PROBE_EVERY
        elif room > 0:
            self._barren += 1
            oldest = min(range(len(offered)), key=lambda at: _last_step(offered[at].chunk))
            if self._barren > self._rest and self._may_probe(offered[oldest], self._costs(making, model, has_prompts)):
                taken[oldest], self._probed = [0], making.step
        for one, found, nodes in zip(offered, of, taken, strict=True):
            if nodes:
                self._take(making, one, found, nodes, running, left)

    def draft_s(self, making: Making) -> float:
        """How long the drafts of a step take."""
        return self._cost.pass_s * max((chunk.num_levels for chunk in making.chunks if chunk.is_drafted), default=0)

    def draft_s_behind_decodes(self, making: Making, draft_s: float) -> float:
        """How much of this measured time of drafts went into proposals: beside prompts no more than is known of passes."""
        if not any(chunk.is_drafted for chunk in making.chunks):
            return 0.0
        is_known = self._cost.pass_s > 0 and making.work.prefill_tokens > 0
        return min(draft_s, self.draft_s(making)) if is_known else draft_s

    def heard(self, chunk: Chunk, accepted: Sequence[int], kept: int) -> None:
        """Of a request of a finished plan these proposals were accepted. It kept so many tokens: others came after its end."""
        proposing = chunk.request.proposing
        if proposing is None or not chunk.depth:
            return
        num_made = chunk.depth - len(chunk.undrafted)
        self._paths += num_made > 0
        self._saved += max(0, kept - 1)
        shape = tuple(chunk.parents)
        for node, (level, place) in enumerate(zip(levels(shape), places(shape), strict=True)):
            self._proposed[level] += node not in chunk.undrafted
            self._accepted[level] += node in accepted
            self._branched += place > 0 and node in accepted
        if not chunk.request.gone or len(accepted) == num_made:
            # A place of a shape that was asked for and left empty brought nothing; what fills up a grown one says nothing.
            unasked = chunk.undrafted if chunk.growth is not None else ()
            for shares in (proposing.shares, self._shares):
                add_tree(shares, chunk.parents, chunk.grades, accepted, unasked)

    def settle(self, chunk: Chunk) -> None:
        """A chunk of a finished plan is computed, and what was accepted behind it. Pages that were taken for the rest go back."""
        request = chunk.request
        if request.gone:
            return
        if request.proposing is not None and chunk.is_drafted:
            request.proposing.missing_from = None
        if not chunk.depth and not chunk.strays:
            return
        last = max([request.computed, *(slot + 1 for slot in request.strays)])
        kept = max(chunk.num_pages, self._pool.pages_for(last))
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
            deepest = max((chunk.num_levels for chunk in making.chunks if chunk.is_drafted), default=0)
            proposals = sum(chunk.depth for chunk in making.chunks)
            has_trees = any(chunk.has_branches for chunk in making.chunks)
            if making.step == self._probed and not making.plain.prefill_tokens:
                self._rest_after(wall_s / self._cost.costs(model, making.plain).plain_s - 1)
            self._cost.learn(model, making.plain, proposals, deepest, wall_s, draft_s, has_trees)

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
            self._branched,
        )

    def _offer(self, chunk: Chunk, left: _Left) -> _Offered | None:
        """What could be proposed behind a decode."""
        request = chunk.request
        proposing = request.proposing
        if proposing is None or chunk.end != len(request.tokens) or not request.num_output:
            return None
        most = min(proposing.most, request.max_len - len(request.tokens) - 1)
        if most < 1:
            return None
        share, widths = share_of(proposing.shares, self._shares), proposing.tree.widths
        if proposing.method == "ngram":
            left.places -= proposing.lookup.enter(request.tokens, left.places)
            lines = proposing.lookup.find(request.tokens, most, PLACES if widths else 1)
            counts = [self._num_fitting(request, tokens) for tokens, _ in lines]
            fitting = [(tokens[:count], agreed) for (tokens, agreed), count in zip(lines, counts, strict=True) if count]
            one = looked_up(share, most, (), fitting[:1])
            tree = looked_up(share, most, widths, fitting) if widths else one
        elif self._lost or _num_missing(chunk, proposing) > left.tokens:
            return None  # a longer one goes on without proposals
        else:
            one = drafted(share, most, ())
            tree = drafted(share, most, widths) if widths else one
        return _Offered(chunk, one, tree, proposing.method != "ngram") if tree.parents else None

    def _num_fitting(self, request: Request, tokens: list[int]) -> int:
        """How many of these the request may draw. Unknown where the rank that draws is another, or does not know it yet."""
        if self._fitting is None or request.row is None or not request.sent:
            return len(tokens)
        return self._fitting(request.row, tokens, request.num_output)

    def _room(self, making: Making, has_prompts: bool) -> int:
        """How many proposals the step may hold."""
        left = self._limits.max_num_batched_tokens - making.num_tokens
        rows = self._limits.max_draws - (self._limits.max_num_seqs if has_prompts else len(making.chunks))
        return min(rows, left // PROMPT_PART if has_prompts else left)

    def _costs(self, making: Making, model: StepModel | None, has_prompts: bool, has_trees: bool = False) -> StepCosts | None:
        """What the step costs, and how long it may take; None while nothing was measured."""
        if model is None:
            return None
        costs, limits = self._cost.costs(model, making.describe_plain(), has_trees), self._limits
        if limits.itl_target_s is None:
            return costs
        left_s = limits.itl_target_s / limits.plans_in_flight - costs.plain_s
        return replace(costs, limit_s=costs.plain_s + (left_s / PROMPT_PART if has_prompts else left_s))

    def _choose(
        self, making: Making, offered: Sequence[_Offered], model: StepModel | None, room: int, has_prompts: bool
    ) -> tuple[list[Candidates], list[list[int]]]:
        """Which of what each gets: of trees, where these promise more than chains."""
        chains, trees = [one.chain for one in offered], [one.tree for one in offered]
        lines = [Offer(one.chain.chances, one.is_drafted, one.chain.levels) for one in offered]
        branching = [Offer(one.tree.chances, one.is_drafted, one.tree.levels) for one in offered]
        if not self.setting.is_adaptive:
            return trees, choose_all(branching, room)
        decodes = len(making.chunks)
        straight = choose_depths(lines, self._costs(making, model, has_prompts), decodes, room)
        if model is None or all(one.tree is one.chain for one in offered):
            return chains, straight.taken
        found = choose_depths(branching, self._costs(making, model, has_prompts, has_trees=True), decodes, room)
        return (trees, found.taken) if found.speed > straight.speed else (chains, straight.taken)

    def _may_probe(self, one: _Offered, costs: StepCosts | None) -> bool:
        """Whether one proposal that is due is made. Where only the draft takes too long, that is believed less the next time."""
        if _may_take(costs, one.is_drafted):
            return True
        if _may_take(costs, False):
            self._cost.doubt_passes()
        return False

    def _rest_after(self, over: float) -> None:
        """A probe took so many plain steps more than none would have."""
        self._rest = min(max(PROBE_EVERY, math.ceil(over / PROBE_SHARE)), 2 * self._rest, LONGEST_REST)

    def _take(self, making: Making, one: _Offered, found: Candidates, nodes: list[int], running: int, left: _Left) -> None:
        """Puts proposals into the step, as many as there are pages for."""
        chunk, request, pool, depth = one.chunk, one.chunk.request, self._pool, len(nodes)
        proposing = request.proposing
        assert proposing is not None, "it was offered"
        missing = _num_missing(chunk, proposing) if one.is_drafted else 0
        if missing > left.tokens:
            return
        chunk.num_pages = pool.pages_for(chunk.end) if chunk.strays else len(request.pages)
        more = pool.pages_for(chunk.end + depth) - len(request.pages)
        if more > 0 and pool.free_pages - more >= running:
            request.pages += pool.take(more) or []
        depth = min(depth, len(request.pages) * pool.page_size - chunk.end)
        if depth < 1:
            return
        left.tokens -= missing
        self._barren, proposing.last_step = 0, making.step
        nodes = nodes[:depth]
        chunk.depth, chunk.parents, chunk.grades = depth, part(found.parents, nodes), [found.grades[node] for node in nodes]
        chunk.proposed = [found.tokens[node] for node in nodes] if found.tokens else []
        chunk.is_drafted = one.is_drafted
        if chunk.is_drafted and proposing.tree.shape == "best_first" and not is_chain(chunk.parents):
            chunk.growth = Growth(proposing.tree.widths, chunk.num_levels)
        if missing:
            chunk.behind = request.tokens[proposing.missing_from : chunk.start]


def _num_missing(chunk: Chunk, proposing: Proposing) -> int:
    """Tokens before the chunk that a draft model may not have computed."""
    return 0 if proposing.missing_from is None else chunk.start - proposing.missing_from


def _may_take(costs: StepCosts | None, is_drafted: bool) -> bool:
    """Whether a step with one proposal takes no longer than it may."""
    return costs is None or costs.plain_s + costs.extra_s(1) + is_drafted * costs.pass_s <= costs.limit_s


def _last_step(chunk: Chunk) -> int:
    return chunk.request.proposing.last_step if chunk.request.proposing is not None else 0
