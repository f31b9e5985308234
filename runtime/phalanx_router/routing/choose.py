"""Chooses the group for a request: the candidate with the least predicted cost (`routing.cost`), near-ties by chance.

    candidates   not draining, fresh or degraded; all of them by the dispatch ledger when more than half are stale; draining
                 groups last
    home         the candidate that holds most of the prompt: up to 0.1 s cheaper, unless it is overloaded and another
                 candidate is 20 % cheaper
    near-ties    within 5 % of the least cost: the home unless it is crowded, else two of them at random and of the two the
                 one with the earlier first token, then with fewer requests

Chance keeps several routers with the same load reports from choosing the same group. Groups that just failed or refused the
request are excluded.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_router.routing.cost import CostTerms, RequestDemand, cost_terms, ttft_weight
from phalanx_router.routing.view import GroupView, is_stale

NEAR_TIE = 1.05
HOME_BONUS_S = 0.1
HOME_BACKLOG, HOME_BACKLOG_S, HOME_COST = 1.25, 0.1, 0.8
HOME_CROWD, HOME_CROWD_REQUESTS = 1.25, 2

Reason = Literal["only", "least", "home", "tie", "ledger", "draining", "turn"]
"""Only candidate; least cost; holds most of the prompt; one of several near-ties; chosen by the dispatch ledger because reports
are stale; draining because no other group exists; next in round robin."""
_NO_HITS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen group and the terms of its cost."""

    key: str
    """Key of the group's view."""
    reason: Reason
    cost_s: float
    parts: CostTerms
    hit_tokens: int
    """Prompt tokens that the group's pages are expected to hold."""
    num_candidates: int

    @property
    def why(self) -> str:
        """Returns the reason and the cost as one sentence, for logs and traces."""
        first, decode, others, pages, _ = self.parts
        return (
            f"{self.reason} of {self.num_candidates}: {self.cost_s:.3f} s (first token {first:.3f}, decoding {decode:.3f}, "
            f"others {others:.3f}, pages {pages:.3f}), {self.hit_tokens} tokens cached"
        )


@dataclass(frozen=True, slots=True)
class NoChoice:
    """No group can take the request now, for the reason `why`."""

    why: str


def choose(
    groups: Sequence[GroupView],
    demand: RequestDemand,
    draw: float,
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
) -> Choice | NoChoice:
    """Chooses the group for a request. `draw`: uniform in [0, 1). `hits`: prompt tokens that each group holds, by key."""
    if not groups:
        return NoChoice("no group is ready")
    candidates, reason = _candidates(groups, excluded)
    if not candidates:
        return NoChoice(f"each of {len(groups)} ready groups failed or refused this request")
    wait = ttft_weight(demand, candidates, hits)
    parts = [cost_terms(view, demand, hits.get(view.key, 0), wait) for view in candidates]
    costs = [part.total_s for part in parts]
    home = _home(candidates, costs, hits)
    if home is not None:
        costs[home] -= min(HOME_BONUS_S, hits[candidates[home].key] * candidates[home].token_s)
    near = _near_equal(costs)
    place = home if home in near and not _is_crowded(candidates, home) else _pick(near, candidates, parts, draw)
    view = candidates[place]
    if reason is None:
        reason = "only" if len(candidates) == 1 else "home" if place == home else "tie" if len(near) > 1 else "least"
    return Choice(
        key=view.key,
        reason=reason,
        cost_s=costs[place],
        parts=parts[place],
        hit_tokens=hits.get(view.key, 0),
        num_candidates=len(candidates),
    )


def choose_round_robin(
    groups: Sequence[GroupView],
    demand: RequestDemand,
    last: Mapping[str, int],
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> Choice | NoChoice:
    """Returns the next group in round robin: the least recently chosen candidate that is not `closed`.

    `last`: sequence number of the last request sent to each group, by key.
    """
    candidates, _ = _candidates(groups, excluded)
    able = [view for view in candidates if view.key not in closed]
    if not able:
        return NoChoice("no group has room, or each failed or refused this request")
    view = min(able, key=lambda view: (last.get(view.key, 0), view.key))
    parts = cost_terms(view, demand, hits.get(view.key, 0))
    return Choice(
        key=view.key,
        reason="turn",
        cost_s=parts.total_s,
        parts=parts,
        hit_tokens=hits.get(view.key, 0),
        num_candidates=len(able),
    )


def _candidates(groups: Sequence[GroupView], excluded: Collection[str]) -> tuple[list[GroupView], Reason | None]:
    """Returns the groups that may be chosen, and the reason when it is fixed by how they were found."""
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
    """Returns the candidate that holds most of the prompt, unless it is overloaded and another is much cheaper."""
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
    """Returns the indices of the costs within 5 % of the least."""
    least = min(costs)
    bound = least * NEAR_TIE if least > 0 else least
    return [place for place, cost in enumerate(costs) if cost <= bound]


def _is_crowded(candidates: Sequence[GroupView], home: int) -> bool:
    """Returns whether the home has many more requests than average (bounded-load consistent hashing, Mirrokni et al. 2018)."""
    mean = sum(_requests(view) for view in candidates) / len(candidates)
    return _requests(candidates[home]) > HOME_CROWD * mean + HOME_CROWD_REQUESTS


def _requests(view: GroupView) -> int:
    return view.running + view.waiting


def _pick(near: Sequence[int], candidates: Sequence[GroupView], parts: Sequence[CostTerms], draw: float) -> int:
    """Picks two indices of `near` by `draw`; returns the one with the earlier first token, then with fewer requests."""
    count = len(near)
    if count == 1:
        return near[0]
    place, rest = divmod(draw * count, 1.0)
    one = near[int(place)]
    other = near[(int(place) + 1 + int(rest * (count - 1))) % count]

    def rank(place: int) -> tuple[float, int]:
        return parts[place].first_token_s * parts[place].factor, _requests(candidates[place])

    return other if rank(other) < rank(one) else one


# Canary share: the groups that a new request may use while two revisions serve (`rollout.canaryWeight`).


def canary_groups(
    revisions: Mapping[str, str],
    newest: str,
    percent: int,
    canary_draw: float,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> frozenset[str]:
    """Returns the keys of the groups that a request may use while `percent` of the requests belong to the revision `newest`.

    `revisions`: revision of each group that could take the request, by key. `canary_draw`: the request's draw, uniform in [0, 1).

    The draw selects the newest revision or the others. If every group of that side is `excluded` (failed or refused the
    request) or `closed` (accepts no more requests at present), the other side is used if it has a usable group: serving the
    request has priority over the share. If both sides are closed, the request waits for its own side.
    """
    new = frozenset(key for key, revision in revisions.items() if revision == newest)
    old = frozenset(revisions) - new
    first, second = (new, old) if canary_draw * 100 < percent else (old, new)
    for busy in ({*excluded, *closed}, excluded):
        for side in (first, second):
            if side.difference(busy):
                return side
    return frozenset(revisions)


# Round robin: the sequence number of the last request sent to each group.

MAX_GROUPS = 4096
"""Number of groups remembered. A forgotten group is next in turn."""


class RoundRobin:
    """Sequence numbers of the last request of each group, by key; `choose_round_robin` reads `last`."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self._count = 0

    def take(self, key: str) -> None:
        """Records that the group `key` received a request."""
        self._count += 1
        self.last.pop(key, None)
        self.last[key] = self._count  # re-inserted at the end: the first key is the least recent
        if len(self.last) > MAX_GROUPS:
            del self.last[next(iter(self.last))]
