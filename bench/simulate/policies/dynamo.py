"""Dynamo's router: prompt blocks to compute without those cached, plus blocks that decode, by the router's own counts.

(Weights 1, temperature 0, random ties).
"""

from bench.simulate.cache import PAGE
from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, RouterState, random_argmin


class OverlapAndLoad(DispatchOnly):
    """Chooses the smallest sum."""

    def choose(self, job: Job, state: RouterState) -> int:
        values = []
        for group, hit in zip(state.groups, state.hits_of(job), strict=True):
            prefill = max(0.0, (group.sent.prompt_tokens + job.prompt_tokens - hit) / PAGE)
            values.append(prefill + (group.sent.context_tokens + job.prompt_tokens) / PAGE)
        return random_argmin(values, state.rng)
