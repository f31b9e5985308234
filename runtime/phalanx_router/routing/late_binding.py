"""Late binding: a request waits at the router until a group has room.

    open      the group can start the request at once (rows, pages, backlog below 0.1 s), or fewer than two requests wait there
    promised  a closed group costs less than 0.7 of the best open one and saves 250 ms: the request waits for it, at most 1 s, and
              counts as its backlog
    requeue   by the same bounds an unstarted request is taken back

A started stream goes to the best group at once. A group without a fresh report is open.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx_api.cost import attention_work
from phalanx_router.routing.choose import Choice, NoChoice, choose, choose_round_robin
from phalanx_router.routing.cost import RequestDemand, TtftWeight, cost_terms, ttft_weight
from phalanx_router.routing.queue import QueuedRequest, RequestQueue
from phalanx_router.routing.view import GroupView

MAX_WAITING = 2
ROOM_BACKLOG_S = 0.1
MUCH_BETTER, GAIN_S = 0.7, 0.25
MAX_PROMISED_WAIT_S = 1.0
MAX_CONSIDERED = 16
"""Requests per call, without those that no group can take."""
REQUEUE_INTERVAL_S = 0.5
MAX_REQUEUES = 4
"""Per group and tick."""

ViewsOf = Callable[[QueuedRequest], Sequence[GroupView]]
"""Views of the eligible groups."""
HitsOf = Callable[[QueuedRequest], Mapping[str, int]]
"""Cached prompt tokens, by group key."""
ExcludedOf = Callable[[QueuedRequest], frozenset[str]]
"""Keys of groups."""
LastTurns = Callable[[], Mapping[str, int] | None]
"""See `CandidateGroups.last_turns`."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request to send to a group now."""

    queued: QueuedRequest
    choice: Choice


def _no_turns() -> None:
    return None


@dataclass(frozen=True, slots=True)
class DispatchInputs:
    """Inputs of a dispatch in addition to the queue."""

    views_of: ViewsOf
    hits_of: HitsOf
    excluded_of: ExcludedOf
    last_turns: LastTurns = _no_turns


def is_open(view: GroupView) -> bool:
    """Whether one more request may be sent to the group."""
    return view.state != "fresh" or view.load.waiting + view.load.unreported < MAX_WAITING or has_room(view)


def has_room(view: GroupView) -> bool:
    """Whether the group can start one more request soon."""
    load, max_num_seqs = view.load, view.capacity.max_num_seqs
    has_row = load.running + load.waiting < max_num_seqs if max_num_seqs else not load.waiting
    return has_row and view.pressure < 1 and view.backlog_s <= ROOM_BACKLOG_S


def next_dispatch(queue: RequestQueue, inputs: DispatchInputs, now: float, draw: float) -> Dispatch | None:
    """Next request to send, with its group."""
    promised: dict[str, PrefillLoad] = {}
    num_considered = 0
    for queued in queue.in_order():
        views = inputs.views_of(queued)
        if not views:
            continue
        if num_considered >= MAX_CONSIDERED:
            return None
        num_considered += 1
        if not queued.has_started and not any(map(is_open, views)):
            continue
        loaded = [_with_load(view, promised.get(view.key, NO_LOAD)) for view in views]
        choice = _choose(queued, loaded, inputs, now, draw)
        if isinstance(choice, Choice):
            return Dispatch(queued, choice)
        if choice is not None:
            promised[choice.key] = promised.get(choice.key, NO_LOAD).plus(queued.demand, choice.hit_tokens)
    return None


@dataclass(frozen=True, slots=True)
class WaitForGroup:
    """The request waits for this group."""

    key: str
    hit_tokens: int


def _choose(
    queued: QueuedRequest, views: Sequence[GroupView], inputs: DispatchInputs, now: float, draw: float
) -> Choice | WaitForGroup | None:
    hits, excluded, last_turns = inputs.hits_of(queued), inputs.excluded_of(queued), inputs.last_turns()
    if last_turns is not None:
        closed: list[str] = [] if queued.has_started else [view.key for view in views if not is_open(view)]
        turn = choose_round_robin(views, queued.demand, last_turns, hits=hits, excluded=excluded, closed=closed)
        return turn if isinstance(turn, Choice) else None
    best = choose(views, queued.demand, draw, hits=hits, excluded=excluded)
    if isinstance(best, NoChoice):
        return None
    by_key = {view.key: view for view in views}
    if queued.has_started or is_open(by_key[best.key]):
        return best
    best_open = choose([view for view in views if is_open(view)], queued.demand, draw, hits=hits, excluded=excluded)
    if isinstance(best_open, NoChoice):
        return None
    should_wait = is_much_better(best.cost_s, best_open.cost_s) and now - queued.arrived_at < MAX_PROMISED_WAIT_S
    return WaitForGroup(best.key, best.hit_tokens) if should_wait else best_open


