"""Late binding: a request waits at the router until a group has room, so that the group is chosen as late as possible.

    open      the group could start the request at once (rows, pages, backlog below 0.1 s), or fewer than two requests wait there
    held      a closed group costs less than 0.7 of the best open one and saves 250 ms, so waiting for it pays; a held request
              counts as backlog for those after it; nothing is held for more than a second
    requeue   the same bounds take an unstarted request back from its group, at most twice a second; also from a draining group

A started stream goes to the best group at once. A group without a fresh report is open, since its present load is unknown
and waiting for its report would stop the router. A group that never reported is fresh until its first report is due.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx_api.cost import attended
from phalanx_router.routing.choose import Choice, NoChoice, choose, choose_round_robin
from phalanx_router.routing.cost import RequestDemand, TtftWeight, cost_terms, ttft_weight
from phalanx_router.routing.queue import QueuedRequest, RequestQueue
from phalanx_router.routing.view import GroupView

MAX_WAITING = 2
ROOM_BACKLOG_S = 0.1
MUCH_BETTER, GAIN_S = 0.7, 0.25
MAX_HELD_S = 1.0
MAX_CONSIDERED = 16
"""Requests considered per call; requests without any group do not count."""
REQUEUE_EVERY_S = 0.5
MAX_REQUEUES = 4
"""Per group and tick."""

ViewsOf = Callable[[QueuedRequest], Sequence[GroupView]]
"""Groups that can take a request: those with its tokenizer, and with its weights once it has tokens."""
HitsOf = Callable[[QueuedRequest], Mapping[str, int]]
"""Prompt tokens of a request that each group holds, by key."""
ExcludedOf = Callable[[QueuedRequest], frozenset[str]]
"""Keys of the groups that failed or refused a request."""
TurnsOf = Callable[[], Mapping[str, int] | None]
"""Sequence number of the last request sent to each group, by key; only for round robin."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request and the group to send it to now."""

    waiting: QueuedRequest
    choice: Choice


def _no_turns() -> None:
    return None


@dataclass(frozen=True, slots=True)
class DispatchInputs:
    """Inputs of a dispatch in addition to the queue."""

    views_of: ViewsOf
    hits_of: HitsOf
    excluded_of: ExcludedOf
    turns: TurnsOf = _no_turns


def is_open(view: GroupView) -> bool:
    """Returns whether one more request may be sent to the group."""
    return view.state != "fresh" or view.waiting + view.unseen < MAX_WAITING or has_room(view)


def has_room(view: GroupView) -> bool:
    """Returns whether the group could start one more request in its next steps."""
    if view.max_num_seqs:
        rows = view.running + view.waiting < view.max_num_seqs
    else:
        rows = not view.waiting
    return rows and view.pressure < 1 and view.backlog_s <= ROOM_BACKLOG_S


def next_dispatch(queue: RequestQueue, known: DispatchInputs, now: float, draw: float) -> Dispatch | None:
    """Returns the next request to send, with its group. The caller sends it and calls again with new views."""
    held: dict[str, PrefillLoad] = {}
    looked = 0
    for waiting in queue.in_turn():
        views = known.views_of(waiting)
        if not views:
            continue
        if looked >= MAX_CONSIDERED:
            return None
        looked += 1
        if not waiting.has_started and not any(map(is_open, views)):
            continue
        seen = [_with_load(view, held.get(view.key)) for view in views]
        choice = _choose(waiting, seen, known, now, draw)
        if isinstance(choice, Choice):
            return Dispatch(waiting, choice)
        if choice is not None:
            held[choice.key] = held.get(choice.key, NO_LOAD).plus(waiting.demand, choice.hit_tokens)
    return None


@dataclass(frozen=True, slots=True)
class WaitForGroup:
    """The request should wait for this group."""

    key: str
    hit_tokens: int


def _choose(
    waiting: QueuedRequest, views: Sequence[GroupView], known: DispatchInputs, now: float, draw: float
) -> Choice | WaitForGroup | None:
    """Returns the group to send the request to, or the group to wait for, if any group can take it."""
    hits, excluded = known.hits_of(waiting), known.excluded_of(waiting)
    turns = known.turns()
    if turns is not None:
        closed: list[str] = [] if waiting.has_started else [view.key for view in views if not is_open(view)]
        taken = choose_round_robin(views, waiting.demand, turns, hits=hits, excluded=excluded, closed=closed)
        return taken if isinstance(taken, Choice) else None
    best = choose(views, waiting.demand, draw, hits=hits, excluded=excluded)
    if isinstance(best, NoChoice):
        return None
    by_key = {view.key: view for view in views}
    if waiting.has_started or is_open(by_key[best.key]):
        return best
    now_open = choose([view for view in views if is_open(view)], waiting.demand, draw, hits=hits, excluded=excluded)
    if isinstance(now_open, NoChoice):
        return None
    pays = is_much_better(best.cost_s, now_open.cost_s) and now - waiting.arrived_at < MAX_HELD_S
    return WaitForGroup(best.key, best.hit_tokens) if pays else now_open


