"""Builds draft candidates for the decodes of a step, and selects the fastest (`draft_length`).

n-gram   tokens after earlier occurrences, up to the first that the request may not sample
draft    tokens of a draft model, with the backfill that it needs
"""

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_api.speculation import MAX_DEPTH
from phalanx_runtime.core.draft_tree import (
    ROOT,
    AcceptanceRates,
    RateByGrade,
    acceptance_rate_of,
    chain,
    draft_grade,
    ngram_grade,
)
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.ngram import MAX_INDEXED_PER_STEP, MAX_MATCHES
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.speculation.config import Fitting
from phalanx_runtime.core.speculation.draft_backfill import num_missing
from phalanx_runtime.core.speculation.draft_length import (
    DraftChances,
    StepCosts,
    choose_draft_lengths,
    choose_round_robin,
    deduct_backfill,
)
from phalanx_runtime.core.step_builder import ScheduledChunk


@dataclass(slots=True, kw_only=True)
class CandidateTree:
    """Draft tokens by descending chance, parents first: any first ones form a tree."""

    parents: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """Chances that the tokens are accepted with their branch."""
    tokens: list[int] = field(default_factory=list)
    """Empty if a model drafts them."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class _OpenNode:
    """A possible next node; the most probable is the smallest."""

    negated_chance: float
    number: int
    parent: int
    level: int
    rank: int
    parent_chance: float


def width_at(widths: Sequence[int], level: int) -> int:
    """Returns the maximum number of siblings at a level."""
    return widths[level] if level < len(widths) else 1


def drafted_candidate(rate_of: RateByGrade, count: int, widths: Sequence[int]) -> CandidateTree:
    """Returns the `count` most probable drafted tokens of all trees with these widths."""
    if not widths:
        return _drafted_chain(rate_of, count)
    tree, open_nodes, num_opened = CandidateTree(), list[_OpenNode](), 0

    def open_node(parent: int, level: int, rank: int, parent_chance: float, max_chance: float) -> None:
        nonlocal num_opened
        if level < MAX_DEPTH and rank < width_at(widths, level):
            node = _OpenNode(
                negated_chance=-min(max_chance, parent_chance * rate_of(draft_grade(level, rank))),
                number=num_opened,
                parent=parent,
                level=level,
                rank=rank,
                parent_chance=parent_chance,
            )
            heapq.heappush(open_nodes, node)
            num_opened += 1

    open_node(ROOT, 0, 0, 1.0, 1.0)
    while open_nodes and len(tree.parents) < count:
        best = heapq.heappop(open_nodes)
        chance = -best.negated_chance
        tree.parents.append(best.parent)
        tree.levels.append(best.level)
        tree.grades.append(draft_grade(best.level, best.rank))
        tree.chances.append(chance)
        open_node(len(tree.parents) - 1, best.level + 1, 0, chance, chance)
        open_node(best.parent, best.level, best.rank + 1, best.parent_chance, chance)
    return tree


def _drafted_chain(rate_of: RateByGrade, count: int) -> CandidateTree:
    grades = [draft_grade(level) for level in range(min(count, MAX_DEPTH))]
    chances = list(accumulate((min(1.0, rate_of(grade)) for grade in grades), operator.mul))
    return CandidateTree(parents=chain(len(grades)), levels=list(range(len(grades))), grades=grades, chances=chances)


def ngram_candidate(
    rate_of: RateByGrade, count: int, widths: Sequence[int], matches: Sequence[tuple[list[int], int]]
) -> CandidateTree:
    """Returns the `count` most probable tokens of `matches` (tokens, match length), merged by common prefix."""
    parents, levels, grades, tokens, chances = list[int](), list[int](), list[int](), list[int](), list[float]()
    children: dict[int, dict[int, int]] = {}
    for following, match_length in matches:
        node, chance = ROOT, 1.0
        for level, token in enumerate(following):
            siblings = children.setdefault(node, {})
            if token not in siblings:
                if len(siblings) >= width_at(widths, level):
                    break
                grade = ngram_grade(match_length + level, len(siblings))
                siblings[token] = len(parents)
                parents.append(node)
                levels.append(level)
                grades.append(grade)
                tokens.append(token)
                chances.append(chance * rate_of(grade))
            node = siblings[token]
            chance = chances[node]
    order = sorted(range(len(parents)), key=lambda node: (-chances[node], node))[:count]
    number_of = {ROOT: ROOT} | {node: number for number, node in enumerate(order)}
    return CandidateTree(
        parents=[number_of[parents[node]] for node in order],
        levels=[levels[node] for node in order],
        grades=[grades[node] for node in order],
        chances=[chances[node] for node in order],
        tokens=[tokens[node] for node in order],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Possible draft tokens of a decode."""

    chunk: ScheduledChunk
    chain: CandidateTree
    tree: CandidateTree
    """The chain, if the request has no tree."""
    is_drafted: bool
    num_missing: int = 0
    """Tokens to backfill first."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Per candidate, its chain or tree, and the selected nodes."""

    trees: list[CandidateTree]
    nodes: list[list[int]]


