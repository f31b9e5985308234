"""Tokens that a step plan leaves open, and ranks fill: draft tokens, and those that the previous plan sampled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from phalanx_runtime.core.draft_tree import chain, is_chain
from phalanx_runtime.core.step_plan import LAST_SAMPLED, DraftPath, StepPlan, StepResult

NO_TOKEN = -1
"""A missing draft token: computed as token 0, equal to no sampled token."""


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Fields of a StepResult about drafting."""

    draft_s: float = 0.0
    shapes: list[list[int]] = field(default_factory=list)
    undrafted: list[tuple[int, list[int]]] = field(default_factory=list)


class DraftedPath(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens of one path."""

    tokens: list[int]
    parents: list[int] = []
    """Shape, if the proposer chose it."""


def num_drafted(plan: StepPlan) -> int:
    """Number of draft tokens for the proposer."""
    return sum(path.depth for path in plan.paths if path.is_drafted)


def empty_paths(plan: StepPlan) -> list[DraftedPath]:
    """Drafted paths without tokens."""
    return [DraftedPath([NO_TOKEN] * path.depth) for path in plan.paths if path.is_drafted]


def fill_paths(plan: StepPlan, drafted: Sequence[DraftedPath]) -> StepPlan:
    """Returns the plan with these draft tokens."""
    ends = list(accumulate(plan.counts))
    tokens, paths, remaining = list(plan.tokens), list(plan.paths), iter(drafted)
    for index, path in enumerate(plan.paths):
        if path.is_drafted:
            end, filled = ends[path.request], next(remaining)
            tokens[end - path.depth : end] = filled.tokens
            if path.tree_bounds is not None:
                paths[index] = msgspec.structs.replace(path, parents=[] if is_chain(filled.parents) else filled.parents)
    return msgspec.structs.replace(plan, tokens=tokens, paths=paths)


def encode_paths(plan: StepPlan) -> list[int]:
    """Tokens and parents of all drafted paths, for the next stage."""
    numbers: list[int] = []
    for path, tokens in _drafted_paths(plan):
        numbers += tokens + (path.parents or chain(path.depth))
    return numbers


def fill_encoded_paths(plan: StepPlan, numbers: Sequence[int]) -> StepPlan:
    """Inverse of `encode_paths`."""
    drafted, start = [], 0
    for path, _ in _drafted_paths(plan):
        middle, end = start + path.depth, start + 2 * path.depth
        drafted.append(DraftedPath(list(numbers[start:middle]), list(numbers[middle:end])))
        start = end
    return fill_paths(plan, drafted)


def chosen_shapes(plan: StepPlan) -> list[list[int]]:
    """Parents of paths with a shape from the proposer."""
    return [path.parents or chain(path.depth) for path in plan.paths if path.tree_bounds is not None]


def undrafted(plan: StepPlan) -> list[tuple[int, list[int]]]:
    """(drafted path, nodes without a token), where tokens are missing."""
    missing = [[node for node, token in enumerate(tokens) if token == NO_TOKEN] for _, tokens in _drafted_paths(plan)]
    return [(index, nodes) for index, nodes in enumerate(missing) if nodes]


def paths_of_draws(plan: StepPlan) -> list[DraftedPath]:
    """Draft tokens of each draw, parallel to `plan.draws`."""
    ends = list(accumulate(plan.counts))
    path_of = {path.request: path for path in plan.paths}
    paths = []
    for request, _ in plan.draws:
        path = path_of.get(request)
        tokens = [] if path is None else plan.tokens[ends[request] - path.depth : ends[request]]
        paths.append(DraftedPath(tokens, [] if path is None else path.parents))
    return paths


def _drafted_paths(plan: StepPlan) -> Iterator[tuple[DraftPath, list[int]]]:
    ends = list(accumulate(plan.counts))
    for path in plan.paths:
        if path.is_drafted:
            yield path, plan.tokens[ends[path.request] - path.depth : ends[path.request]]


class LastSampled:
    """The tokens of the latest step, for `LAST_SAMPLED` tokens of the next plan. For rank 0 if it samples."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._result: Callable[[], StepResult] | None = None

    def record(self, plan: StepPlan, result: Callable[[], StepResult]) -> None:
        """Sets the latest step. `result`: waits for it."""
        self._plan, self._result = plan, result

    def fill(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with tokens for `LAST_SAMPLED`, for which it waits for the latest step.

        Raises KeyError for a row without a draw in that step.
        """
        if LAST_SAMPLED not in plan.tokens:
            return plan
        latest, tokens = self._by_row(), list(plan.tokens)
        for row, end in zip(plan.rows, accumulate(plan.counts), strict=True):
            if tokens[end - 1] == LAST_SAMPLED:
                tokens[end - 1] = latest[row]
        return msgspec.structs.replace(plan, tokens=tokens)

    def _by_row(self) -> dict[int, int]:
        if self._plan is None or self._result is None:
            return {}
        plan, result = self._plan, self._result()
        ends = accumulate(result.run_lengths or [1] * len(plan.draws))
        return {plan.rows[request]: result.tokens[end - 1] for (request, _), end in zip(plan.draws, ends, strict=True)}
