"""llm-d's scheduler: scorers for prefix, pages and queue, weighted 2:1:1, over endpoints below its saturation limits; by scraped
reports alone. Source: balancing.md 1.7."""

from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene, Seen, least

PREFIX, PAGES, QUEUE = 2.0, 1.0, 1.0
MAX_QUEUE, MAX_USE = 5, 0.8


def _use(seen: Seen) -> float:
    return 1 - seen.load.free_pages / seen.load.total_pages


class Scorers(Plain):
    """The endpoint with the highest sum of scores; all of them are candidates when all are saturated."""

    def choose(self, job: Job, scene: Scene) -> int:
        """The best of those with room."""
        places = range(len(scene.groups))
        able = [i for i in places if scene.groups[i].load.waiting <= MAX_QUEUE and _use(scene.groups[i]) <= MAX_USE] or [*places]
        queues = [scene.groups[i].load.waiting for i in able]
        low, high = min(queues), max(queues)
        hits = scene.hits_of(job)
        scores = []
        for i, queue in zip(able, queues, strict=True):
            short = 1.0 if high == low else (high - queue) / (high - low)
            scores.append(PREFIX * hits[i] / job.prompt_tokens + PAGES * (1 - _use(scene.groups[i])) + QUEUE * short)
        return able[least([-score for score in scores], scene.chance)]