class CandidateBuilder:
    """Builds the candidates of one engine."""

    def __init__(self, pool: PagePool, engine_rates: AcceptanceRates, fitting: Fitting) -> None:
        self._pool = pool
        self._engine_rates = engine_rates
        self._fitting = fitting
        self._positions_left = 0

    def build(self, chunks: Sequence[ScheduledChunk], may_look_up: bool, may_draft: bool) -> list[Candidate]:
        """Returns the candidates of these decodes. Lookups index new tokens."""
        self._positions_left = MAX_INDEXED_PER_STEP
        candidates = []
        for chunk in chunks:
            request, method = chunk.request, chunk.request.speculation.method
            max_tokens = min(request.speculation.max_tokens, request.remaining_output - 1)
            if max_tokens < 1 or chunk.end != len(request.tokens) or not request.num_output:
                continue
            candidate = None
            if method == "ngram":
                candidate = self._look_up(chunk, max_tokens) if may_look_up else None
            elif method != "none" and may_draft:
                candidate = self._draft(chunk, max_tokens)
            if candidate is not None and candidate.tree.parents:
                candidates.append(candidate)
        return candidates

    def _look_up(self, chunk: ScheduledChunk, max_tokens: int) -> Candidate | None:
        request, speculation = chunk.request, chunk.request.speculation
        rate_of, widths = acceptance_rate_of(speculation.rates, self._engine_rates), speculation.tree.widths
        self._positions_left -= speculation.ngrams.extend(request.tokens, self._positions_left)
        matches = speculation.ngrams.find(request.tokens, max_tokens, MAX_MATCHES if widths else 1)
        counts = [self._num_fitting(request, tokens) for tokens, _ in matches]
        fitting = [(tokens[:count], length) for (tokens, length), count in zip(matches, counts, strict=True) if count]
        if not fitting:
            return None
        line = ngram_candidate(rate_of, max_tokens, (), fitting[:1])
        tree = ngram_candidate(rate_of, max_tokens, widths, fitting) if widths else line
        return Candidate(chunk=chunk, chain=line, tree=tree, is_drafted=False)

    def _draft(self, chunk: ScheduledChunk, max_tokens: int) -> Candidate:
        speculation = chunk.request.speculation
        rate_of, widths = acceptance_rate_of(speculation.rates, self._engine_rates), speculation.tree.widths
        missing = num_missing(self._pool, chunk) if needs_backfill(chunk) else 0
        line = drafted_candidate(rate_of, max_tokens, ())
        tree = drafted_candidate(rate_of, max_tokens, widths) if widths else line
        return Candidate(chunk=chunk, chain=line, tree=tree, is_drafted=True, num_missing=missing)

    def _num_fitting(self, request: Request, tokens: list[int]) -> int:
        """Returns how many of these tokens the request may sample; all if the ranks do not have it yet."""
        if request.row is None or not request.pages.num_sent:
            return len(tokens)
        return self._fitting(request.row, tokens, request.num_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBudget:
    """Limits of one step."""

    decodes: int
    draft_tokens: int
    backfill: int
    has_pass_time: bool


def select_all(candidates: Sequence[Candidate], budget: DraftBudget) -> Selection:
    """Selects from all trees in turns."""
    trees = [candidate.tree for candidate in candidates]
    chances = [
        _chances(candidate, tree, None, budget, allows_drafts=True) for candidate, tree in zip(candidates, trees, strict=True)
    ]
    return Selection(trees, choose_round_robin(chances, budget.draft_tokens))


def select_fastest(
    candidates: Sequence[Candidate],
    costs: StepCosts | None,
    costs_of_trees: Callable[[], StepCosts | None],
    budget: DraftBudget,
) -> Selection:
    """Selects the fastest draft tokens, from trees if these beat chains."""
    chains, trees = [candidate.chain for candidate in candidates], [candidate.tree for candidate in candidates]

    def choose(shapes: Sequence[CandidateTree], costs: StepCosts | None) -> tuple[float, list[list[int]]]:
        chances = [
            _chances(candidate, shape, costs, budget, budget.has_pass_time)
            for candidate, shape in zip(candidates, shapes, strict=True)
        ]
        choice = choose_draft_lengths(chances, costs, budget.decodes, budget.draft_tokens)
        return choice.speed, choice.selected

    speed, nodes = choose(chains, costs)
    if costs is None or all(candidate.tree is candidate.chain for candidate in candidates):
        return Selection(chains, nodes)
    tree_speed, tree_nodes = choose(trees, costs_of_trees())
    return Selection(trees, tree_nodes) if tree_speed > speed else Selection(chains, nodes)


def _chances(
    candidate: Candidate, tree: CandidateTree, costs: StepCosts | None, budget: DraftBudget, allows_drafts: bool
) -> DraftChances:
    """Returns the chances less the backfill; empty if that exceeds the budget, or for drafts that are not allowed."""
    request, missing = candidate.chunk.request, candidate.num_missing
    is_excluded = (candidate.is_drafted and not allows_drafts) or missing > max(0, budget.backfill)
    chances: Sequence[float] = () if is_excluded else tree.chances
    if chances and missing:
        chances = deduct_backfill(chances, costs, budget.decodes, missing, request.remaining_output)
    backfill_s = 0.0 if costs is None else missing * costs.backfill_token_s
    return DraftChances(chances, candidate.is_drafted, tree.levels if chances else (), backfill_s)


def needs_backfill(chunk: ScheduledChunk) -> bool:
    """Returns whether a draft model with its own KV drafts for the request."""
    return chunk.request.speculation.method == "draft"


def uses_ngrams(chunk: ScheduledChunk) -> bool:
    """Returns whether the request uses the n-gram proposer."""
    return chunk.request.speculation.method == "ngram"