def is_much_better(cost_s: float, than_s: float) -> bool:
    """Whether a change to `cost_s` pays."""
    return cost_s < MUCH_BETTER * than_s and than_s - cost_s > GAIN_S


@dataclass(frozen=True, slots=True)
class UnstartedRequest:
    """A sent request without a token."""

    queued: QueuedRequest
    key: str
    sent_at: float


@dataclass(frozen=True, slots=True)
class Requeue:
    """A request to take back."""

    unstarted: UnstartedRequest
    why: str


def find_requeues(
    requests: Sequence[UnstartedRequest], assigned: Sequence[GroupView], inputs: DispatchInputs, now: float
) -> list[Requeue]:
    """Requests to take back: of each group the newest, at most as many as wait there. `assigned`: their groups."""
    requeues: list[Requeue] = []
    num_taken: dict[str, int] = {}
    removed: dict[str, PrefillLoad] = {}
    added: dict[str, PrefillLoad] = {}
    by_key = {view.key: view for view in assigned}
    for unstarted in sorted(requests, key=lambda unstarted: -unstarted.sent_at):
        own = by_key.get(unstarted.key)
        if (
            own is None
            or now - unstarted.sent_at < REQUEUE_INTERVAL_S
            or num_taken.get(unstarted.key, 0) >= min(MAX_REQUEUES, own.load.waiting)
        ):
            continue
        demand, hits = unstarted.queued.demand, inputs.hits_of(unstarted.queued)
        others = [_with_load(view, added.get(view.key, NO_LOAD)) for view in _other_groups(unstarted, inputs)]
        if not others:
            continue
        own_load = removed.get(unstarted.key, NO_LOAD).minus(demand)
        weight = ttft_weight(demand, (own, *others), hits)
        stay_s = _cost_s(_with_load(own, own_load), demand, hits, weight)
        best_s, best = min((_cost_s(view, demand, hits, weight), view.key) for view in others)
        if is_much_better(best_s, stay_s):
            num_taken[unstarted.key] = num_taken.get(unstarted.key, 0) + 1
            removed[unstarted.key] = own_load
            added[best] = added.get(best, NO_LOAD).plus(demand)
            requeues.append(Requeue(unstarted, f"{stay_s:.2f} s there, {best_s:.2f} s elsewhere"))
    return requeues


def _other_groups(unstarted: UnstartedRequest, inputs: DispatchInputs) -> list[GroupView]:
    excluded = inputs.excluded_of(unstarted.queued)
    return [
        view
        for view in inputs.views_of(unstarted.queued)
        if view.key != unstarted.key
        and view.key not in excluded
        and is_open(view)
        and view.state == "fresh"
        and not view.is_draining
    ]


def _cost_s(view: GroupView, demand: RequestDemand, hits: Mapping[str, int], weight: TtftWeight) -> float:
    return cost_terms(view, demand, hits.get(view.key, 0), weight).total_s


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Prompt tokens to add to a view."""

    tokens: int = 0
    attention: float = 0.0  # sum of their context lengths

    def plus(self, demand: RequestDemand, hit_tokens: int = 0) -> "PrefillLoad":
        """Adds a prompt with `hit_tokens` cached."""
        tokens = demand.prompt_tokens
        cached = min(hit_tokens, tokens - 1)
        return PrefillLoad(self.tokens + tokens - cached, self.attention + attention_work(tokens, cached))

    def minus(self, demand: RequestDemand) -> "PrefillLoad":
        """Subtracts an uncached prompt."""
        return PrefillLoad(self.tokens - demand.prompt_tokens, self.attention - attention_work(demand.prompt_tokens))


NO_LOAD = PrefillLoad()


def _with_load(view: GroupView, added: PrefillLoad) -> GroupView:
    if added is NO_LOAD:
        return view
    load = view.load
    return replace(
        view,
        load=replace(
            load,
            queued_prompt_tokens=max(0, load.queued_prompt_tokens + added.tokens),
            queued_attention=max(0.0, load.queued_attention + added.attention),
        ),
    )
