"""How many proposals each request of a step gets: as many as make the batch faster, in expected tokens per second.

    speed(depths) = (decodes + sum of chances of the proposals taken) / (time of the step with them)

A proposal's chance is that it is accepted with all before it, so in a path chances only fall. Proposals are taken in the order of
their chances while each makes the step faster; the time is convex in their number, so the best set is found. A draft costs a pass
for each position, whoever takes part: every greatest depth is tried. What gains less than `MARGIN` is left: times are estimates.
Where a target bounds the time between tokens, no step passes it for its proposals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGIN = 1.03
"""By how much a step must promise to be faster."""
BELIEVED_CHANCE = 0.4
"""Before steps were measured: a chance that is thought to pay."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The chances of one request's proposals, which only fall. `is_drafted`: each position costs a pass of the draft."""

    chances: Sequence[float]
    is_drafted: bool = False


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds: of the step without proposals, with so many of them beside it, of a pass of the draft, and those it may take."""

    plain_s: float
    extra_s: Callable[[int], float]
    pass_s: float = 0.0
    limit_s: float = math.inf


def choose_depths(offers: Sequence[Offer], costs: StepCosts | None, decodes: int, room: int) -> list[int]:
    """How many proposals each offer gets, at most `room` in all, in a step of so many decodes. costs None: not known yet."""
    if costs is None:
        return _by_chance(offers, room)
    best, depths = MARGIN * decodes / costs.plain_s, [0] * len(offers)
    drafted = max((len(offer.chances) for offer in offers if offer.is_drafted), default=0)
    for longest in range(drafted + 1):
        speed, found = _within(offers, costs, decodes, room, longest)
        if speed > best:
            best, depths = speed, found
    return depths


def _within(offers: Sequence[Offer], costs: StepCosts, decodes: int, room: int, longest: int) -> tuple[float, list[int]]:
    """The best speed when drafts have at most `longest` passes, all of them paid, and its depths."""
    fixed_s = costs.plain_s + longest * costs.pass_s
    depths, tokens, count = [0] * len(offers), float(decodes), 0
    speed = tokens / fixed_s
    for chance, _, at in _in_order(offers, longest):
        seconds = fixed_s + costs.extra_s(count + 1)
        more = (tokens + chance) / seconds
        if count >= room or more <= speed or seconds > costs.limit_s:
            break
        depths[at] += 1
        tokens, speed, count = tokens + chance, more, count + 1
    return speed, depths


def _by_chance(offers: Sequence[Offer], room: int) -> list[int]:
    depths = [0] * len(offers)
    for chance, _, at in _in_order(offers, max((len(offer.chances) for offer in offers), default=0))[: max(room, 0)]:
        depths[at] += chance >= BELIEVED_CHANCE
    return depths


def _in_order(offers: Sequence[Offer], longest: int) -> list[tuple[float, int, int]]:
    """Chance, position and offer of each proposal, the likeliest first; of equal ones those of lower positions."""
    found = [
        (chance, position, at)
        for at, offer in enumerate(offers)
        for position, chance in enumerate(offer.chances[:longest] if offer.is_drafted else offer.chances)
    ]
    return sorted(found, key=lambda one: (-one[0], one[1], one[2]))
