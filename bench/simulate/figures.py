"""Figures of one run."""

from dataclasses import dataclass

import numpy as np

from bench.simulate.engine import Shape
from bench.simulate.world import World
from phalanx_api.cost import StepWork

TPOT_S = 0.1
TTFT_S, TTFT_FACTOR = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Figures:
    goodput: float  # share of requests with TTFT within max(2 s, 3 times their TTFT alone) and TPOT within 0.1 s
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    gap_p99: float  # of the longest gap between tokens of each stream
    preemptions: int
    recomputed: int
    hit_share: float
    moves: int
    failed_moves: int
    returned: int  # moves back to a group within 10 s
    stall_p99: float
    tokens_per_s: float
    group_s: float = 0.0  # group-seconds, starts and drains included
    changes: int = 0  # of the number of groups
    drain: float = 0.0  # longest drain
    replays: int = 0


def alone_s(prompt_tokens: int, shape: Shape) -> float:
    """Returns the TTFT of a prompt on an idle group without a prefix cache."""
    size, total_s = shape.max_num_batched_tokens, 0.0
    for start in range(0, prompt_tokens, size):
        count = min(size, prompt_tokens - start)
        total_s += shape.model.predict(StepWork(count, 0, start, count * (start + count / 2)))
    return total_s


def figures(world: World, shape: Shape) -> Figures:
    """Returns the figures of a finished run. Raises ValueError for a request without all its tokens."""
    jobs = world.jobs
    for job in jobs:
        if job.ended_s is None or job.generated != job.output_tokens:
            raise ValueError(f"request {job.number} has {job.generated} of {job.output_tokens} tokens")
    ttft = np.array([(job.first_s or 0.0) - job.at_s for job in jobs])
    tpot = np.array([(job.last_s - (job.first_s or 0.0)) / max(1, job.output_tokens - 1) for job in jobs])
    bound = np.array([max(TTFT_S, TTFT_FACTOR * alone_s(job.prompt_tokens, shape)) for job in jobs])
    prompt = sum(job.prompt_tokens for job in jobs)
    first, last = min(job.at_s for job in jobs), max(job.last_s for job in jobs)
    operator = world.operator
    return Figures(
        goodput=float(np.mean((ttft <= bound) & (tpot <= TPOT_S))),
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        tpot_p99=float(np.percentile(tpot, 99)),
        gap_p99=float(np.percentile([job.longest_gap_s for job in jobs], 99)),
        preemptions=sum(engine.preemptions for engine in world.engines),
        recomputed=sum(engine.recomputed for engine in world.engines),
        hit_share=1 - sum(job.missed for job in jobs) / prompt,
        moves=world.counts.moves,
        failed_moves=world.counts.failed_moves,
        returned=world.counts.returned,
        stall_p99=float(np.percentile(world.counts.stalls_s, 99)) if world.counts.stalls_s else 0.0,
        tokens_per_s=sum(job.output_tokens for job in jobs) / (last - first),
        group_s=operator.group_seconds(first, last) if operator is not None else len(world.engines) * (last - first),
        changes=len(operator.changes) if operator is not None else 0,
        drain=max(operator.drains_s, default=0.0) if operator is not None else 0.0,
        replays=world.counts.replays,
    )
