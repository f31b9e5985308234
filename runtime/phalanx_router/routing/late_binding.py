"""Late binding: a request waits at the router until a group has room for it, so that the choice is made as late as possible.

    open      it could start what was sent at once (rows, pages, a backlog below 0.1 s), or fewer than two wait there
    held      a closed group is so much better (less than 0.7 of the cost, 250 ms gained) that waiting for it pays; what is held
              for a group counts as its backlog for those behind; nothing is held for longer than a second
    requeue   the same bounds take a request that has not started back from its group, twice a second at most; one that is
              being emptied is left so too

A begun stream goes to the best group at once. A group whose report is not fresh is open: what it has done since is not known, and
to wait for its word would stop the router. One that never reported is fresh until it should have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx_api.cost import attended
from phalanx_router.routing.choose import Choice, NoChoice, choose, in_turn
from phalanx_router.routing.cost import Newcomer, Wait, terms, wait_of
from phalanx_router.routing.queue import RequestQueue, Waiting
from phalanx_router.routing.view import GroupView

MAX_WAITING = 2
ROOM_BACKLOG_S = 0.1
BETTER, GAIN_S = 0.7, 0.25
MAX_HELD_S = 1.0
MAX_LOOKS = 16
"""Requests that one look considers before it gives up; those for which there is no group at all do not count."""
REQUEUE_EVERY_S = 0.5
MAX_REQUEUES = 4
"""Of one group in one tick."""

ViewsOf = Callable[[Waiting], Sequence[GroupView]]
"""The groups that can take a request: those with its tokenizer, and with its weights once it has tokens."""
HitsOf = Callable[[Waiting], Mapping[str, int]]
"""Tokens of its prompt that groups hold, by key."""
ExcludedOf = Callable[[Waiting], frozenset[str]]
"""Groups that failed or refused it, by key."""
TurnsOf = Callable[[], Mapping[str, int] | None]
"""The number of the last request that went to each group, by key, where groups take turns; None where the cost decides."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """This request goes there now."""

    waiting: Waiting
    choice: Choice


def _no_turns() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Known:
    """What a dispatch is decided by, beside the queue."""

    views_of: ViewsOf
    hits_of: HitsOf
    excluded_of: ExcludedOf
    turns: TurnsOf = _no_turns


def is_open(view: GroupView) -> bool:
    """Whether one more request may be sent there."""
    return view.state != "fresh" or view.waiting + view.unseen < MAX_WAITING or has_room(view)


def has_room(view: GroupView) -> bool:
    """Whether the group could start one more request with its next steps."""
    if view.max_num_seqs:
        rows = view.running + view.waiting < view.max_num_seqs
    else:
        rows = not view.waiting
    return rows and view.pressure < 1 and view.backlog_s <= ROOM_BACKLOG_S


def next_dispatch(queue: RequestQueue, known: Known, now: float, draw: float) -> Dispatch | None:
    """The next request that leaves the queue, and where it goes. The caller sends it, and asks again with new views."""
    held: dict[str, Burden] = {}
    looked = 0
    for waiting in queue.in_turn():
        views = known.views_of(waiting)
        if not views:
            continue
        if looked >= MAX_LOOKS:
            return None
        looked += 1
        if not waiting.has_begun and not any(map(is_open, views)):
            continue
        seen = [_burdened(view, held.get(view.key)) for view in views]
        choice = _choose(waiting, seen, known, now, draw)
        if isinstance(choice, Choice):
            return Dispatch(waiting, choice)
        if choice is not None:
            held[choice.key] = held.get(choice.key, NO_BURDEN).plus(waiting.newcomer, choice.hit_tokens)
    return None


@dataclass(frozen=True, slots=True)
class Held:
    """It pays to wait for this group."""

    key: str
    hit_tokens: int


def _choose(waiting: Waiting, views: Sequence[GroupView], known: Known, now: float, draw: float) -> Choice | Held | None:
    """Where to send it now, what to wait for, or None when no group can take it."""
    hits, excluded = known.hits_of(waiting), known.excluded_of(waiting)
    turns = known.turns()
    if turns is not None:
        closed: list[str] = [] if waiting.has_begun else [view.key for view in views if not is_open(view)]
        taken = in_turn(views, waiting.newcomer, turns, hits=hits, excluded=excluded, closed=closed)
        return taken if isinstance(taken, Choice) else None
    best = choose(views, waiting.newcomer, draw, hits=hits, excluded=excluded)
    if isinstance(best, NoChoice):
        return None
    by_key = {view.key: view for view in views}
    if waiting.has_begun or is_open(by_key[best.key]):
        return best
    now_open = choose([view for view in views if is_open(view)], waiting.newcomer, draw, hits=hits, excluded=excluded)
    if isinstance(now_open, NoChoice):
        return None
    pays = is_much_better(best.cost_s, now_open.cost_s) and now - waiting.arrived_at < MAX_HELD_S
    return Held(best.key, best.hit_tokens) if pays else now_open


def is_much_better(cost_s: float, than_s: float) -> bool:
    """Whether so much is won that a change pays."""
    return cost_s < BETTER * than_s and than_s - cost_s > GAIN_S


@dataclass(frozen=True, slots=True)
class Sat:
    """A request that was sent to a group and has no token yet. `since`: when it came to this group."""

    waiting: Waiting
    key: str
    since: float


@dataclass(frozen=True, slots=True)
class Requeue:
    """Take this request back: another group is much better."""

    sat: Sat
    why: str


def requeues(sats: Sequence[Sat], there: Sequence[GroupView], known: Known, now: float) -> list[Requeue]:
    """Which requests to take back now: of each group the newest, as many as wait there, while another group is much better.

    there: the groups in which they are. One that is being emptied is none of those that can take a request.
    """
    found: list[Requeue] = []
    taken: dict[str, int] = {}
    left: dict[str, Burden] = {}
    added: dict[str, Burden] = {}
    owns = {view.key: view for view in there}
    for sat in sorted(sats, key=lambda sat: -sat.since):
        own = owns.get(sat.key)
        if own is None or now - sat.since < REQUEUE_EVERY_S or taken.get(sat.key, 0) >= min(MAX_REQUEUES, own.waiting):
            continue
        newcomer, hits = sat.waiting.newcomer, known.hits_of(sat.waiting)
        excluded = known.excluded_of(sat.waiting)
        views = known.views_of(sat.waiting)
        others = [view for view in views if view.key != sat.key and view.key not in excluded and is_open(view)]
        others = [_burdened(view, added.get(view.key)) for view in others if view.state == "fresh" and not view.draining]
        if not others:
            continue
        gone = left.get(sat.key, NO_BURDEN).less(newcomer)
        wait = wait_of(newcomer, (own, *others), hits)
        stay_s = _cost(_burdened(own, gone), newcomer, hits, wait)
        best_s, best = min((_cost(view, newcomer, hits, wait), view.key) for view in others)
        if is_much_better(best_s, stay_s):
            taken[sat.key] = taken.get(sat.key, 0) + 1
            left[sat.key] = gone
            added[best] = added.get(best, NO_BURDEN).plus(newcomer)
            found.append(Requeue(sat, f"{stay_s:.2f} s there, {best_s:.2f} s elsewhere"))
    return found


def _cost(view: GroupView, newcomer: Newcomer, hits: Mapping[str, int], wait: Wait) -> float:
    return terms(view, newcomer, hits.get(view.key, 0), wait).total_s


@dataclass(frozen=True, slots=True)
class Burden:
    """Prompt tokens that a group has to compute beside those of its view, and the sum of their contexts."""

    tokens: int = 0
    attended: float = 0.0

    def plus(self, newcomer: Newcomer, hit_tokens: int = 0) -> "Burden":
        """With another prompt, of which the group holds so many tokens."""
        tokens = newcomer.prompt_tokens
        held = min(hit_tokens, tokens - 1)
        return Burden(self.tokens + tokens - held, self.attended + attended(tokens, held))

    def less(self, newcomer: Newcomer) -> "Burden":
        """Without a prompt of which the group holds nothing."""
        return Burden(self.tokens - newcomer.prompt_tokens, self.attended - attended(newcomer.prompt_tokens))


NO_BURDEN = Burden()


def _burdened(view: GroupView, burden: Burden | None) -> GroupView:
    """The group with this much more to compute first."""
    if burden is None:
        return view
    tokens = max(0, view.queued_prompt_tokens + burden.tokens)
    return replace(view, queued_prompt_tokens=tokens, queued_attended=max(0.0, view.queued_attended + burden.attended))
