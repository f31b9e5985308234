"""A router with many groups and streams in virtual time. `advance` runs it; between calls nothing happens.

The router is a real `phalanx_router.backend`, groups are real engines and schedulers with a fake model.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from bench.virtual.clock import VirtualLoop
from bench.virtual.group import Group, Shape
from bench.virtual.leader import TOKEN
from bench.virtual.net import DELIVERED, Fate, Network, Process
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.backend import RouterBackend
from phalanx_router.console.answers import ConsoleAnswers
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint, Leaders
from phalanx_router.metrics import GroupGauges, RouterMetrics
from phalanx_router.request_log import RequestLog
from phalanx_router.session import FleetSettings
from phalanx_router.summary import SummaryBuilder
from tests.runtime.fake_runner import VOCAB, make_request

SHAPE = Shape(num_pages=2000, max_num_seqs=48, num_ranks=1, step_s=0.2)
T = TypeVar("T")
TENANTS = ("red", "green", "blue")


class _Reliable:
    """Delivers every message."""

    def fate_of_message(self, sender: Process, receiver: Process, message: bytes) -> Fate:
        return DELIVERED

    def fate_of_pages(self, source: Group, target: Group) -> tuple[str, float]:
        return "delivered", 0.0


class _FixedGroups:
    def __init__(self, names: list[str]) -> None:
        self._leaders: Leaders = {name: Endpoint(key=name, address=name, group=name) for name in names}

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        on_change(self._leaders)
        await asyncio.Event().wait()


class VirtualFleet:
    """Streams that start again as others end. May be advanced by any thread."""

    def __init__(
        self,
        num_groups: int,
        num_streams: int,
        seed: int = 1,
        shapes: Sequence[Shape] = (SHAPE,),
        has_console: bool = False,
    ) -> None:
        """`has_console`: the router has one, whose data `console` answers."""
        self.names = [f"chat-g-{number:05}" for number in range(num_groups)]
        self.registry = CollectorRegistry()
        self._num_streams = num_streams
        self._shapes = shapes
        self._has_console = has_console
        self.console: ConsoleAnswers | None = None
        self._rng = random.Random(seed)
        self._loop = VirtualLoop()
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self.router = self._run(self._start())
        except BaseException:  # else garbage collection closes its coroutines in a later test
            self.close()
            raise

    def advance(self, seconds: float) -> None:
        """Runs the fleet for this time."""
        with self._lock:
            self._run(asyncio.sleep(seconds))
            for group in self._groups.values():
                group.runner.plans.clear()

    def move_some(self, count: int) -> int:
        """Starts to move random streams to random groups. Returns how many moves started."""
        with self._lock:
            return self._run(self._move_some(count))

    def read(self, read: Callable[[], T]) -> T:
        """Returns what a function reads of the router, on its event loop."""

        async def call() -> T:
            return read()

        with self._lock:
            return self._run(call())

    def close(self) -> None:
        """Ends all tasks."""
        with self._lock:
            self._run(self._end())
            self._loop.close()

    async def _end(self) -> None:
        for group in self._groups.values():
            group.end()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, action: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(action)

    async def _start(self) -> RouterBackend:
        tap, process = _Reliable(), Process("router")
        net = Network(self._rng, tap)
        for number, name in enumerate(self.names):
            group = self._groups[name] = Group(name, net, self._shapes[number % len(self._shapes)], number + 1, self._rng)
            group.carrier.tap, group.carrier.groups = tap, self._groups
        link, metrics = (
            LinkSettings(token=ServiceToken([TOKEN]), router="router", dial=net.dial_from(process)),
            RouterMetrics(self.registry),
        )
        settings, clock = FleetSettings(link=link), self._loop.time
        router = RouterBackend(settings, metrics, self._rng.random, clock)
        summaries = SummaryBuilder(router, metrics, "router", clock)
        self.registry.register(GroupGauges(summaries.groups))
        if self._has_console:
            router.request_log = RequestLog(clock)
            self.console = ConsoleAnswers(router, router.request_log, summaries.summary, settings, list, clock)
        self._tasks.append(asyncio.create_task(router.run(_FixedGroups(self.names))))
        while router.links.num_ready < len(self.names):
            await asyncio.sleep(0.01)
        self._tasks += [asyncio.create_task(self._ask(router, number)) for number in range(self._num_streams)]
        return router

    async def _ask(self, router: RouterBackend, number: int) -> None:
        """Sends one request after another."""
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, 2))
        while True:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(4, 40))]
            request = make_request(prompt, rng.randint(20, 120), seed=rng.randrange(10**6))
            async for _ in router.generate(msgspec.structs.replace(request, tenant=TENANTS[number % len(TENANTS)])):
                pass

    async def _move_some(self, count: int) -> int:
        router, started = self.router, 0
        running = [session for session in router.sessions if session.assignment is not None]
        links = router.links.staying()
        for session in self._rng.sample(running, min(count, len(running))):
            started += router.mover.move(session, self._rng.choice(links).key, "precopy", "manual") is None
        return started
