"""Groups of ranks as threads of one process, and a driver that turns prompts into step plans without an engine."""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from phalanx_api import wire
from phalanx_api.engine_config import KvCacheDtype
from phalanx_frontend.tls import Certificate
from phalanx_runtime.collective.connect import RankPlace, connect, listen
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.request import needs_history
from phalanx_runtime.core.step_plan import NewRow, PoolShape, StepPlan, StepResult
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.attention.paged import Attention, LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.generic.source import GenericFolder
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.linear.single_row import TritonRowLinears
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import ModelImpl, open_model
from phalanx_runtime.rank.calibrated import use_calibration
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget
from phalanx_runtime.rank.device.limits import DeviceLimits
from phalanx_runtime.rank.drafting.loading import load_drafting, make_proposer
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.loader import make_runner, open_host_pages
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.memory.row_states import reserve_states
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.grammar import RankGrammars, read_tokenizer
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank.tiers.host_pages import HostCopies
from tests.runtime.pods import make_spec, with_settings

T = TypeVar("T")
PLAIN = Kernels()
PAGE_SIZE = 8
NUM_STATE_ROWS = 16
JOIN_S = 20.0
TIMEOUT_S = 600.0
"""Timeout of ranks, also in a bench on a busy machine."""
GRACE_S = 2.0
"""Timeout once a rank has failed: threads of one process lose no peer."""
_names = count()


def in_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Runs tasks concurrently and returns their results. Raises the first exception."""
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
            ended.get(timeout=GRACE_S if errors else TIMEOUT_S)
    if errors:
        raise errors[0]
    assert len(results) == len(tasks), "a rank did not end"
    return [results[index] for index in range(len(tasks))]


def make_places(
    pods: Sequence[int], token: bytes = b"token", certificate: Certificate | None = None
) -> list[tuple[RankPlace, socket.socket]]:
    """Returns the places of a group on this machine, with listening sockets. pods: ranks of each pod."""
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
                    pod_ranks=range(first, first + size),
                    addresses=addresses,
                    token=token,
                    incarnation=1,
                    pod_name=name,
                    certificate=certificate,
                )
            )
        first += size
    return list(zip(places, listeners, strict=True))


def with_group(pods: Sequence[int], work: Callable[[Collective], T], certificate: Certificate | None = None) -> list[T]:
    """Runs `work` on each rank of a group and returns the results."""

    def rank(place: RankPlace, listener: socket.socket) -> T:
        collective = connect(place, JOIN_S, listener)
        listener.close()
        try:
            return work(collective)
        finally:
            collective.close()

    return in_threads([partial(rank, place, listener) for place, listener in make_places(pods, certificate=certificate)])


OpenHostPages = Callable[[Model, list[LayerCache], PoolShape, int], tuple[HostCopies, HostCopies]]
"""Opens the host memory of a model's pages on the rank of this number."""


