"""Runs requests through the engine loop and a rank's runner in this process, and times each step."""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bench.frame.figures import percentile
from bench.gpu.random_model import LoadedModel
from phalanx_api import wire
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.ports import StepRunner
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget, default_budget
from phalanx_runtime.rank.device.limits import DeviceLimits
from phalanx_runtime.rank.loader import make_runner
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.step.pipeline import Pipeline

Mode = Literal["graphs", "eager"]
"""graphs: the device path; eager: as with `--enforce-eager`, the host launches and samples each step."""


class CalledGraph:
    """A `StepGraph` for a CPU: each replay calls the function."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Does nothing: a CPU needs no warm-up."""

    def capture(self, work: Callable[[], None]) -> None:
        """Keeps `work`."""
        self._work = work

    def replay(self) -> None:
        """Calls it."""
        self._work()


def open_runner(model: LoadedModel, mode: Mode, max_num_seqs: int) -> ModelRunner:
    """Returns a runner over the model, as the rank's loader makes it; its objects are left out of garbage collection."""
    is_gpu = model.device.type == "cuda"
    limits = None
    if mode == "graphs":
        budget = default_budget(_total_memory(model)) if is_gpu else CaptureBudget(1 << 40, 1e6)
        limits = DeviceLimits(max_num_seqs, model.decoder.positions, budget, None if is_gpu else CalledGraph)
    pipeline = Pipeline(SoloCollective())
    runner = make_runner(
        model.decoder, model.caches, model.pool, pipeline, model.dtype, device=model.device, device_limits=limits
    )
    gc.collect()
    gc.freeze()
    return runner


