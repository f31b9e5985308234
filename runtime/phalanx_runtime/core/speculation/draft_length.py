"""Chooses draft lengths that maximise the expected tokens per second of a step.

    speed(selected) = (decodes + sum of chances of selected tokens) / (time of the step with them)

Tokens are added by descending chance while the speed rises, for every maximum depth. The time is convex in their number, so the
result is optimal for n-grams alone and for chains of drafts alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGIN = 1.03
"""Minimum expected speedup; times are estimates."""
DEFAULT_MIN_CHANCE = 0.4
"""Minimum chance before step times are known."""
PAYBACK_STEPS = 64
"""Steps within which a backfill must pay."""
_Ranked = tuple[float, int, int, int]
"""Chance, node and candidate of a draft token, and its draft passes."""


@dataclass(frozen=True, slots=True)
class DraftChances:
    """Chances that draft tokens are accepted with their branch, descending."""

    chances: Sequence[float]
    is_drafted: bool = False
    """Each level costs a draft pass."""
    levels: Sequence[int] = ()
    """Empty for a chain."""
    backfill_s: float = 0.0
    """Backfill before the first token. Counts towards the time limit; the chances include its cost."""

    def first_nodes(self, count: int, max_levels: int) -> list[int]:
        """Returns the first `count` nodes of these levels."""
        if not self.levels or not self.is_drafted:
            return list(range(count))
        return [node for node, level in enumerate(self.levels) if level < max_levels][:count]


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Selected nodes of each candidate, and the expected tokens per second, if known."""

    selected: list[list[int]]
    speed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Times of a step and its draft tokens."""

    plain_s: float
    """Time of a step without draft tokens."""
    extra_s: Callable[[int], float]
    """Verification of this many draft tokens."""
    pass_s: float = 0.0
    """A draft pass with one row."""
    limit_s: float = math.inf
    """Maximum time, from the ITL target."""
    backfill_token_s: float = 0.0
    draft_row_s: float = 0.0
    """Each further row of a draft pass."""


def choose_draft_lengths(candidates: Sequence[DraftChances], costs: StepCosts | None, decodes: int, room: int) -> DraftChoice:
    """Selects at most `room` draft tokens."""
    if costs is None:
        return _by_chance(candidates, room)
    best, counts, passes = MARGIN * decodes / costs.plain_s, [0] * len(candidates), 0
    max_tokens = decodes + sum(sum(candidate.chances) for candidate in candidates)
    ranked: list[_Ranked] = []
    for max_levels in range(_most_levels(candidates) + 1):
        if max_tokens / (costs.plain_s + max_levels * costs.pass_s) <= best:
            break  # not even with free verification
        ranked = ranked or _by_rank(candidates)
        speed, found = _fill(ranked, candidates, costs=costs, decodes=decodes, room=room, max_levels=max_levels)
        if speed > best:
            best, counts, passes = speed, found, max_levels
    selected = [candidate.first_nodes(count, passes) for candidate, count in zip(candidates, counts, strict=True)]
    return DraftChoice(selected, best)


def could_pay(costs: StepCosts, decodes: int, room: int) -> bool:
    """Returns whether n-gram tokens would pay if all were accepted."""
    required, count = MARGIN * decodes / costs.plain_s, 1
    while count < room:
        if (decodes + count) / (costs.plain_s + costs.extra_s(count)) > required:
            return True
        count *= 2
    return (decodes + room) / (costs.plain_s + costs.extra_s(room)) > required


def deduct_backfill(
    chances: Sequence[float], costs: StepCosts | None, decodes: int, num_missing: int, num_steps: int
) -> Sequence[float]:
    """Returns the chances less the tokens that plain steps produce during the backfill, spread over `num_steps`; empty if it does
    not pay."""
    if costs is None or not num_missing or not costs.backfill_token_s:
        return chances
    total = sum(chances)
    lost_tokens = num_missing * costs.backfill_token_s * decodes / (costs.plain_s * max(1, min(num_steps, PAYBACK_STEPS)))
    net = total - lost_tokens
    return [chance * net / total for chance in chances] if net > 0 else ()


def choose_round_robin(candidates: Sequence[DraftChances], room: int) -> list[list[int]]:
    """Selects `room` draft tokens of all candidates in turns."""
    counts = [0] * len(candidates)
    for node in range(max(len(candidate.chances) for candidate in candidates)):
        for i, candidate in enumerate(candidates):
            if node < len(candidate.chances) and room > 0:
                counts[i] += 1
                room -= 1
    return [list(range(count)) for count in counts]


def _most_levels(candidates: Sequence[DraftChances]) -> int:
    drafts = [candidate for candidate in candidates if candidate.is_drafted]
    return max((max(draft.levels, default=-1) + 1 if draft.levels else len(draft.chances) for draft in drafts), default=0)


def _fill(
    ranked: Sequence[_Ranked], candidates: Sequence[DraftChances], *, costs: StepCosts, decodes: int, room: int, max_levels: int
) -> tuple[float, list[int]]:
    """Returns the best speed with `max_levels` draft passes, and the tokens per candidate."""
    fixed_s = costs.plain_s + max_levels * costs.pass_s
    counts, tokens, total, backfill_s = [0] * len(candidates), float(decodes), 0, 0.0
    levels, num_rows, closed = [0] * len(candidates), 0, set[int]()
    speed = tokens / fixed_s
    for chance, _, i, passes in ranked:
        if passes > max_levels or i in closed:
            continue
        new_levels = max(0, passes - levels[i])
        seconds = fixed_s + costs.extra_s(total + 1) + max(0, num_rows + new_levels - max_levels) * costs.draft_row_s
        new_speed = (tokens + chance) / seconds
        if total >= room:
            break
        if new_speed <= speed or seconds + backfill_s > costs.limit_s:
            if passes and costs.draft_row_s:
                closed.add(i)  # selected tokens are a candidate's first ones
                continue  # n-gram tokens, which need no row, may pay
            break
        own_backfill_s = 0.0 if counts[i] else candidates[i].backfill_s
        if own_backfill_s and seconds + backfill_s + own_backfill_s > costs.limit_s:
            continue  # a shorter backfill may fit
        backfill_s += own_backfill_s
        counts[i] += 1
        levels[i], num_rows = levels[i] + new_levels, num_rows + new_levels
        tokens, speed, total = tokens + chance, new_speed, total + 1
    return speed, counts


def _by_chance(candidates: Sequence[DraftChances], room: int) -> DraftChoice:
    counts = [0] * len(candidates)
    max_levels = _most_levels(candidates)
    for chance, _, i, _ in _by_rank(candidates)[: max(room, 0)]:
        counts[i] += chance >= DEFAULT_MIN_CHANCE
    return DraftChoice([candidate.first_nodes(count, max_levels) for candidate, count in zip(candidates, counts, strict=True)])


def _by_rank(candidates: Sequence[DraftChances]) -> list[_Ranked]:
    found = [
        (chance, node, i, 1 + (candidate.levels[node] if candidate.levels else node) if candidate.is_drafted else 0)
        for i, candidate in enumerate(candidates)
        for node, chance in enumerate(candidate.chances)
    ]
    return sorted(found, key=lambda ranked: (-ranked[0], ranked[1], ranked[2]))
