"""Whether a request may wait at the router: the queue is bounded in requests and in tokens, and who is refused hears how long.

    drain_s = (prompt tokens of the queue * seconds per prompt token + output tokens * seconds per output token) / groups

A full queue lets a more urgent newcomer in by refusing the newest of the least urgent band. Begun streams are never counted here,
nor refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_router.routing.cost import UNKNOWN_OUTPUT
from phalanx_router.routing.freshness import is_stale
from phalanx_router.routing.queue import RequestQueue, Waiting
from phalanx_router.routing.view import GroupView

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many newcomers may wait, and how many tokens their prompts may have together; one may always wait alone."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """The queue is full, and why; `instead`: whoever waits and goes in the newcomer's place, None when the newcomer does."""

    why: str
    instead: Waiting | None


def refusal(queue: RequestQueue, newcomer: Waiting, bounds: QueueBounds) -> Refusal | None:
    """Who is refused when this newcomer comes, if anyone."""
    tokens = queue.tokens + newcomer.newcomer.prompt_tokens
    if queue.num_newcomers >= bounds.max_requests:
        why = f"{queue.num_newcomers} requests wait already"
    elif queue.num_newcomers and tokens > bounds.max_tokens:
        why = f"requests with {queue.tokens} prompt tokens wait already"
    else:
        return None
    return Refusal(why, queue.last(worse_than=newcomer.priority))


def drain_s(queue: RequestQueue, views: Sequence[GroupView]) -> float | None:
    """How long the groups need for what waits; None when no group reports."""
    known = [view for view in views if view.is_known and not view.draining and not is_stale(view.state)]
    if not known:
        return None
    prompt_s = sum(queue.tokens * view.token_s + queue.attended * view.attend_s for view in known) / len(known)
    token_s = sum(view.itl_s / max(1, view.running) for view in known) / len(known)
    usual = sum(view.mean_output_tokens or UNKNOWN_OUTPUT for view in known) / len(known)
    outputs = min(float(queue.output_tokens), usual * queue.num_newcomers)
    seconds = (prompt_s + outputs * token_s) / len(known)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