def _total_memory(model: LoadedModel) -> int:
    import torch

    return int(torch.cuda.get_device_properties(model.device).total_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One finished step. Times are seconds of `time.perf_counter`."""

    started: float
    ended: float
    num_rows: int
    num_tokens: int
    context: int
    """Tokens in the cache of all its requests, after the step."""

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token."""
        return self.num_rows == self.num_tokens


class TimedRunner:
    """A StepRunner that times the steps of another."""

    def __init__(self, inner: StepRunner) -> None:
        self.steps: list[Step] = []
        self.num_decodes = 0
        """Decode steps of equally many requests at the end of `steps`."""
        self._inner = inner
        self._plans: deque[tuple[StepPlan, float]] = deque()

    @property
    def pool(self) -> PoolShape:
        """See `StepRunner`."""
        return self._inner.pool

    @property
    def depth(self) -> int:
        """See `StepRunner`."""
        return self._inner.depth

    def start(self, plan: StepPlan) -> None:
        """See `StepRunner`."""
        self._plans.append((plan, time.perf_counter()))
        self._inner.start(plan)

    def finish(self) -> StepResult:
        """See `StepRunner`."""
        result = self._inner.finish()
        plan, started = self._plans.popleft()
        step = Step(
            started=started,
            ended=time.perf_counter(),
            num_rows=len(plan.rows),
            num_tokens=len(plan.tokens),
            context=sum(plan.starts) + sum(plan.counts),
        )
        has_equal = self.num_decodes > 0 and self.steps[-1].num_rows == step.num_rows
        self.num_decodes = step.is_decode * (1 + has_equal * self.num_decodes)
        self.steps.append(step)
        return result

    def drain(self) -> None:
        """Waits for the plans in flight."""
        while self._plans:
            self.finish()


class QueuedChannel:
    """An EngineChannel whose requests arrive at once; counts the answers."""

    def __init__(self, requests: Sequence[wire.Request]) -> None:
        self.num_ended = 0
        self._unread = [wire.encode(wire.Submit(handle, request)) for handle, request in enumerate(requests)]

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """See `EngineChannel`. Raises RuntimeError if the engine has nothing to do."""
        if block and not self._unread:
            raise RuntimeError("the engine is idle before the measured steps")
        messages, self._unread = self._unread, []
        return messages

    def send(self, message: bytes) -> None:
        """See `EngineChannel`. Raises RuntimeError for a refused request."""
        frame = wire.decode_from_engine(message)
        if isinstance(frame, wire.Refused):
            raise RuntimeError(f"request {frame.handle} was refused: {frame.message}")
        if isinstance(frame, wire.Tokens):
            self.num_ended += len(frame.finished)

    def wake(self) -> None:
        """See `EngineChannel`."""


def make_requests(count: int, prompt: int, max_tokens: int, vocab_size: int, seed: int = 0) -> list[wire.Request]:
    """Returns greedy requests with different random prompts, without stop tokens."""
    rng = random.Random(seed)
    return [
        wire.Request(
            id=f"{seed} {number}",
            epoch=0,
            prompt=[rng.randrange(vocab_size) for _ in range(prompt)],
            delivered=[],
            sampling=wire.Sampling(max_tokens=max_tokens, seed=number, temperature=0.0),
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one length, and the lag of the engine."""

    batch: int
    prompt: int
    max_tokens: int
    step_tokens: int
    lag: int = 1
    seed: int = 0

    @property
    def limits(self) -> Limits:
        """Limits of an engine that runs all of them at once."""
        return Limits(
            max_model_len=self.prompt + self.max_tokens,
            max_num_seqs=self.batch,
            max_num_batched_tokens=max(self.batch, self.step_tokens),
            long_prefill_tokens=self.step_tokens,
            async_scheduling=self.lag == 1,
        )


class Engine:
    """An engine loop over a runner, with all requests of a load."""

    def __init__(self, runner: ModelRunner, load: Load) -> None:
        self.runner = TimedRunner(runner)
        self.load = load
        requests = make_requests(load.batch, load.prompt, load.max_tokens, runner.model.vocab_size, load.seed)
        self._channel = QueuedChannel(requests)
        config = SchedulerConfig(prefix_caching=False)
        self._loop = EngineLoop(self.runner, load.limits, self._channel, config=config, fitting=runner.fitting)

    def run_until(self, is_enough: Callable[[Sequence[Step]], bool]) -> list[Step]:
        """Turns until the steps are enough or all requests have ended. Returns the steps."""
        while not is_enough(self.runner.steps) and self._channel.num_ended < self.load.batch:
            self._loop.turn()
        return self.runner.steps

    def run(self) -> list[Step]:
        """Runs all requests to their end. Returns the steps."""
        return self.run_until(lambda steps: False)

    def decode(self, num_steps: int, warm: int) -> "Window":
        """Returns `num_steps` consecutive steps in which all requests decode, after `warm` of them. The engine ends there."""
        batch, wanted = self.load.batch, num_steps + warm
        self.run_until(lambda steps: self.runner.num_decodes > wanted and steps[-1].num_rows == batch)
        self.runner.drain()
        return window_of(last_decodes(self.runner.steps, batch)[warm:][: num_steps + 1])


def last_decodes(steps: Sequence[Step], batch: int) -> list[Step]:
    """Returns the decode steps of `batch` requests at the end, from the oldest."""
    found = list[Step]()
    for step in reversed(steps):
        if not step.is_decode or step.num_rows != batch:
            break
        found.append(step)
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive steps of equal kind."""

    period_s: float
    """Mean time from the end of one step to the end of the next."""
    p99_s: float
    context: float
    """Mean tokens in the cache of all requests."""
    num_steps: int


def window_of(steps: Sequence[Step]) -> Window:
    """Returns the window of these steps; the first one only starts the clock. Raises RuntimeError for fewer than two."""
    if len(steps) < 2:
        raise RuntimeError("too few steps: the requests ended first")
    periods = [later.ended - sooner.ended for sooner, later in pairwise(steps)]
    return Window(
        period_s=sum(periods) / len(periods),
        p99_s=percentile(periods, 99),
        context=sum(step.context for step in steps[1:]) / len(periods),
        num_steps=len(periods),
    )
