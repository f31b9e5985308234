"""How many proposals each request of a step gets: as many as make the batch faster, in expected tokens per second.

    speed(taken) = (decodes + sum of chances of the proposals taken) / (time of the step with them)

A proposal's chance is that it is accepted with its branch, so along a branch chances only fall. Proposals are taken in the order
of their chances while each makes the step faster; the time is convex in their number, so of lookups alone or of chains of
drafts alone the best set is found. A draft costs a pass for each level, whoever takes part, and a row of it for each further
request at that level: every greatest depth is tried. What gains less than `MARGIN` is left: times are guesses.
Where a target bounds the time between tokens, `choose_draft_lengths` makes no step that is expected to pass it for its proposals:
not before costs are known, and `choose_all` looks at none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGIN = 1.03
"""By how much a step must promise to be faster."""
BELIEVED_CHANCE = 0.4
"""Before steps were measured: a chance that is thought to pay."""
PAYBACK = 64
"""Steps within which what a draft catches up with has to pay, or a request's last ones."""
_Ranked = tuple[float, int, int, int]
"""Chance, position and offer of a proposal, and the passes of a draft that it takes."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """The chances of one request's proposals, which only fall. `is_drafted`: each level costs a pass of the draft.

    levels: of each how many it has before it in its branch; empty for a chain. behind_s: seconds that the draft catches up
    for before the first of them. A target counts them, speed does not: the chances are less for them already.
    """

    chances: Sequence[float]
    is_drafted: bool = False
    levels: Sequence[int] = ()
    behind_s: float = 0.0

    def taken(self, count: int, longest: int) -> list[int]:
        """The first so many of those with so many levels."""
        if not self.levels or not self.is_drafted:
            return list(range(count))
        return [at for at, level in enumerate(self.levels) if level < longest][:count]


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Which proposals each offer gets, and what is expected of them: tokens per second; 0 where nothing was expected."""

    taken: list[list[int]]
    speed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds: of the step without proposals, with so many of them beside it, of a pass of the draft with one row, those it may
    take, of a token that a draft catches up with, and of each further row of a pass."""

    plain_s: float
    extra_s: Callable[[int], float]
    pass_s: float = 0.0
    limit_s: float = math.inf
    behind_s: float = 0.0
    draft_row_s: float = 0.0


def choose_draft_lengths(offers: Sequence[DraftCandidate], costs: StepCosts | None, decodes: int, room: int) -> DraftChoice:
    """What each offer gets, at most `room` proposals in all, in a step of so many decodes. costs None: not known yet."""
    if costs is None:
        return _by_chance(offers, room)
    best, counts, passes = MARGIN * decodes / costs.plain_s, [0] * len(offers), 0
    most = decodes + sum(sum(offer.chances) for offer in offers)
    ordered: list[_Ranked] = []
    for longest in range(_most_levels(offers) + 1):
        if most / (costs.plain_s + longest * costs.pass_s) <= best:
            break  # not even if all cost nothing: so under load
        ordered = ordered or _in_order(offers)
        speed, found = _within(ordered, offers, costs=costs, decodes=decodes, room=room, longest=longest)
        if speed > best:
            best, counts, passes = speed, found, longest
    return DraftChoice([offer.taken(count, passes) for offer, count in zip(offers, counts, strict=True)], best)


def could_pay(costs: StepCosts, decodes: int, room: int) -> bool:
    """Whether proposals that need no draft would pay, if all were accepted."""
    least, count = MARGIN * decodes / costs.plain_s, 1
    while count < room:
        if (decodes + count) / (costs.plain_s + costs.extra_s(count)) > least:
            return True
        count *= 2
    return (decodes + room) / (costs.plain_s + costs.extra_s(room)) > least


def with_catching_up(
    chances: Sequence[float], costs: StepCosts | None, decodes: int, missing: int, steps: int
) -> Sequence[float]:
    """What these chances of a draft are worth when it has to catch up with so many tokens first, for so many steps of use; none
    when that costs more than they bring. The time counts as the tokens that plain steps bring in it."""
    if costs is None or not missing or not costs.behind_s:
        return chances
    worth = sum(chances)
    left = worth - missing * costs.behind_s * decodes / (costs.plain_s * max(1, min(steps, PAYBACK)))
    return [chance * left / worth for chance in chances] if left > 0 else ()


def choose_all(offers: Sequence[DraftCandidate], room: int) -> list[list[int]]:
    """All that is offered, in turns while there is room."""
    counts = [0] * len(offers)
    for position in range(max(len(offer.chances) for offer in offers)):
        for at, offer in enumerate(offers):
            if position < len(offer.chances) and room > 0:
                counts[at] += 1
                room -= 1
    return [list(range(count)) for count in counts]


def _most_levels(offers: Sequence[DraftCandidate]) -> int:
    """How many levels the deepest draft has."""
    drafts = [offer for offer in offers if offer.is_drafted]
    return max((max(offer.levels, default=-1) + 1 if offer.levels else len(offer.chances) for offer in drafts), default=0)


def _within(
    ordered: Sequence[_Ranked], offers: Sequence[DraftCandidate], costs: StepCosts, decodes: int, room: int, longest: int
) -> tuple[float, list[int]]:
    """The best speed when drafts have at most `longest` passes, all of them paid, and its depths."""
    fixed_s = costs.plain_s + longest * costs.pass_s
    depths, tokens, count, behind_s = [0] * len(offers), float(decodes), 0, 0.0
    levels, rows, ended = [0] * len(offers), 0, set[int]()
    speed = tokens / fixed_s
    for chance, _, at, passes in ordered:
        if passes > longest or at in ended:
            continue
        deeper = max(0, passes - levels[at])
        seconds = fixed_s + costs.extra_s(count + 1) + max(0, rows + deeper - longest) * costs.draft_row_s
        more = (tokens + chance) / seconds
        if count >= room:
            break
        if more <= speed or seconds + behind_s > costs.limit_s:
            if passes and costs.draft_row_s:
                ended.add(at)  # what an offer gets are its first proposals
                continue  # one that is looked up has no row
            break
        own_s = 0.0 if depths[at] else offers[at].behind_s
        if own_s and seconds + behind_s + own_s > costs.limit_s:
            continue  # who lacks less may still find room
        behind_s += own_s
        depths[at] += 1
        levels[at], rows = levels[at] + deeper, rows + deeper
        tokens, speed, count = tokens + chance, more, count + 1
    return speed, depths


def _by_chance(offers: Sequence[DraftCandidate], room: int) -> DraftChoice:
    counts = [0] * len(offers)
    longest = _most_levels(offers)
    for chance, _, at, _ in _in_order(offers)[: max(room, 0)]:
        counts[at] += chance >= BELIEVED_CHANCE
    return DraftChoice([offer.taken(count, longest) for offer, count in zip(offers, counts, strict=True)])


def _in_order(offers: Sequence[DraftCandidate]) -> list[_Ranked]:
    """All proposals, the likeliest first; of equal ones those of lower positions."""
    found = [
        (chance, position, at, 1 + (offer.levels[position] if offer.levels else position) if offer.is_drafted else 0)
        for at, offer in enumerate(offers)
        for position, chance in enumerate(offer.chances)
    ]
    return sorted(found, key=lambda one: (-one[0], one[1], one[2]))
