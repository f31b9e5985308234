"""Requests and runs for the tests of sliding windows: a disturbed run is compared with requests alone that keep all pages."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import DEFAULT_CONFIG, SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.schedules import PLAIN, Disturbance, serve
from tests.runtime.lag import lagged
from tests.runtime.model.reference import ranked
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner
from tests.runtime.tiny import VOCAB_SIZE

LIMITS = Limits(max_model_len=240, max_num_seqs=6, max_num_batched_tokens=240)
FULL = Build(dtype=torch.float64, num_pages=64)


def make_requests(max_tokens: int = 20) -> dict[int, wire.Request]:
    """Returns greedy and sampled requests: siblings, some with a part of their prompt, and unrelated ones, one of them short."""
    rng = torch.Generator().manual_seed(5)
    common, long = (torch.randint(0, VOCAB_SIZE, (length,), generator=rng).tolist() for length in (75, 130))
    loop = [(7 * i + 3) % 40 for i in range(9)]
    prompts = [common] * 3 + [[*common[:50], 1, 2, 3], [*common, 7, 8], long, long[:100], [4], loop * 6]
    return {
        i: wire.Request(
            id=f"r{i}",
            epoch=0,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=max_tokens, seed=i, temperature=0.0 if i % 2 else 1.0),
        )
        for i, prompt in enumerate(prompts)
    }


def reference(folder: Path, requests: dict[int, wire.Request], build: Build = FULL) -> dict[int, list[int]]:
    """Returns the tokens of each request alone, which keeps all its pages."""

    def work(runner: ModelRunner) -> dict[int, list[int]]:
        answers: dict[int, list[int]] = {}
        for handle, request in requests.items():
            answers |= serve(runner, make_scheduler(LIMITS, runner.pool, PLAIN), {handle: request}, Disturbance(budget=240))
        return answers

    return on_ranks(folder, [1], build, work)


@dataclass
class Ran:
    """The scheduler of a run, and what its ranks did."""

    scheduler: Scheduler
    counter: CountingRunner

    @property
    def num_dropped(self) -> int:
        assert self.scheduler.sharing.windowed is not None
        return self.scheduler.sharing.windowed.num_dropped


@dataclass(frozen=True)
class Run:
    """A disturbed run of requests, some of them again after all have ended."""

    disturbance: Disturbance = field(default_factory=partial(Disturbance, budget=30))
    config: SchedulerConfig = DEFAULT_CONFIG
    rounds: int = 1
    requests: dict[int, wire.Request] = field(default_factory=make_requests)

    def on(self, folder: Path, pods: list[int], build: Build, expected: dict[int, list[int]]) -> Ran:
        """Compares the tokens with the expected ones."""
        return on_ranks(folder, pods, build, partial(self._compare, expected))

    def _compare(self, expected: dict[int, list[int]], runner: ModelRunner) -> Ran:
        limits = replace(LIMITS, max_num_batched_tokens=self.disturbance.budget, plans_in_flight=runner.depth)
        drafts = self.config.speculation.method != "none"
        scheduler = make_scheduler(limits if drafts else lagged(limits), runner.pool, self.config, runner.fitting)
        counter = CountingRunner(runner)
        for _ in range(self.rounds):
            assert serve(counter, scheduler, self.requests, self.disturbance) == expected
        return Ran(scheduler, counter)


def generate(folder: Path, requests: dict[int, wire.Request]) -> dict[int, list[int]]:
    """Returns the tokens of `transformers`, in float64."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    own_code = {"attn_implementation": "eager", "experts_implementation": "eager"}  # other implementations lack float64
    model = auto.from_pretrained(folder, dtype=torch.float64, **own_code)
    answers = {}
    for handle, request in requests.items():
        ids = torch.tensor([request.prompt])
        settings = {"max_new_tokens": request.sampling.max_tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        with ranked(model):
            answers[handle] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
    return answers


def with_few_tokens(request: wire.Request) -> wire.Request:
    """Lets few tokens repeat, so that n-gram lookups find some."""
    sampling = msgspec.structs.replace(request.sampling, allowed_token_ids=[3, 4, 5], temperature=0.5)
    return msgspec.structs.replace(request, sampling=sampling)