def open_memory(model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[HostCopies, HostCopies]:
    """Opens host memory without a disk."""
    return open_host_pages(caches, model.kv.windows, pool)


@dataclass(frozen=True, slots=True)
class Build:
    """How a test loads its model."""

    dtype: torch.dtype = torch.float32
    kernels: Kernels = PLAIN
    attention: Attention | None = None
    num_pages: int = 64
    num_host_pages: int = 0
    min_host_pages: int | None = None
    window: int = 0
    """Tokens whose pages a request keeps; 0: all."""
    num_parts: int = 0
    """Parts of pages, which layers with a window use; others keep all pages."""
    num_host_parts: int = 0
    has_blocks: bool = False
    """Whether the window is a multiple of the blocks within which tokens attend."""
    has_disk: bool = False
    device: str = "cpu"
    level: ModelImpl = "auto"
    has_latents: bool = True
    """See `GenericFolder`."""
    has_parallel_experts: bool = False
    stages: int = 1
    kv_cache_dtype: KvCacheDtype = "auto"
    calibration: str | None = None
    """File of `calibrate-kv`."""
    grammars: type[RankGrammars] = RankGrammars
    proposer: Proposer = NO_PROPOSER
    """Proposer of every rank of the first stage."""
    make_proposer: Callable[[Model, list[LayerCache], PoolShape, Collective], Proposer] | None = None
    """Makes the proposer of each rank of the first stage from its model, pages and peers."""
    speculative: Mapping[str, Any] = field(default_factory=dict)
    """Speculation fields of a RankSpec; with them the proposer is made as in production."""
    open_host_pages: OpenHostPages = open_memory
    device_rows: int = 0
    """Rows of the device path, by the Triton kernels; without any the host builds and samples each step."""
    max_lora_rank: int = 8
    num_snapshots: int = 0
    """Slots for snapshots of states."""
    num_host_snapshots: int = 0
    """These in host memory."""
    adapters: Sequence[Path] = ()
    """Folders of adapters, loaded into slots from 1."""
    max_loras: int = 0
    """Slots, at least one for each of `adapters`."""
    has_graphs: bool = True
    """Whether decode steps of the device path are captured."""


class KeptGraph:
    """A `StepGraph` that runs the function at each replay, not at its capture, which the interpreter makes long."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Does nothing, for the same reason."""

    def capture(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def make_model_runner(folder: Path, collective: Collective, build: Build) -> ModelRunner:
    """Returns a runner over a small pool."""
    device = torch.device(build.device)
    pipeline = Pipeline(collective, build.stages)
    source = open_model(folder, build.level, build.has_parallel_experts, may_classify=True)
    if isinstance(source, GenericFolder):
        source = replace(source, has_latents=build.has_latents)
    attention = TritonAttention() if build.device_rows else build.attention
    form = LoadOptions(
        dtype=build.dtype,
        device=device,
        kernels=build.kernels,
        positions=source.max_position,
        has_exit=bool(build.speculative or build.make_proposer),
        max_loras=max(build.max_loras, len(build.adapters)),
        max_lora_rank=build.max_lora_rank,
    )
    model = source.load(pipeline.peers, form, attention, pipeline.stage)
    for slot, adapter in enumerate(build.adapters, 1):
        assert isinstance(model, Decoder) and model.adapters is not None
        model.adapters.load(slot, adapter)
    states = reserve_states(model, NUM_STATE_ROWS, device, collective, num_snapshots=build.num_snapshots)
    calibrated = {"kv_cache_dtype": build.kv_cache_dtype, "kv_cache_calibration": build.calibration}
    use_calibration(
        with_settings(make_spec(folder, collective.rank, collective.world_size), **calibrated), model, pipeline, device
    )
    format = choose_format(build.kv_cache_dtype, model.kv.head_dims)
    caches = make_caches(model.kv, build.num_pages, PAGE_SIZE, build.dtype, device, format=format, num_parts=build.num_parts)
    grammars = build.grammars(partial(read_tokenizer, folder, model.vocab_size), model.vocab_size)
    pool = PoolShape(
        build.num_pages,
        PAGE_SIZE,
        build.num_host_pages,
        min_host_pages=build.min_host_pages,
        window=build.window,
        num_parts=build.num_parts,
        num_host_parts=build.num_host_parts,
        has_blocks=build.has_blocks,
        has_disk=build.has_disk,
        has_states=states.row_bytes > 0,
        num_snapshots=states.num_snapshots,
        num_host_snapshots=build.num_host_snapshots,
    )
    states.fit(model, pool, NUM_STATE_ROWS, device)
    proposer = build.proposer
    if build.make_proposer is not None and pipeline.stage.is_first:
        proposer = build.make_proposer(model, caches, pool, pipeline.peers)
    if build.speculative:
        settings = {"kv_cache_dtype": build.kv_cache_dtype, **build.speculative}
        spec = with_settings(make_spec(folder, collective.rank, collective.world_size), **settings)
        drafting = load_drafting(spec, model, pipeline, build.dtype, device)
        if pipeline.stage.is_first:
            proposer = make_proposer(spec, drafting, model, caches, pool, pipeline.peers)
    limits = None
    if build.device_rows:
        assert isinstance(model, Decoder)
        model.ops, model.row_linears = TritonOps(), TritonRowLinears()
        budget = CaptureBudget(1 << 40, 1000.0) if build.has_graphs else CaptureBudget(0, 0.0)
        make_graph = None if device.type == "cuda" else KeptGraph
        limits = DeviceLimits(build.device_rows, source.max_position, budget, make_graph)
    host = build.open_host_pages(model, caches, pool, collective.rank)
    return make_runner(model, caches, pool, pipeline, build.dtype, device, grammars, proposer, device_limits=limits, host=host)


def on_ranks(folder: Path, pods: Sequence[int], build: Build, work: Callable[[ModelRunner], T]) -> T:
    """Runs `work` on rank 0 while the others follow, and returns its result."""

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
class DriverRequest:
    """One request of the driver."""

    prompt: list[int]
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    delivered: tuple[int, ...] = ()
    adapter: int = 0
    """Slot of its adapter."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `wire.Sampling`."""


class Driver:
    """Turns requests into plans; `results` has all steps.

    Pages are allocated from the end of the pool, interleaved: no request has adjacent pages.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._free = list(range(runner.pool.num_pages))
        self.pages: dict[int, list[int]] = {}
        self.results: list[tuple[StepPlan, StepResult]] = []
        self._step = 0

    def generate(self, requests: Sequence[DriverRequest], num_tokens: int, chunk: int = 1 << 20, lag: int = 0) -> list[list[int]]:
        """Returns the output tokens of each request. chunk: prompt tokens per step. Request i starts after i * `lag` steps."""
        self._requests = list(requests)
        self._tokens = [list(request.prompt) + list(request.delivered) for request in requests]
        self._outputs = [list(request.delivered) for request in requests]
        self._computed = [0] * len(requests)
        for turn in count():
            running = [i for i in range(len(requests)) if turn >= i * lag and len(self._outputs[i]) < num_tokens]
            if running:
                self._compute_step(running, chunk)
            elif all(len(output) >= num_tokens for output in self._outputs):
                break
        return self._outputs

    def resume(self, num_tokens: int) -> list[list[int]]:
        """Continues the requests of `generate` until each has `num_tokens` output tokens."""
        while running := [i for i in range(len(self._requests)) if len(self._outputs[i]) < num_tokens]:
            self._compute_step(running, 1)
        return self._outputs

    def _compute_step(self, running: list[int], chunk: int) -> None:
        """Computes one step of these requests."""
        starts = [self._computed[i] for i in running]
        parts = [self._tokens[i][self._computed[i] : self._computed[i] + chunk] for i in running]
        new = [self._admit(i) for i in running if self._computed[i] == 0]
        for at, i in enumerate(running):
            self._computed[i] += len(parts[at])
        draws = [(at, len(self._outputs[i])) for at, i in enumerate(running) if self._computed[i] == len(self._tokens[i])]
        pages = [self._allocate(i) for i in running]
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
        request = self._requests[row]
        sampling = wire.Sampling(
            max_tokens=1,
            seed=request.seed,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            **request.more,
        )
        history = list(self._tokens[row]) if needs_history(sampling) else []
        return NewRow(row, sampling, len(request.prompt), history, adapter=request.adapter)

    def prompt_details(self, row: int) -> dict[int, wire.TokenDetail]:
        """Returns the details of a request's prompt tokens, by position."""
        found: dict[int, wire.TokenDetail] = {}
        for plan, result in self.results:
            for request, start, details in result.prompt_details:
                if plan.rows[request] == row:
                    assert start == 1 + len(found), "details are in order"
                    found |= dict(enumerate(details, start))
        return found

    def details(self, row: int) -> list[wire.TokenDetail | None]:
        """Returns the details of a request's output tokens."""
        return [
            detail
            for plan, result in self.results
            for (request, _), detail in zip(plan.draws, result.details, strict=False)
            if plan.rows[request] == row
        ]

    def _allocate(self, row: int) -> list[int]:
        missing = -(-self._computed[row] // PAGE_SIZE) - len(self.pages[row])
        pages = [self._free.pop() for _ in range(missing)]
        self.pages[row] += pages
        return pages
