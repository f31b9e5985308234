"""A service in virtual time for the autoscaler: requests come at a rate, groups take a while to start, routers summarise.

A group is as fast as its step model says. What exceeds the groups that serve waits at the routers. Arrivals are drawn from a
seeded Poisson process, so a steady rate is as noisy as a real one.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx_api.cost import StepModel
from phalanx_api.summary import GroupSummary, Histogram, RouterSummary, Traffic
from phalanx_operator.decide.scaling.demand import GroupCapacity, OfferedLoad, Targets, busy_groups, most_streams
from phalanx_operator.decide.scaling.scale import ScaleDecision, ScaleHistory, ScaleInputs, ScalingRules, evaluate
from phalanx_operator.decide.state.fleet import Fleet, RouterAnswer, merge

MODEL = StepModel(fixed_s=0.02, token_s=1.2e-4, knee_tokens=0, context_s=7e-8, attention_s=1e-9)
CAPACITY_PAGES, PAGE = 12_500, 16
PROMPT, OUTPUT = 1000.0, 200.0
SHAPE = Traffic(window_s=60.0, arrivals=1, prompt=PROMPT, prompt_squared=1.5 * PROMPT**2, missed=PROMPT, output=OUTPUT, scv=1.0)
ABILITY = GroupCapacity(MODEL, 1.0, CAPACITY_PAGES * PAGE)
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)
RULES = ScalingRules(least=1, most=20, targets=TARGETS)


def rate_for(busy: float) -> float:
    """Requests per second that are so many groups' worth of work."""
    return busy / busy_groups(OfferedLoad(1.0, SHAPE, 0.0, 0.0), ABILITY, TARGETS)


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that changed the count."""

    at_s: float
    before: int
    after: int
    verdict: str
    why: str


Disturb = Callable[[float, RouterSummary], RouterSummary | None]
"""What reaches the operator of a router's summary at this time; None: nothing."""


class SimulatedService:
    """One service. `rate` gives requests per second at a time."""

    def __init__(
        self,
        rate: Callable[[float], float],
        *,
        groups: int = 1,
        rules: ScalingRules = RULES,
        cold_s: float = 40.0,
        disturb: Disturb = lambda _, summary: summary,
        serving: Callable[[float, frozenset[str]], frozenset[str]] = lambda _, names: names,
        seed: int = 0,
        every_s: float = 2.0,
    ) -> None:
        self._rate, self.rules, self._cold_s, self._disturb, self._serving = rate, rules, cold_s, disturb, serving
        self._chance = random.Random(seed)
        self.now_s = 0.0
        self._every_s = every_s
        self._born = {f"g{i}": -1000.0 for i in range(groups)}
        self._named = groups
        self.wanted = groups
        self.memory = ScaleHistory()
        self.changes: list[Change] = []
        self.decisions: list[ScaleDecision] = []
        self._arrivals: deque[tuple[float, int]] = deque()
        self._queued = 0.0
        self._last_arrival_s = 0.0
        self._heard: RouterAnswer | None = None

    @property
    def serving(self) -> frozenset[str]:
        ready = frozenset(name for name, born in self._born.items() if self.now_s - born >= self._cold_s)
        return self._serving(self.now_s, ready)

    def run(self, seconds: float) -> "SimulatedService":
        """Goes on for so long."""
        end = self.now_s + seconds
        while self.now_s < end:
            self.step()
        return self

    def step(self) -> None:
        self.now_s += self._every_s
        self._arrive()
        told = self._disturb(self.now_s, self._summary())
        if told is not None:
            self._heard = RouterAnswer("r", 0.0, told)
        elif self._heard is not None:
            self._heard = replace(self._heard, age_s=self._heard.age_s + self._every_s)
        fleet = merge([self._heard], 1, 45.0) if self._heard else Fleet(asked=1)
        scene = ScaleInputs(now_s=self.now_s, groups=self.wanted, serving=self.serving, fleet=fleet, cold_s=self._cold_s)
        self.memory, decision = evaluate(self.memory, scene, self.rules)
        self.decisions.append(decision)
        if decision.groups != self.wanted:
            self.changes.append(Change(self.now_s, self.wanted, decision.groups, decision.verdict, decision.why))
            self._follow(decision.groups)

    def _arrive(self) -> None:
        mean = self._rate(self.now_s) * self._every_s
        count = self._poisson(mean)
        self._arrivals.append((self.now_s, count))
        while self._arrivals[0][0] <= self.now_s - 300:
            self._arrivals.popleft()
        if count:
            self._last_arrival_s = self.now_s
        work = count / rate_for(1.0) if mean else 0.0
        can = len(self.serving) * self._every_s
        self._queued = max(0.0, self._queued + work - can)

    def _poisson(self, mean: float) -> int:
        if mean > 500:
            return max(0, round(self._chance.gauss(mean, math.sqrt(mean))))
        limit, product, count = math.exp(-mean), self._chance.random(), 0
        while product > limit:
            product *= self._chance.random()
            count += 1
        return count

    def _summary(self) -> RouterSummary:
        serving = self.serving
        recent = sum(count for at, count in self._arrivals if at > self.now_s - 20) / 20
        busy = busy_groups(OfferedLoad(recent, SHAPE, 0.0, 0.0), ABILITY, TARGETS)
        use = min(busy / len(serving), 1.0) if serving else 0.0
        streams = use * most_streams(OfferedLoad(recent, SHAPE, 0.0, 0.0), ABILITY, TARGETS)
        context = streams * (PROMPT + OUTPUT / 2)
        groups = [
            GroupSummary(
                group=name,
                revision="r",
                state="fresh",
                draining=False,
                streams=round(streams),
                running=round(streams),
                waiting=0,
                pressure=context / (CAPACITY_PAGES * PAGE),
                backlog_s=0.0,
                itl_s=ABILITY.step_s(0, streams, context),
                speed=1.0,
                live_tokens=round(context),
                total_pages=CAPACITY_PAGES,
                page_size=PAGE,
                step_model=[MODEL.fixed_s, MODEL.token_s, MODEL.knee_tokens, MODEL.context_s, MODEL.attention_s],
            )
            for name in sorted(serving)
        ]
        windows = [
            replace_window(SHAPE, window_s, sum(count for at, count in self._arrivals if at > self.now_s - window_s))
            for window_s in (6.0, 60.0, 300.0)
        ]
        requests = round(self._queued * rate_for(1.0))
        return RouterSummary(
            router="r",
            groups=groups,
            traffic=windows,
            queued=requests,
            queued_tokens=int(requests * PROMPT),
            held=0 if serving else requests,
            idle_s=self.now_s - self._last_arrival_s,
            ttft=Histogram(),
            itl=Histogram(),
        )

    def _follow(self, count: int) -> None:
        while len(self._born) < count:
            self._born[f"g{self._named}"] = self.now_s
            self._named += 1
        while len(self._born) > count:
            youngest = max(self._born, key=lambda name: (self._born[name], name))
            del self._born[youngest]
        self.wanted = count


def replace_window(shape: Traffic, window_s: float, arrivals: int) -> Traffic:
    return Traffic(
        window_s=window_s,
        arrivals=arrivals,
        prompt=shape.prompt,
        prompt_squared=shape.prompt_squared,
        missed=shape.missed,
        output=shape.output,
        scv=shape.scv,
    )


def square(low: float, high: float, period_s: float) -> Callable[[float], float]:
    """Half of each period high, half low."""
    return lambda now_s: high if now_s % period_s < period_s / 2 else low
