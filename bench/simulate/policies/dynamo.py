"""Dynamo's router: prompt blocks to compute, less those that overlap, plus blocks of what decodes there, by the router's own
count of what it sent. Source: balancing.md 1.9 (weights 1, temperature 0, random ties)."""

from bench.simulate.cache import PAGE
from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene, least


class OverlapAndLoad(Plain):
    """The least sum."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The group whose sum is the least."""
        values = []
        for seen, hit in zip(scene.groups, scene.hits_of(job), strict=True):
            prefill = max(0.0, (seen.sent.prompt_tokens + job.prompt_tokens - hit) / PAGE)
            values.append(prefill + (seen.sent.context_tokens + job.prompt_tokens) / PAGE)
        return least(values, scene.chance)
