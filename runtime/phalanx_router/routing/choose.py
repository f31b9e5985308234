"""Chooses the group for a request: the candidate with the least predicted cost (`routing.cost`).

    candidates   fresh or degraded groups; all, by the dispatch ledger, if more than half are stale; draining ones last
    home         most of the prompt cached: up to 0.1 s cheaper, unless it is overloaded and another candidate is 20 % cheaper
    near-ties    within 5 % of the least cost: the home unless it is crowded, else the better of two at random

Randomness keeps several routers with the same load reports from choosing the same group.
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
"""Only candidate; least cost; home; a near-tie; by the dispatch ledger; no group stays; next in round robin."""
_NO_HITS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen group and the terms of its cost."""

    key: str
    reason: Reason
    cost_s: float
    terms: CostTerms
    hit_tokens: int  # cached prompt tokens
    num_candidates: int

    @property
    def why(self) -> str:
        """Reason and cost as one sentence."""
        first, decode, others, pages, _ = self.terms
        return (
            f"{self.reason} of {self.num_candidates}: {self.cost_s:.3f} s (first token {first:.3f}, decoding {decode:.3f}, "
            f"others {others:.3f}, pages {pages:.3f}), {self.hit_tokens} tokens cached"
        )


@dataclass(frozen=True, slots=True)
class NoChoice:
    """No group can take the request now."""

    why: str


def choose(
    groups: Sequence[GroupView],
    demand: RequestDemand,
    draw: float,
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
) -> Choice | NoChoice:
    """Chooses a group. `draw`: uniform in [0, 1). `hits`: cached prompt tokens, by group key."""
    if not groups:
        return NoChoice("no group is ready")
    candidates, reason = _candidates(groups, excluded)
    if not candidates:
        return NoChoice(f"each of {len(groups)} ready groups failed or refused this request")
    weight = ttft_weight(demand, candidates, hits)
    terms = [cost_terms(view, demand, hits.get(view.key, 0), weight) for view in candidates]
    costs = [term.total_s for term in terms]
    home = _home(candidates, costs, hits)
    if home is not None:
        costs[home] -= min(HOME_BONUS_S, hits[candidates[home].key] * candidates[home].token_s)
    near = _near_equal(costs)
    best = home if home in near and not _is_crowded(candidates, home) else _pick(near, candidates, terms, draw)
    view = candidates[best]
    if reason is None:
        reason = "only" if len(candidates) == 1 else "home" if best == home else "tie" if len(near) > 1 else "least"
    return Choice(
        key=view.key,
        reason=reason,
        cost_s=costs[best],
        terms=terms[best],
        hit_tokens=hits.get(view.key, 0),
        num_candidates=len(candidates),
    )


def choose_round_robin(
    groups: Sequence[GroupView],
    demand: RequestDemand,
    last_turns: Mapping[str, int],
    *,
    hits: Mapping[str, int] = _NO_HITS,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> Choice | NoChoice:
    """Chooses the least recently used candidate."""
    candidates, _ = _candidates(groups, excluded)
    open_candidates = [view for view in candidates if view.key not in closed]
    if not open_candidates:
        return NoChoice("no group has room, or each failed or refused this request")
    view = min(open_candidates, key=lambda view: (last_turns.get(view.key, 0), view.key))
    terms = cost_terms(view, demand, hits.get(view.key, 0))
    return Choice(
        key=view.key,
        reason="turn",
        cost_s=terms.total_s,
        terms=terms,
        hit_tokens=hits.get(view.key, 0),
        num_candidates=len(open_candidates),
    )


def _candidates(groups: Sequence[GroupView], excluded: Collection[str]) -> tuple[list[GroupView], Reason | None]:
    """Groups that may be chosen, and the reason if it is fixed."""
    staying = [view for view in groups if not view.is_draining]
    is_blind = sum(is_stale(view.state) for view in staying) * 2 > len(staying)
    allowed = [view for view in staying if view.key not in excluded]
    usable = [view for view in allowed if not is_stale(view.state)]
    if is_blind and allowed:
        return allowed, "ledger"
    if usable:
        return usable, None
    if allowed:
        return allowed, "ledger"
    return [view for view in groups if view.is_draining and view.key not in excluded], "draining"


def _home(candidates: Sequence[GroupView], costs: Sequence[float], hits: Mapping[str, int]) -> int | None:
    if not hits:
        return None
    cached = [hits.get(view.key, 0) for view in candidates]
    most = max(cached)
    if not most:
        return None
    home = cached.index(most)
    mean_s = sum(view.backlog_s for view in candidates) / len(candidates)
    is_overloaded = candidates[home].backlog_s > HOME_BACKLOG * mean_s + HOME_BACKLOG_S
    return None if is_overloaded and min(costs) < HOME_COST * costs[home] else home


def _near_equal(costs: Sequence[float]) -> list[int]:
    least = min(costs)
    bound = least * NEAR_TIE if least > 0 else least
    return [index for index, cost in enumerate(costs) if cost <= bound]


def _is_crowded(candidates: Sequence[GroupView], home: int) -> bool:
    """Whether the home is not preferred; `_pick` may still choose it. After bounded-load hashing, Mirrokni et al. 2018."""
    mean = sum(_num_requests(view) for view in candidates) / len(candidates)
    return _num_requests(candidates[home]) > HOME_CROWD * mean + HOME_CROWD_REQUESTS


def _num_requests(view: GroupView) -> int:
    return view.load.running + view.load.waiting


def _pick(near: Sequence[int], candidates: Sequence[GroupView], terms: Sequence[CostTerms], draw: float) -> int:
    """The better of two random indices: earlier first token, then fewer requests."""
    count = len(near)
    if count == 1:
        return near[0]
    position, fraction = divmod(draw * count, 1.0)
    first = near[int(position)]
    second = near[(int(position) + 1 + int(fraction * (count - 1))) % count]

    def rank(index: int) -> tuple[float, int]:
        return terms[index].first_token_s * terms[index].factor, _num_requests(candidates[index])

    return second if rank(second) < rank(first) else first


def canary_groups(
    revisions: Mapping[str, str],
    newest: str,
    percent: int,
    draw: float,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> frozenset[str]:
    """Keys of the groups for a request while `percent` of the requests belong to the revision `newest`.

    `draw`, one per request, selects the newest revision or the others. If all groups of that side are `excluded` (failed or
    refused the request) or `closed` (accept no requests now), the other side is used if it has a usable group.
    """
    new = frozenset(key for key, revision in revisions.items() if revision == newest)
    old = frozenset(revisions) - new
    first, second = (new, old) if draw * 100 < percent else (old, new)
    for unusable in ({*excluded, *closed}, excluded):
        for side in (first, second):
            if side.difference(unusable):
                return side
    return frozenset(revisions)
