"""Groups of ranks as threads of one process, and a driver that turns prompts into step plans without an engine."""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from phalanx_api import wire
from phalanx_runtime.collective.connect import RankPlace, connect, listen
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.request import needs_history
from phalanx_runtime.core.step_plan import NewRow, PoolShape, StepPlan, StepResult
from phalanx_runtime.model.attention.paged import Attention, LayerCache
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import Form, Model
from phalanx_runtime.model.source import Level, open_model
from phalanx_runtime.rank.drafting.loading import load_drafting, make_proposer
from phalanx_runtime.rank.drafting.proposer import Proposer
from phalanx_runtime.rank.loader import make_runner
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.grammar import RankGrammars, read_tokenizer
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.runtime.pods import make_spec, with_settings

T = TypeVar("T")
PLAIN = Kernels()
PAGE_SIZE = 8
JOIN_S = 20.0
LONGEST_S = 600.0
"""Longest wait for the work of ranks: of a bench beside others, too."""
GRACE_S = 2.0
"""Wait for the others once one has failed: threads of one process do not lose the peer that a process would."""
_names = count()


def in_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Results of tasks that run side by side. The first exception is raised again here."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    ended = SimpleQueue[int]()

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as error:
            errors.append(error)
        ended.put(index)

    for index in range(len(tasks)):
        threading.Thread(target=run, args=(index,), daemon=True).start()
    with suppress(Empty):
        for _ in tasks:
            ended.get(timeout=GRACE_S if errors else LONGEST_S)
    if errors:
        raise errors[0]
    assert len(results) == len(tasks), "a rank did not end"
    return [results[index] for index in range(len(tasks))]


