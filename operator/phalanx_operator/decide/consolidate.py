"""Whether fewer groups would do: all that runs now, and the heaviest minute of such a load, on so many groups. The limits lie
below those that add a group, so that a steady load does not take away what it then adds.

    work    busy <= 0.9 * 0.75 * n
    pages   KV in use and wanted <= 0.70 of theirs (where more than 0.80 adds a group)
    steps   the step time of their streams <= 0.8 of the ITL target
    wait    predicted and present wait <= 0.8 of what the TTFT target leaves beside a request's own prompt
"""

import statistics

from phalanx_operator.decide.scaling.demand import (
    BUSY,
    ITL_SHARE_IN,
    KV_IN_OF_OUT,
    TTFT_SHARE,
    Ability,
    Load,
    Targets,
    busy_groups,
    own_ttft_s,
    wait_p95_s,
)
from phalanx_operator.decide.state.fleet import SeenGroup

BUSY_IN_OF_OUT = 0.9


def objection(n: int, load: Load, groups: list[SeenGroup], ability: Ability, targets: Targets) -> str | None:
    """Why n groups (at least 1) would not do for what `groups` do now; None when they would."""
    busy = busy_groups(load, ability, targets)
    if busy > BUSY_IN_OF_OUT * BUSY * n:
        return f"{busy:.2f} groups' worth of work is too much for {n}"
    pages = load.kv_tokens / max(n * ability.capacity, 1)
    if pages > KV_IN_OF_OUT * targets.kv:
        return f"{n} would have {pages:.0%} of their pages in use"
    if targets.itl_s is not None and groups:
        step_s = _step_s(n, groups, ability, load)
        if step_s > ITL_SHARE_IN * targets.itl_s:
            return f"steps of {n} would take {step_s * 1000:.0f} ms"
    if targets.ttft_s is not None:
        own_s = own_ttft_s(load, ability)
        allowed_s = TTFT_SHARE * (targets.ttft_s - own_s) if targets.ttft_s > own_s else own_s / 4
        wait_s = max(wait_p95_s(n, busy, load, ability), load.backlog_s / n)
        if wait_s > allowed_s:
            return f"requests would wait {wait_s:.1f} s at {n}"
    return None


def _step_s(n: int, groups: list[SeenGroup], ability: Ability, load: Load) -> float:
    """Step time of n groups that share the streams of these. What prompts add to a step now, they add in proportion."""
    share = len(groups) / n
    streams = statistics.fmean(group.running for group in groups)
    decodes_now_s = ability.step_s(0, streams, streams * load.context)
    prompts_now_s = max(statistics.median(group.itl_s for group in groups) - decodes_now_s, 0.0)
    return ability.step_s(0, streams * share, streams * share * load.context) + prompts_now_s * share
