"""How many tokens a step computes: decodes first, and prompts get what is left.

    no target, or nothing decodes, or no times known yet     max_num_batched_tokens - decodes
    else                                                     as many as keep the step within the target, and at least a few

With several plans in flight a stream waits for all of them between its tokens: each gets its part of the target, one without
decodes too while others have some.

The few: what makes the step a quarter longer than the decodes alone, beside what any prompt tokens cost, so that prompts progress
where the target cannot hold.
Nobody waits for a timer: a step starts with what is there.
"""

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits

LEAST_STRETCH = 1.25
LEAST_TOKENS = 8


def prefill_tokens(
    limits: Limits,
    model: StepModel | None,
    decodes: int,
    context_tokens: int,
    elsewhere: int = 0,
    draft_s: float = 0.0,
    proposals: int = 0,
) -> int:
    """How many prompt tokens may join this many decodes, whose contexts sum to `context_tokens`.

    elsewhere: decodes in other plans in flight. draft_s: what drafts of this step take before it. proposals: so many of `decodes`
    are such: they stretch no step beyond the target.
    """
    room = limits.max_num_batched_tokens - decodes
    if limits.itl_target_s is None or model is None or not decodes + elsewhere:
        return room
    alone_s = model.predict(StepWork(0, decodes - proposals, context_tokens))
    limit_s = max(limits.itl_target_s / limits.plans_in_flight - draft_s, LEAST_STRETCH * alone_s + model.prompt_s)
    return min(room, max(LEAST_TOKENS, model.prefill_within(limit_s, decodes, context_tokens)))


def prompt_share(limits: Limits, budget: int, missing: int, others: int) -> int:
    """How many of a step's prompt tokens a request may take that misses so many, while `others` have some to compute too.

    A prompt longer than the step leaves half of it to the others; the caller gives back to it what they do not need.
    """
    if limits.long_prefill_tokens:
        return min(budget, limits.long_prefill_tokens)
    return -(-budget // 2) if others > 0 and missing > budget else budget


def decode_share(limits: Limits, decodes: int) -> int:
    """How many of all decoding requests go into one plan, so that each of the plans in flight gets its part."""
    return -(-decodes // limits.plans_in_flight)
