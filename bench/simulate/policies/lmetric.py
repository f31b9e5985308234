"""LMetric: prompt tokens that the group would have to compute, times its requests with this one. No parameters.

Requests sent since the report count, as the router knows them. Source: arXiv 2603.15202.
"""

from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, RouterState, random_argmin


class NewTokensTimesBatch(DispatchOnly):
    """Chooses the smallest product."""

    def choose(self, job: Job, state: RouterState) -> int:
        values = []
        for group, hit in zip(state.groups, state.hits_of(job), strict=True):
            load = group.load
            unreported = group.unreported.values()
            tokens = load.waiting_prompt_tokens + load.running_prompt_tokens + sum(missing for missing, _ in unreported)
            batch = load.running + load.waiting + len(unreported)
            values.append(float((tokens + max(1, job.prompt_tokens - hit)) * (batch + 1)))
        return random_argmin(values, state.rng)
