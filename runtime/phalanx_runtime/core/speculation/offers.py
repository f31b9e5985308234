"""What could be proposed for the decodes of a step, and which of it makes the batch fastest.

    a lookup   tokens that were found, up to the first that the request may not draw
    a draft    so many tokens as the request may still get, and what the draft model has to catch up with first

Each comes with the chances of its tokens (`candidates`), in one line and as it may branch; trees are taken where they promise
more tokens per second than chains (`depths`). What a step may hold and what it costs is told.
"""

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_api.speculation import MAX_DEPTH
from phalanx_runtime.core.acceptance import AcceptanceRates, Share, acceptance_rate_of, draft_grade, ngram_grade
from phalanx_runtime.core.draft_tree import OWN, chain
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.ngram import AT_ONCE, PLACES
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.speculation.config import Fitting
from phalanx_runtime.core.speculation.draft_backfill import num_missing
from phalanx_runtime.core.speculation.draft_length import (
    DraftCandidate,
    StepCosts,
    choose_all,
    choose_draft_lengths,
    with_catching_up,
)
from phalanx_runtime.core.step_builder import ScheduledChunk

# What could be proposed for a request, as a tree with the likeliest proposals first: each comes after its parent.
#     a draft    by how often drafts of a level and place were accepted: what will be drafted is not known yet     a lookup
# what followed where the last tokens occurred before, merged where it begins alike
# So the first few of them are a tree again, and the best one of so many.


@dataclass(slots=True, kw_only=True)
class CandidateTree:
    """Of each its parent, its level, its grade, and the chance that it is accepted with its branch, which only falls.

    tokens: empty where a draft is to make them.
    """

    parents: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class _OpenNode:
    """The next child of one proposal; the likeliest of all is the least. `before`: the chance of its parent."""

    unlikelihood: float
    number: int
    parent: int
    level: int
    place: int
    before: float


def drafted(share: Share, count: int, widths: Sequence[int]) -> CandidateTree:
    """So many drafted proposals, the likeliest of all trees of these widths. A second child is no likelier than the first."""
    if not widths:
        return _drafted_chain(share, count)
    found, open_, made = CandidateTree(), list[_OpenNode](), 0

    def grow(parent: int, level: int, place: int, before: float, most: float) -> None:
        nonlocal made
        if level < MAX_DEPTH and place < width(widths, level):
            chance = min(most, before * share(draft_grade(level, place)))
            heapq.heappush(
                open_, _OpenNode(unlikelihood=-chance, number=made, parent=parent, level=level, place=place, before=before)
            )
            made += 1

    grow(OWN, 0, 0, 1.0, 1.0)
    while open_ and len(found.parents) < count:
        best = heapq.heappop(open_)
        found.parents.append(best.parent)
        found.levels.append(best.level)
        found.grades.append(draft_grade(best.level, best.place))
        found.chances.append(-best.unlikelihood)
        grow(len(found.parents) - 1, best.level + 1, 0, -best.unlikelihood, -best.unlikelihood)
        grow(best.parent, best.level, best.place + 1, best.before, -best.unlikelihood)
    return found


def _drafted_chain(share: Share, count: int) -> CandidateTree:
    """The same where there is one child everywhere."""
    grades = [draft_grade(level) for level in range(min(count, MAX_DEPTH))]
    chances = list(accumulate((min(1.0, share(grade)) for grade in grades), operator.mul))
    return CandidateTree(parents=chain(len(grades)), levels=list(range(len(grades))), grades=grades, chances=chances)


def looked_up(share: Share, count: int, widths: Sequence[int], lines: Sequence[tuple[list[int], int]]) -> CandidateTree:
    """So many proposals of what was found: tokens that may follow, and how many tokens agree before them, the most first."""
    parents, levels, grades, tokens, chances = list[int](), list[int](), list[int](), list[int](), list[float]()
    children: dict[int, dict[int, int]] = {}
    for line, agreed in lines:
        node, chance = OWN, 1.0
        for level, token in enumerate(line):
            known = children.setdefault(node, {})
            if token not in known:
                if len(known) >= width(widths, level):
                    break
                grade = ngram_grade(agreed + level, len(known))
                known[token] = len(parents)
                parents.append(node)
                levels.append(level)
                grades.append(grade)
                tokens.append(token)
                chances.append(chance * share(grade))
            node = known[token]
            chance = chances[node]
    order = sorted(range(len(parents)), key=lambda node: (-chances[node], node))[:count]
    number = {OWN: OWN} | {node: at for at, node in enumerate(order)}
    return CandidateTree(
        parents=[number[parents[node]] for node in order],
        levels=[levels[node] for node in order],
        grades=[grades[node] for node in order],
        chances=[chances[node] for node in order],
        tokens=[tokens[node] for node in order],
    )


def width(widths: Sequence[int], level: int) -> int:
    """How many children a tree of these widths has at a level."""
    return widths[level] if level < len(widths) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What could be proposed behind a decode: in one line, and as it may branch, which is the same where it may not. `missing`:
    tokens that a draft model catches up with first."""

    chunk: ScheduledChunk
    chain: CandidateTree
    tree: CandidateTree
    is_drafted: bool
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Of each offer what it is taken from, and which nodes of that; none where nothing pays."""

    of: list[CandidateTree]
    taken: list[list[int]]


