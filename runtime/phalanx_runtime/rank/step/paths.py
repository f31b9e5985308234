"""Proposed tokens of a step, as they lie in its plan: read for the drawer, and filled in where a model drafted them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from phalanx_runtime.core.draft_tree import chain, is_chain
from phalanx_runtime.core.step_plan import Path, StepPlan

NO_TOKEN = -1
"""In the place of a proposal: there is none. It is computed as token 0, and equal to no drawn token."""


class DraftedPath(msgspec.Struct, frozen=True, array_like=True):
    """The proposals of one drafted path, `Path.depth` of them; their parents, where their shape was to be chosen."""

    tokens: list[int]
    parents: list[int] = []


def num_drafted(plan: StepPlan) -> int:
    """How many proposals the ranks are to draft."""
    return sum(path.depth for path in plan.paths if path.is_drafted)


def nothing(plan: StepPlan) -> list[DraftedPath]:
    """That there is none, for each proposal that is to be drafted."""
    return [DraftedPath([NO_TOKEN] * path.depth) for path in plan.paths if path.is_drafted]


def filled(plan: StepPlan, drafted: Sequence[DraftedPath]) -> StepPlan:
    """The plan with these for its drafted paths, in their order."""
    ends = list(accumulate(plan.counts))
    tokens, paths, left = list(plan.tokens), list(plan.paths), iter(drafted)
    for at, path in enumerate(plan.paths):
        if path.is_drafted:
            end, one = ends[path.request], next(left)
            tokens[end - path.depth : end] = one.tokens
            if path.growth is not None:
                paths[at] = msgspec.structs.replace(path, parents=[] if is_chain(one.parents) else one.parents)
    return msgspec.structs.replace(plan, tokens=tokens, paths=paths)


def drafted_numbers(plan: StepPlan) -> list[int]:
    """Tokens and parents of all drafted paths, one after the other: what `filled` put there, for the next stage."""
    numbers: list[int] = []
    for path, tokens in _drafted(plan):
        numbers += tokens + (path.parents or chain(path.depth))
    return numbers


def filled_by_numbers(plan: StepPlan, numbers: Sequence[int]) -> StepPlan:
    """The plan as it was where `drafted_numbers` gave these."""
    drafted, at = [], 0
    for path, _ in _drafted(plan):
        middle, end = at + path.depth, at + 2 * path.depth
        drafted.append(DraftedPath(list(numbers[at:middle]), list(numbers[middle:end])))
        at = end
    return filled(plan, drafted)


def grown_shapes(plan: StepPlan) -> list[list[int]]:
    """The parents of the paths whose shape the proposer chose."""
    return [path.parents or chain(path.depth) for path in plan.paths if path.growth is not None]


def undrafted(plan: StepPlan) -> list[tuple[int, list[int]]]:
    """Proposals without a token, by the number of their path among the drafted ones; of paths that have any."""
    found = [[node for node, token in enumerate(tokens) if token == NO_TOKEN] for _, tokens in _drafted(plan)]
    return [(at, nodes) for at, nodes in enumerate(found) if nodes]


def proposals(plan: StepPlan) -> list[DraftedPath]:
    """What is proposed behind the first token of each draw; parallel to the plan's `draws`."""
    ends = list(accumulate(plan.counts))
    path_of = {path.request: path for path in plan.paths}
    found = []
    for request, _ in plan.draws:
        path = path_of.get(request)
        tokens = [] if path is None else plan.tokens[ends[request] - path.depth : ends[request]]
        found.append(DraftedPath(tokens, [] if path is None else path.parents))
    return found


def _drafted(plan: StepPlan) -> Iterator[tuple[Path, list[int]]]:
    ends = list(accumulate(plan.counts))
    for path in plan.paths:
        if path.is_drafted:
            yield path, plan.tokens[ends[path.request] - path.depth : ends[path.request]]
