"""Runs of the simulated fleet, observed as routers and groups report themselves."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.router.replay import BLOCK_TOKENS, Arrival
from bench.simulate.cache import PAGE
from bench.simulate.engine import Shape
from bench.simulate.machines import ANALYTIC
from bench.simulate.policies.ours import Ours
from bench.simulate.world import Setting, World
from phalanx_api.cache_curve import CacheCurve
from phalanx_api.cost import StepModel
from phalanx_api.summary import LATENCY_BOUNDS_S, BalancePolicy, Histogram, RouterSummary, bucket_index
from phalanx_runtime.core.kv.miss_ratio import MissRatioCurve

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A simulated fleet and its load."""

    arrivals: Sequence[Arrival]
    groups: int = 1
    model: StepModel = ANALYTIC
    tokens: int = 400_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    link_s: float = 0.001
    slow: tuple[int, float, float] | None = None
    mode: str = "Migrate"
    observed_s: float = 120.0
    """When the summary is made; the measurements are of the time from `measured_from_s` to `measured_to_s`."""
    measured_from_s: float = 60.0
    measured_to_s: float = 180.0
    opens_s: float = 0.0
    """When the groups serve."""


def poisson(rate: float, until_s: float, prompt: int, output: int, seed: int = 0) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        arrivals.append(Arrival(at_s, prompt, output))
    return arrivals


def even(rate: float, until_s: float, prompt: int, output: int, seed: int = 0) -> list[Arrival]:
    """Returns one request per interval, at a random time in it."""
    rng = random.Random(seed)
    return [Arrival((index + rng.random()) / rate, prompt, output) for index in range(int(rate * until_s))]


@dataclass(slots=True)
class StepRecord:
    ended_s: float
    step_s: float
    decodes: int
    group: int


class ObservedWorld(World):
    """Records every step, and the router's summary at one time."""

    def __init__(self, fleet: Fleet) -> None:
        shape = Shape(
            fleet.model,
            fleet.tokens // 16,
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
        )
        policy = BalancePolicy(mode=fleet.mode, ttft_target_s=2.0, itl_target_s=0.1)  # type: ignore[arg-type]
        self.ours = Ours(shape, fleet.groups, policy)
        setting = Setting(fleet.groups, shape, slow=fleet.slow, link_s=fleet.link_s)
        super().__init__(setting, self.ours, fleet.arrivals)
        self.fleet = fleet
        self.steps: list[StepRecord] = []
        if fleet.opens_s:
            self._close_until(fleet.opens_s)
        self.captured: RouterSummary | None = None
        self.schedule(fleet.observed_s, self._capture)
        self.schedule(fleet.measured_to_s, self._end)

    def _close_until(self, opens_s: float) -> None:
        """Hides the groups from the router until they serve."""
        for group in range(self.fleet.groups):
            self._open[group] = False
            self.ours.remove_group(group)

        def start(now: float) -> None:
            for group in range(self.fleet.groups):
                self.ours.add_group(group)
                self.open_group(group, now)

        self.schedule(opens_s, start)

    def _capture(self, now: float) -> None:
        summary = self.ours.summary(self.num_streams, now)
        delay_s = 2 * self.fleet.link_s  # a ping and its pong
        self.captured = msgspec.structs.replace(
            summary, groups=[msgspec.structs.replace(group, link_s=delay_s) for group in summary.groups]
        )

    def _end(self, now: float) -> None:
        self._num_open = 0

    def start_step(self, group: int, now: float) -> None:
        engine = self.engines[group]
        will_start = not engine.is_stepping and engine.has_work
        super().start_step(group, now)
        if will_start:
            self.steps.append(StepRecord(now + engine.last_step_s, engine.last_step_s, engine.last_work.decodes, group))

    def measured_steps(self) -> list[StepRecord]:
        """Steps that ended in the measured time."""
        return self._between(self.fleet.measured_from_s, self.fleet.measured_to_s)

    def itl_histogram(self, factor: float = 1.0) -> Histogram:
        """Inter-token times of the minute before the summary, each times `factor`."""
        recent = self._between(self.fleet.observed_s - WINDOW_S, self.fleet.observed_s)
        return histogram_of([(step.step_s * factor, step.decodes) for step in recent])

    def itl_s(self, group: int | None = None) -> float:
        """Mean inter-token time."""
        steps = [
            step for step in self._between(self.fleet.measured_from_s, self.fleet.measured_to_s) if group in (None, step.group)
        ]
        return sum(step.step_s * step.decodes for step in steps) / sum(step.decodes for step in steps)

    def tokens_per_s(self) -> float:
        """Output of all groups, without first tokens."""
        return sum(step.decodes for step in self.measured_steps()) / (self.fleet.measured_to_s - self.fleet.measured_from_s)

    def ttfts_s(self, from_s: float, to_s: float) -> list[float]:
        """Times to the first token of clients, the way back included."""
        firsts = [(job.first_s, job.at_s) for job in self.jobs if job.first_s is not None]
        return [first_s + self.fleet.link_s - at_s for first_s, at_s in firsts if from_s <= first_s <= to_s]

    def hit_rate(self) -> float:
        """Share of the prompt tokens that a cache had."""
        jobs = [job for job in self.jobs if job.first_s is not None and job.first_s > self.fleet.measured_from_s]
        return 1 - sum(job.missed for job in jobs) / sum(job.prompt_tokens for job in jobs)

    def curve(self) -> CacheCurve:
        """The miss-ratio curve of the only group, by the engine's estimator."""
        pages = self.fleet.tokens // PAGE
        estimate = MissRatioCurve(4 * pages)
        started = [job for job in self.jobs if job.first_s is not None and job.first_s <= self.fleet.observed_s]
        for job in sorted(started, key=lambda job: job.first_s or 0.0):
            keys = [_page_key(block, page) for block in job.blocks for page in range(BLOCK_TOKENS // PAGE)]
            estimate.look_up(keys, (job.prompt_tokens - job.missed) // PAGE)
        return estimate.report(pages)

    def summary(self, curve: CacheCurve | None = None) -> RouterSummary:
        """Returns the captured summary, with the measurements that the simulated router leaves out."""
        captured = self.captured
        assert captured is not None, "the run ended before it was observed"
        now = self.fleet.observed_s
        recent = self._between(now - WINDOW_S, now)
        groups = []
        for number, group in enumerate(captured.groups):
            busy = sum(step.step_s for step in recent if step.group == number) / WINDOW_S
            changed: dict[str, Any] = {"device_busy": min(1.0, busy)} | ({"cache_curve": curve} if curve is not None else {})
            groups.append(msgspec.structs.replace(group, **changed))
        return msgspec.structs.replace(
            captured,
            groups=groups,
            itl=self.itl_histogram(),
            ttft=histogram_of([(value, 1) for value in self.ttfts_s(now - WINDOW_S, now)]),
        )

    def _between(self, from_s: float, to_s: float) -> list[StepRecord]:
        return [step for step in self.steps if from_s < step.ended_s <= to_s]


def _page_key(block: int, page: int) -> bytes:
    return hashlib.blake2b(f"{block}/{page}".encode(), digest_size=16).digest()


def histogram_of(values: Sequence[tuple[float, int]]) -> Histogram:
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    for value, count in values:
        counts[bucket_index(value)] += count
    return Histogram(counts)


def played(fleet: Fleet) -> ObservedWorld:
    world = ObservedWorld(fleet)
    world.run()
    return world