class CandidateBuilder:
    """Makes offers from what an engine knows: its shares of acceptance, its pages, and what requests may draw."""

    def __init__(self, pool: PagePool, shares: AcceptanceRates, fitting: Fitting | None) -> None:
        self._pool = pool
        self._shares = shares
        self._fitting = fitting
        self._places = 0
        """Places that lookups may still enter in this step."""

    def offers(self, chunks: Sequence[ScheduledChunk], may_look_up: bool, may_draft: bool) -> list[Candidate]:
        """All that there are behind these decodes. Lookups enter their requests' new tokens."""
        self._places = AT_ONCE
        return [one for chunk in chunks if (one := self._offer(chunk, may_look_up, may_draft)) is not None]

    def _offer(self, chunk: ScheduledChunk, may_look_up: bool, may_draft: bool) -> Candidate | None:
        """What could be proposed behind a decode."""
        request = chunk.request
        proposing = request.proposing
        if proposing is None or chunk.end != len(request.tokens) or not request.num_output:
            return None
        most = min(proposing.most, request.max_len - len(request.tokens) - 1)
        if most < 1:
            return None
        share, widths, missing = acceptance_rate_of(proposing.shares, self._shares), proposing.tree.widths, 0
        if proposing.method == "ngram":
            if not may_look_up:
                return None
            self._places -= proposing.lookup.enter(request.tokens, self._places)
            lines = proposing.lookup.find(request.tokens, most, PLACES if widths else 1)
            counts = [self._num_fitting(request, tokens) for tokens, _ in lines]
            fitting = [(tokens[:count], agreed) for (tokens, agreed), count in zip(lines, counts, strict=True) if count]
            one = looked_up(share, most, (), fitting[:1])
            tree = looked_up(share, most, widths, fitting) if widths else one
        elif not may_draft:
            return None
        else:
            missing = num_missing(self._pool, chunk) if lags(chunk) else 0
            one = drafted(share, most, ())
            tree = drafted(share, most, widths) if widths else one
        return (
            Candidate(chunk=chunk, chain=one, tree=tree, is_drafted=proposing.method != "ngram", missing=missing)
            if tree.parents
            else None
        )

    def _num_fitting(self, request: Request, tokens: list[int]) -> int:
        """How many of these the request may draw. Unknown where the rank that draws is another, or does not know it yet."""
        if self._fitting is None or request.row is None or not request.sent:
            return len(tokens)
        return self._fitting(request.row, tokens, request.num_output)


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Of a step: its decodes, how many proposals it may hold, how many tokens drafts may catch up with, and whether what passes
    of a draft cost is known."""

    decodes: int
    proposals: int
    behind: int
    knows_passes: bool


def take_all(offered: Sequence[Candidate], room: DraftBudget) -> Selection:
    """All that is offered, as it may branch, in turns while there is room."""
    trees = [one.tree for one in offered]
    worth = [_worth(one, tree, None, room, knows_drafts=True) for one, tree in zip(offered, trees, strict=True)]
    return Selection(trees, choose_all(worth, room.proposals))


def choose(
    offered: Sequence[Candidate], costs: StepCosts | None, costs_of_trees: Callable[[], StepCosts | None], room: DraftBudget
) -> Selection:
    """Which of what each gets: of trees, where these promise more than chains. costs None: not known yet."""
    chains, trees = [one.chain for one in offered], [one.tree for one in offered]

    def best(found: Sequence[CandidateTree], costs: StepCosts | None) -> tuple[float, list[list[int]]]:
        worth = [_worth(one, of, costs, room, room.knows_passes) for one, of in zip(offered, found, strict=True)]
        choice = choose_draft_lengths(worth, costs, room.decodes, room.proposals)
        return choice.speed, choice.taken

    speed, taken = best(chains, costs)
    if costs is None or all(one.tree is one.chain for one in offered):
        return Selection(chains, taken)
    speed_of_trees, taken_of_trees = best(trees, costs_of_trees())
    return Selection(trees, taken_of_trees) if speed_of_trees > speed else Selection(chains, taken)


def _worth(
    one: Candidate, found: CandidateTree, costs: StepCosts | None, room: DraftBudget, knows_drafts: bool
) -> DraftCandidate:
    """What is offered, less what it costs to catch up; nothing where a draft cannot catch up in one step, nor, where it follows
    what pays, before a pass was measured: a probe does that."""
    request = one.chunk.request
    is_unknown = one.is_drafted and not knows_drafts
    chances: Sequence[float] = () if is_unknown or one.missing > max(0, room.behind) else found.chances
    if chances and one.missing:
        chances = with_catching_up(chances, costs, room.decodes, one.missing, request.max_len - len(request.tokens))
    behind_s = 0.0 if costs is None else one.missing * costs.behind_s
    return DraftCandidate(chances, one.is_drafted, found.levels if chances else (), behind_s)


def lags(chunk: ScheduledChunk) -> bool:
    """Whether a draft model drafts for the request, which computes no more than it is told."""
    return chunk.request.proposing is not None and chunk.request.proposing.method == "draft"


def looks_up(chunk: ScheduledChunk) -> bool:
    """Whether any step may bring something to propose for the request."""
    return chunk.request.proposing is not None and chunk.request.proposing.method == "ngram"
