"""Which group takes a request: of those that can, the one that it costs least (`route.cost`), near-equals told apart by chance.

    candidates   not draining, fresh or degraded; all of them by the ledger when more than half are stale; draining ones last
    home         the candidate that holds most of the prompt: up to 0.1 s cheaper, but never when it is overloaded and another
                 is a fifth cheaper
    near-equals  within 5 % of the least, which no cost model can tell apart: the home, unless it is crowded, else two of them by
                 the draw, the one of the two with the earlier first token, else with fewer requests

So several routers that see the same reports do not all pick the same group. Where groups take turns (`in_turn`), the cost is
not asked. Groups that just failed or refused this request are left out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_router.routing.cost import Newcomer, Terms, terms, wait_of
from phalanx_router.routing.view import GroupView, is_stale

NEAR = 1.05
HOME_S = 0.1
HOME_BACKLOG, HOME_BACKLOG_S, HOME_COST = 1.25, 0.1, 0.8
HOME_CROWD, HOME_CROWD_REQUESTS = 1.25, 2

Reason = Literal["only", "least", "home", "tie", "ledger", "draining", "turn"]
"""The only candidate; the cheapest; the one that holds most of the prompt; one of several near-equals; chosen without reports;
one that drains, since there is no other; the one whose turn it is."""
_NO_HITS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Choice:
    """The group with this key. `hit_tokens`: of the prompt, what its pages are thought to hold."""

    key: str
    reason: Reason
    cost_s: float
    parts: Terms
    hit_tokens: int
    num_candidates: int

    @property
    def why(self) -> str:
        """One sentence."""
        first, decode, others, pages, _ = self.parts
        return (
            f"{self.reason} of {self.num_candidates}: {self.cost_s:.3f} s (first token {first:.3f}, decoding {decode:.3f}, "
            f"others {others:.3f}, pages {pages:.3f}), {self.hit_tokens} tokens cached"
        )


@dataclass(frozen=True, slots=True)
class NoChoice:
    """No group can take the request now, and why."""

    why: str


def choose(
    groups: Sequence[GroupView],
    newcomer: Newcomer,
    draw: float,
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
) -> Choice | NoChoice:
    """The group for a request. `draw` is uniform in [0, 1); `hits`: tokens of the prompt that groups hold, by key."""
    if not groups:
        return NoChoice("no group is ready")
    candidates, reason = _candidates(groups, excluded)
    if not candidates:
        return NoChoice(f"each of {len(groups)} ready groups failed or refused this request")
    wait = wait_of(newcomer, candidates, hits)
    parts = [terms(view, newcomer, hits.get(view.key, 0), wait) for view in candidates]
    costs = [part.total_s for part in parts]
    home = _home(candidates, costs, hits)
    if home is not None:
        costs[home] -= min(HOME_S, hits[candidates[home].key] * candidates[home].token_s)
    near = _near_equal(costs)
    place = home if home in near and not _is_crowded(candidates, home) else _pick(near, candidates, parts, draw)
    view = candidates[place]
    if reason is None:
        reason = "only" if len(candidates) == 1 else "home" if place == home else "tie" if len(near) > 1 else "least"
    return Choice(view.key, reason, costs[place], parts[place], hits.get(view.key, 0), len(candidates))


def in_turn(
    groups: Sequence[GroupView],
    newcomer: Newcomer,
    last: Mapping[str, int],
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> Choice | NoChoice:
    """The group whose turn it is: of those that can take the request and are not `closed`, the one that got none for longest.

    last: a number for each group that got one, by key; it rises with each request that goes to any.
    """
    candidates, _ = _candidates(groups, excluded)
    able = [view for view in candidates if view.key not in closed]
    if not able:
        return NoChoice("no group has room, or each failed or refused this request")
    view = min(able, key=lambda view: (last.get(view.key, 0), view.key))
    parts = terms(view, newcomer, hits.get(view.key, 0))
    return Choice(view.key, "turn", parts.total_s, parts, hits.get(view.key, 0), len(able))


def _candidates(groups: Sequence[GroupView], excluded: Collection[str]) -> tuple[list[GroupView], Reason | None]:
    """Who may be chosen, and why if that is not the usual reason."""
    staying = [view for view in groups if not view.draining]
    is_blind = sum(is_stale(view.state) for view in staying) * 2 > len(staying)
    left = [view for view in staying if view.key not in excluded]
    usable = [view for view in left if not is_stale(view.state)]
    if is_blind and left:
        return left, "ledger"
    if usable:
        return usable, None
    if left:
        return left, "ledger"
    return [view for view in groups if view.draining and view.key not in excluded], "draining"


def _home(candidates: Sequence[GroupView], costs: Sequence[float], hits: Mapping[str, int]) -> int | None:
    """The candidate that holds most of the prompt, unless it is overloaded and another is much cheaper."""
    if not hits:
        return None
    held = [hits.get(view.key, 0) for view in candidates]
    most = max(held)
    if not most:
        return None
    home = held.index(most)
    mean_s = sum(view.backlog_s for view in candidates) / len(candidates)
    is_overloaded = candidates[home].backlog_s > HOME_BACKLOG * mean_s + HOME_BACKLOG_S
    return None if is_overloaded and min(costs) < HOME_COST * costs[home] else home


def _near_equal(costs: Sequence[float]) -> list[int]:
    """Those near the least."""
    least = min(costs)
    bound = least * NEAR if least > 0 else least
    return [place for place, cost in enumerate(costs) if cost <= bound]


def _is_crowded(candidates: Sequence[GroupView], home: int) -> bool:
    """Whether many more requests are there than elsewhere (consistent hashing with bounded loads, Mirrokni et al. 2018)."""
    mean = sum(_requests(view) for view in candidates) / len(candidates)
    return _requests(candidates[home]) > HOME_CROWD * mean + HOME_CROWD_REQUESTS


def _requests(view: GroupView) -> int:
    return view.running + view.waiting


def _pick(near: Sequence[int], candidates: Sequence[GroupView], parts: Sequence[Terms], draw: float) -> int:
    """The one of two of these, which the draw picks, with the earlier first token, else with fewer requests, else the first."""
    count = len(near)
    if count == 1:
        return near[0]
    place, rest = divmod(draw * count, 1.0)
    one = near[int(place)]
    other = near[(int(place) + 1 + int(rest * (count - 1))) % count]

    def rank(place: int) -> tuple[float, int]:
        return parts[place].first_token_s * parts[place].factor, _requests(candidates[place])

    return other if rank(other) < rank(one) else one


# Which groups a new request may go to while two revisions serve and the newest has a share: `rollout.canaryWeight`.


def share(
    revisions: Mapping[str, str],
    newest: str,
    percent: int,
    lot: float,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> frozenset[str]:
    """The groups that a request may go to, by key.

    `revisions`: of all groups that could take it. `lot`: its own, uniform in [0, 1).

    Those of the side that its lot falls on, unless all of them are `excluded` (they failed or refused it) or `closed` (nothing
    more is sent there just now), or there are none: then those of the other side, if one of them can take it. To be answered
    goes before the share. Where all are closed, it waits for its own side.
    """
    new = frozenset(key for key, revision in revisions.items() if revision == newest)
    old = frozenset(revisions) - new
    first, second = (new, old) if lot * 100 < percent else (old, new)
    for busy in ({*excluded, *closed}, excluded):
        for side in (first, second):
            if side.difference(busy):
                return side
    return frozenset(revisions)


# Whose turn it is where groups are taken one after another: the number of the last request that went to each.

MOST = 4096
"""Groups that are remembered. One that is forgotten is next."""


class Turns:
    """By the groups' keys. `last` is read by `choose.in_turn`."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self._count = 0

    def take(self, key: str) -> None:
        """Notes that this group got a request."""
        self._count += 1
        self.last.pop(key, None)
        self.last[key] = self._count  # the last one stands last
        if len(self.last) > MOST:
            del self.last[next(iter(self.last))]
