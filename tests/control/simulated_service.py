"""A service in virtual time for the autoscaler, with seeded Poisson arrivals.

Groups are as fast as their step model. Work beyond their capacity waits at the routers.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx_api.cost import StepModel
from phalanx_api.summary import GroupSummary, Histogram, RouterSummary, Traffic
from phalanx_operator.decide.scaling.demand import GroupCapacity, OfferedLoad, Targets, busy_groups, max_streams
from phalanx_operator.decide.scaling.scale import ScaleDecision, ScaleHistory, ScaleInputs, ScalingRules, evaluate
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge

MODEL = StepModel(fixed_s=0.02, token_s=1.2e-4, knee_tokens=0, context_s=7e-8, attention_s=1e-9)
CAPACITY_PAGES, PAGE = 12_500, 16
PROMPT, OUTPUT = 1000.0, 200.0
SHAPE = Traffic(window_s=60.0, arrivals=1, prompt=PROMPT, prompt_squared=1.5 * PROMPT**2, missed=PROMPT, output=OUTPUT, scv=1.0)
CAPACITY = GroupCapacity(MODEL, 1.0, CAPACITY_PAGES * PAGE)
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)
RULES = ScalingRules(min_groups=1, max_groups=20, targets=TARGETS)


def rate_for(busy: float) -> float:
    """Returns the requests per second that are `busy` groups' worth of work."""
    return busy / busy_groups(OfferedLoad(1.0, SHAPE, 0.0, 0.0), CAPACITY, TARGETS)


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed the number of groups."""

    at_s: float
    before: int
    after: int
    verdict: str
    why: str


Filter = Callable[[float, RouterSummary], RouterSummary | None]
"""Returns the summary that reaches the operator at this time, if any."""


class SimulatedService:
    """One service. `rate` returns the requests per second at a time."""

    def __init__(
        self,
        rate: Callable[[float], float],
        *,
        groups: int = 1,
        rules: ScalingRules = RULES,
        cold_start_s: float = 40.0,
        reports: Filter = lambda _, summary: summary,
        serving: Callable[[float, frozenset[str]], frozenset[str]] = lambda _, names: names,
        seed: int = 0,
        interval_s: float = 2.0,
    ) -> None:
        self._rate, self.rules, self._cold_start_s, self._reports, self._serving = rate, rules, cold_start_s, reports, serving
        self._random = random.Random(seed)
        self.now_s = 0.0
        self._interval_s = interval_s
        self._started_s = {f"g{i}": -1000.0 for i in range(groups)}
        self._count = groups
        self.wanted = groups
        self.history = ScaleHistory()
        self.changes: list[Change] = []
        self.decisions: list[ScaleDecision] = []
        self._arrivals: deque[tuple[float, int]] = deque()
        self._queued = 0.0
        self._last_arrival_s = 0.0
        self._last: RouterReport | None = None

    @property
    def serving(self) -> frozenset[str]:
        ready = frozenset(name for name, started_s in self._started_s.items() if self.now_s - started_s >= self._cold_start_s)
        return self._serving(self.now_s, ready)

    def run(self, seconds: float) -> "SimulatedService":
        """Advances the time."""
        end = self.now_s + seconds
        while self.now_s < end:
            self.step()
        return self

    def step(self) -> None:
        self.now_s += self._interval_s
        self._arrive()
        summary = self._reports(self.now_s, self._summary())
        if summary is not None:
            self._last = RouterReport("r", 0.0, summary)
        elif self._last is not None:
            self._last = replace(self._last, age_s=self._last.age_s + self._interval_s)
        fleet = merge([self._last], 1, 45.0) if self._last else Fleet(polled=1)
        inputs = ScaleInputs(
            now_s=self.now_s, groups=self.wanted, serving=self.serving, fleet=fleet, cold_start_s=self._cold_start_s
        )
        self.history, decision = evaluate(self.history, inputs, self.rules)
        self.decisions.append(decision)
        if decision.groups != self.wanted:
            self.changes.append(Change(self.now_s, self.wanted, decision.groups, decision.verdict, decision.why))
            self._follow(decision.groups)

    def _arrive(self) -> None:
        mean = self._rate(self.now_s) * self._interval_s
        count = self._poisson(mean)
        self._arrivals.append((self.now_s, count))
        while self._arrivals[0][0] <= self.now_s - 300:
            self._arrivals.popleft()
        if count:
            self._last_arrival_s = self.now_s
        work = count / rate_for(1.0) if mean else 0.0
        computed = len(self.serving) * self._interval_s
        self._queued = max(0.0, self._queued + work - computed)

    def _poisson(self, mean: float) -> int:
        if mean > 500:
            return max(0, round(self._random.gauss(mean, math.sqrt(mean))))
        limit, product, count = math.exp(-mean), self._random.random(), 0
        while product > limit:
            product *= self._random.random()
            count += 1
        return count

    def _summary(self) -> RouterSummary:
        serving = self.serving
        recent = sum(count for at, count in self._arrivals if at > self.now_s - 20) / 20
        busy = busy_groups(OfferedLoad(recent, SHAPE, 0.0, 0.0), CAPACITY, TARGETS)
        use = min(busy / len(serving), 1.0) if serving else 0.0
        streams = use * max_streams(OfferedLoad(recent, SHAPE, 0.0, 0.0), CAPACITY, TARGETS)
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
                itl_s=CAPACITY.step_s(0, streams, context),
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
        while len(self._started_s) < count:
            self._started_s[f"g{self._count}"] = self.now_s
            self._count += 1
        while len(self._started_s) > count:
            youngest = max(self._started_s, key=lambda name: (self._started_s[name], name))
            del self._started_s[youngest]
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
    """Returns a rate that is high in the first half of each period."""
    return lambda now_s: high if now_s % period_s < period_s / 2 else low
