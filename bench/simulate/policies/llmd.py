"""llm-d's scheduler: scorers for prefix, pages and queue, weighted 2:1:1, over endpoints below its saturation limits.

It uses reports only.
"""

from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, GroupState, RouterState, random_argmin

PREFIX, PAGES, QUEUE = 2.0, 1.0, 1.0
MAX_QUEUE, MAX_USE = 5, 0.8


def _use(group: GroupState) -> float:
    return 1 - group.load.free_pages / group.load.total_pages


class Scorers(DispatchOnly):
    """Chooses the endpoint with the highest score; all are candidates if all are saturated."""

    def choose(self, job: Job, state: RouterState) -> int:
        indexes = range(len(state.groups))
        candidates = [i for i in indexes if state.groups[i].load.waiting <= MAX_QUEUE and _use(state.groups[i]) <= MAX_USE] or [
            *indexes
        ]
        queues = [state.groups[i].load.waiting for i in candidates]
        low, high = min(queues), max(queues)
        hits = state.hits_of(job)
        scores = []
        for i, queue in zip(candidates, queues, strict=True):
            queue_score = 1.0 if high == low else (high - queue) / (high - low)
            scores.append(PREFIX * hits[i] / job.prompt_tokens + PAGES * (1 - _use(state.groups[i])) + QUEUE * queue_score)
        return candidates[random_argmin([-score for score in scores], state.rng)]
