"""Proposed tokens of a step, as they lie in its plan: read for the drawer, and filled in where a model drafted them."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from phalanx_runtime.core.plan import StepPlan

NO_TOKEN = -1
"""In the place of a proposal: there is none. It is computed as token 0, and equal to no drawn token."""


def num_drafted(plan: StepPlan) -> int:
    """How many proposals the ranks are to draft."""
    return sum(path.depth for path in plan.paths if path.is_drafted)


def filled(plan: StepPlan, drafted: Sequence[int]) -> StepPlan:
    """The plan with these tokens for its drafted paths, one path after the other."""
    ends = list(accumulate(plan.counts))
    tokens, at = list(plan.tokens), 0
    for path in plan.paths:
        if path.is_drafted:
            end = ends[path.request]
            tokens[end - path.depth : end] = drafted[at : at + path.depth]
            at += path.depth
    return msgspec.structs.replace(plan, tokens=tokens)


def drafted_tokens(plan: StepPlan) -> list[int]:
    """The tokens of the drafted paths, one path after the other: what `filled` put there."""
    ends = list(accumulate(plan.counts))
    parts = [plan.tokens[ends[path.request] - path.depth : ends[path.request]] for path in plan.paths if path.is_drafted]
    return [token for part in parts for token in part]


def proposals(plan: StepPlan) -> list[list[int]]:
    """What is proposed behind the first token of each draw; parallel to the plan's `draws`."""
    ends = list(accumulate(plan.counts))
    depths = plan.depths
    return [plan.tokens[ends[request] - depth : ends[request]] for (request, _), depth in zip(plan.draws, depths, strict=True)]
