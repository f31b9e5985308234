"""A simulated group compared with the runtime's scheduler and page pool: equal requests, equal step times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.jobs import Times
from bench.simulate.policies.others import RoundRobin
from bench.simulate.world import Setting, World
from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork, step_work
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult

MODEL = StepModel(fixed_s=0.003, token_s=0.00012, knee_tokens=32, context_s=2e-7, attention_s=1e-9, row_s=2e-5, prompt_s=0.002)
PAGE, STEP_TOKENS, ROWS = 16, 256, 64


@dataclass(slots=True)
class Observed:
    """Token times of each request, and the number of preemptions."""

    times: list[list[float]]
    preemptions: int = 0
    arrived: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> Times:
        return np.array([times[0] - at for times, at in zip(self.times, self.arrived, strict=True)])

    @property
    def tpot(self) -> Times:
        return np.array([(times[-1] - times[0]) / max(1, len(times) - 1) for times in self.times])


def work_of(plan: StepPlan) -> StepWork:
    """Returns the work of a plan; a row with one token decodes."""
    rows = list(zip(plan.starts, plan.counts, strict=True))
    return step_work([start + 1 for start, count in rows if count == 1], [row for row in rows if row[1] > 1])


def run_scheduler(arrivals: Sequence[Arrival], pages: int) -> Observed:
    """Runs the runtime's scheduler in virtual time; each sampled token is 1."""
    limits = Limits(max_model_len=8192, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS, max_waiting=10_000)
    scheduler = make_scheduler(limits, PoolShape(pages, PAGE), SchedulerConfig(eviction_policy="lru"))
    rng, now, num_arrived = random.Random(5), 0.0, 0
    observed = Observed([[] for _ in arrivals], arrived=[arrival.at_s for arrival in arrivals])
    while num_arrived < len(arrivals) or not scheduler.is_idle():
        while num_arrived < len(arrivals) and arrivals[num_arrived].at_s <= now:
            prompt = [rng.randrange(1000) for _ in range(arrivals[num_arrived].input_tokens)]
            sampling = wire.Sampling(max_tokens=arrivals[num_arrived].output_tokens, seed=num_arrived)
            assert (
                scheduler.submit(
                    num_arrived, wire.Request(id=f"r{num_arrived}", epoch=0, prompt=prompt, delivered=[], sampling=sampling), now
                )
                is None
            )
            num_arrived += 1
        plan = scheduler.schedule(now)
        if plan is None:
            now = arrivals[num_arrived].at_s
            continue
        took_s = MODEL.predict(work_of(plan))
        now += took_s
        frame = scheduler.commit(StepResult(step=plan.step, tokens=[1] * len(plan.draws)), took_s)
        for handle in frame.handles:
            observed.times[handle].append(now)
    observed.preemptions = scheduler.num_preemptions
    return observed


def simulated(arrivals: Sequence[Arrival], pages: int) -> Observed:
    """Runs the simulated group, which records the first and the last token of a request."""
    shape = Shape(MODEL, pages, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS)
    world = World(Setting(1, shape), RoundRobin(), arrivals)
    world.run()
    tokens = [[job.first_s or 0.0, *[0.0] * (job.output_tokens - 2), job.last_s][: job.output_tokens] for job in world.jobs]
    return Observed(tokens, world.engines[0].preemptions, [arrival.at_s for arrival in arrivals])


def arrivals_of(rate: float, count: int, prompt: float, output: float, seed: int) -> list[Arrival]:
    """Poisson arrivals with log-normal lengths."""
    rng, at_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    for number in range(count):
        at_s += rng.expovariate(rate)
        prompt_tokens, output_tokens = (
            max(2, min(2000, round(rng.lognormvariate(np.log(mean), 0.7)))) for mean in (prompt, output)
        )
        arrivals.append(Arrival(at_s, prompt_tokens, output_tokens, (number,)))
    return arrivals


LOADS = {
    "chat, much room": (arrivals_of(6.0, 250, 150, 100, 1), 4000, 0.05),
    "long prompts": (arrivals_of(3.0, 150, 600, 60, 2), 4000, 0.05),
    "long answers in few pages": (arrivals_of(3.0, 120, 150, 400, 3), 700, 0.15),
    "longer ones": (arrivals_of(3.0, 120, 150, 400, 7), 700, 0.15),
}
"""Requests, pages, and the maximum relative error of the mean TTFT."""


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_simulated_group_schedules_like_the_runtime(load: tuple[list[Arrival], int, float]) -> None:
    arrivals, pages, ttft_bound = load
    real, model = run_scheduler(arrivals, pages), simulated(arrivals, pages)
    assert [len(times) for times in real.times] == [arrival.output_tokens for arrival in arrivals]
    assert model.preemptions == pytest.approx(real.preemptions, rel=0.2)
    assert (real.preemptions > 10) == (pages < 1000)
    for ours, theirs, bound in ((model.ttft, real.ttft, ttft_bound), (model.tpot, real.tpot, 0.05)):
        assert ours.mean() == pytest.approx(theirs.mean(), rel=bound)
        assert np.percentile(ours, 99) == pytest.approx(np.percentile(theirs, 99), rel=0.15)