def make_places(pods: Sequence[int], token: bytes = b"token") -> list[tuple[RankPlace, socket.socket]]:
    """Places of a group whose pods hold so many ranks each, all on this machine, with the sockets they listen on."""
    world_size = sum(pods)
    listeners = [listen(0) for _ in range(world_size)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    places, first = [], 0
    for size in pods:
        name = f"test-{os.getpid()}-{next(_names)}"
        for rank in range(first, first + size):
            places.append(
                RankPlace(
                    rank=rank,
                    world_size=world_size,
                    near=range(first, first + size),
                    addresses=addresses,
                    token=token,
                    incarnation=1,
                    pod_name=name,
                )
            )
        first += size
    return list(zip(places, listeners, strict=True))


def with_group(pods: Sequence[int], work: Callable[[Collective], T]) -> list[T]:
    """What `work` gives on each rank of a group."""

    def rank(place: RankPlace, listener: socket.socket) -> T:
        collective = connect(place, JOIN_S, listener)
        listener.close()
        try:
            return work(collective)
        finally:
            collective.close()

    return in_threads([partial(rank, place, listener) for place, listener in make_places(pods)])


@dataclass(frozen=True, slots=True)
class Build:
    """How a test's model is computed."""

    dtype: torch.dtype = torch.float32
    kernels: Kernels = PLAIN
    attention: Attention | None = None
    num_pages: int = 64
    device: str = "cpu"
    level: Level = "auto"
    stages: int = 1
    grammars: type[RankGrammars] = RankGrammars
    proposer: Proposer | None = None
    """Of every rank of the first stage."""
    make_proposer: Callable[[Model, list[LayerCache], PoolShape, Collective], Proposer] | None = None
    """Makes that of each rank of the first stage, from its model, pages and peers."""
    speculative: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a RankSpec that say what drafts; then the proposer is made as a rank makes it."""


def make_model_runner(folder: Path, collective: Collective, build: Build) -> ModelRunner:
    """A runner over a small pool."""
    device = torch.device(build.device)
    pipeline = Pipeline(collective, build.stages)
    source = open_model(folder, build.level)
    form = Form(
        dtype=build.dtype,
        device=device,
        kernels=build.kernels,
        positions=source.max_position,
        has_exit=bool(build.speculative or build.make_proposer),
    )
    model = source.load(pipeline.peers, form, build.attention, pipeline.stage)
    caches = make_caches(model.kv, build.num_pages, PAGE_SIZE, build.dtype, device)
    grammars = build.grammars(partial(read_tokenizer, folder, model.vocab_size), model.vocab_size)
    pool, proposer = PoolShape(build.num_pages, PAGE_SIZE), build.proposer
    if build.make_proposer is not None and pipeline.stage.is_first:
        proposer = build.make_proposer(model, caches, pool, pipeline.peers)
    if build.speculative:
        spec = with_settings(make_spec(folder, collective.rank, collective.world_size), **build.speculative)
        drafting = load_drafting(spec, model, pipeline, build.dtype, device)
        proposer = make_proposer(spec, drafting, model, caches, pool, pipeline.peers) if pipeline.stage.is_first else None
    return make_runner(model, caches, pool, pipeline, build.dtype, device, grammars, proposer)


def on_ranks(folder: Path, pods: Sequence[int], build: Build, work: Callable[[ModelRunner], T]) -> T:
    """What `work` gives on rank 0 while the others follow."""

    def rank(collective: Collective) -> list[T]:
        runner = make_model_runner(folder, collective, build)
        if collective.rank:
            runner.follow()
            return []
        try:
            return [work(runner)]
        finally:
            if collective.world_size > 1:
                runner.dismiss()

    return with_group(pods, rank)[0][0]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the driver."""

    prompt: list[int]
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    delivered: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its `wire.Sampling`."""


class Driver:
    """Turns requests into plans. `results` are those of its steps.

    Pages are dealt from the end of the pool, interleaved, so that no request's are adjacent.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._free = list(range(runner.pool.num_pages))
        self.pages: dict[int, list[int]] = {}
        self.results: list[tuple[StepPlan, StepResult]] = []
        self._step = 0

    def generate(self, asked: Sequence[Asked], num_tokens: int, chunk: int = 1 << 20, lag: int = 0) -> list[list[int]]:
        """Output tokens of each request. Prompts are computed `chunk` tokens a step; request i starts i * `lag` steps late."""
        self._asked = list(asked)
        self._tokens = [list(one.prompt) + list(one.delivered) for one in asked]
        self._outputs = [list(one.delivered) for one in asked]
        self._computed = [0] * len(asked)
        for turn in count():
            running = [i for i in range(len(asked)) if turn >= i * lag and len(self._outputs[i]) < num_tokens]
            if running:
                self._step_of(running, chunk)
            elif all(len(output) >= num_tokens for output in self._outputs):
                break
        return self._outputs

    def resume(self, num_tokens: int) -> list[list[int]]:
        """Goes on with the requests of `generate` until each has so many tokens."""
        while running := [i for i in range(len(self._asked)) if len(self._outputs[i]) < num_tokens]:
            self._step_of(running, 1)
        return self._outputs

    def _step_of(self, running: list[int], chunk: int) -> None:
        """Computes one step of these requests."""
        starts = [self._computed[i] for i in running]
        parts = [self._tokens[i][self._computed[i] : self._computed[i] + chunk] for i in running]
        new = [self._admit(i) for i in running if self._computed[i] == 0]
        for at, i in enumerate(running):
            self._computed[i] += len(parts[at])
        draws = [(at, len(self._outputs[i])) for at, i in enumerate(running) if self._computed[i] == len(self._tokens[i])]
        pages = [self._more_pages(i) for i in running]
        counts = [len(part) for part in parts]
        plan = StepPlan(
            step=self._step,
            admitted=new,
            rows=running,
            starts=starts,
            counts=counts,
            pages=pages,
            tokens=[token for part in parts for token in part],
            draws=draws,
        )
        self._step += 1
        self._runner.start(plan)
        result = self._runner.finish()
        self.results.append((plan, result))
        for (at, _), token in zip(draws, result.tokens, strict=True):
            self._outputs[running[at]].append(token)
            self._tokens[running[at]].append(token)

    def _admit(self, row: int) -> NewRow:
        self._free += self.pages.pop(row, [])
        self.pages[row] = []
        one = self._asked[row]
        sampling = wire.Sampling(
            max_tokens=1, seed=one.seed, temperature=one.temperature, top_p=one.top_p, top_k=one.top_k, **one.more
        )
        return NewRow(row, sampling, len(one.prompt), list(self._tokens[row]) if needs_history(sampling) else [])

    def prompt_details(self, row: int) -> dict[int, wire.TokenDetail]:
        """The details of a request's prompt tokens, by their position."""
        told: dict[int, wire.TokenDetail] = {}
        for plan, result in self.results:
            for request, start, details in result.prompt_details:
                if plan.rows[request] == row:
                    assert start == 1 + len(told), "details are in order"
                    told |= dict(enumerate(details, start))
        return told

    def details(self, row: int) -> list[wire.TokenDetail | None]:
        """The details of a request's output tokens."""
        return [
            detail
            for plan, result in self.results
            for (request, _), detail in zip(plan.draws, result.details, strict=False)
            if plan.rows[request] == row
        ]

    def _more_pages(self, row: int) -> list[int]:
        wanted = -(-self._computed[row] // PAGE_SIZE) - len(self.pages[row])
        more = [self._free.pop() for _ in range(wanted)]
        self.pages[row] += more
        return more