def is_much_better(cost_s: float, than_s: float) -> bool:
    """Returns whether the saving of `cost_s` against `than_s` pays for a change."""
    return cost_s < MUCH_BETTER * than_s and than_s - cost_s > GAIN_S


@dataclass(frozen=True, slots=True)
class UnstartedRequest:
    """A request that was sent to a group and has no token yet."""

    waiting: QueuedRequest
    key: str
    # When it was sent to this group.
    since: float


@dataclass(frozen=True, slots=True)
class Requeue:
    """A request to take back because another group is much better."""

    unstarted: UnstartedRequest
    why: str


def find_requeues(
    requests: Sequence[UnstartedRequest], there: Sequence[GroupView], known: DispatchInputs, now: float
) -> list[Requeue]:
    """Returns the requests to take back: per group the newest, at most as many as wait there, if another group is much better.

    `there`: views of the groups that hold the requests. A draining group is not a candidate.
    """
    found: list[Requeue] = []
    num_taken: dict[str, int] = {}
    removed: dict[str, PrefillLoad] = {}
    added: dict[str, PrefillLoad] = {}
    views_by_key = {view.key: view for view in there}
    for unstarted in sorted(requests, key=lambda unstarted: -unstarted.since):
        own = views_by_key.get(unstarted.key)
        if (
            own is None
            or now - unstarted.since < REQUEUE_EVERY_S
            or num_taken.get(unstarted.key, 0) >= min(MAX_REQUEUES, own.waiting)
        ):
            continue
        demand, hits = unstarted.waiting.demand, known.hits_of(unstarted.waiting)
        excluded = known.excluded_of(unstarted.waiting)
        views = known.views_of(unstarted.waiting)
        others = [view for view in views if view.key != unstarted.key and view.key not in excluded and is_open(view)]
        others = [_with_load(view, added.get(view.key)) for view in others if view.state == "fresh" and not view.draining]
        if not others:
            continue
        left_load = removed.get(unstarted.key, NO_LOAD).less(demand)
        wait = ttft_weight(demand, (own, *others), hits)
        stay_s = _cost(_with_load(own, left_load), demand, hits, wait)
        best_s, best = min((_cost(view, demand, hits, wait), view.key) for view in others)
        if is_much_better(best_s, stay_s):
            num_taken[unstarted.key] = num_taken.get(unstarted.key, 0) + 1
            removed[unstarted.key] = left_load
            added[best] = added.get(best, NO_LOAD).plus(demand)
            found.append(Requeue(unstarted, f"{stay_s:.2f} s there, {best_s:.2f} s elsewhere"))
    return found


def _cost(view: GroupView, demand: RequestDemand, hits: Mapping[str, int], wait: TtftWeight) -> float:
    return cost_terms(view, demand, hits.get(view.key, 0), wait).total_s


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Queued prompt tokens in addition to those of a view, and the sum of their context lengths."""

    tokens: int = 0
    attended: float = 0.0

    def plus(self, demand: RequestDemand, hit_tokens: int = 0) -> "PrefillLoad":
        """Adds a prompt of which the group holds `hit_tokens`."""
        tokens = demand.prompt_tokens
        held = min(hit_tokens, tokens - 1)
        return PrefillLoad(self.tokens + tokens - held, self.attended + attended(tokens, held))

    def less(self, demand: RequestDemand) -> "PrefillLoad":
        """Subtracts a prompt of which the group holds no tokens."""
        return PrefillLoad(self.tokens - demand.prompt_tokens, self.attended - attended(demand.prompt_tokens))


NO_LOAD = PrefillLoad()


def _with_load(view: GroupView, burden: PrefillLoad | None) -> GroupView:
    """Returns the view with `burden` added to its queued prompt tokens."""
    if burden is None:
        return view
    tokens = max(0, view.queued_prompt_tokens + burden.tokens)
    return replace(view, queued_prompt_tokens=tokens, queued_attended=max(0.0, view.queued_attended + burden.attended))
