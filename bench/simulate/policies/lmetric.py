"""LMetric: the prompt tokens that the group would have to compute, times its requests with this one. No parameters.
Source: arXiv 2603.15202; balancing.md 1.11. What was sent since the report is counted, as the router knows it."""

from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene, least


class NewTokensTimesBatch(Plain):
    """The least product."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The group whose product is the least."""
        values = []
        for seen, hit in zip(scene.groups, scene.hits_of(job), strict=True):
            load = seen.load
            unseen = seen.unseen.values()
            tokens = load.waiting_prompt_tokens + load.running_prompt_tokens + sum(missing for missing, _ in unseen)
            batch = load.running + load.waiting + len(unseen)
            values.append(float((tokens + max(1, job.prompt_tokens - hit)) * (batch + 1)))
        return least(values, scene.chance)
