"""The target `fleet`: routers, groups, operator and clients in virtual time, in one process that lives for hours of it.

The fleet is that of `tests.router.search`, with its drawn requests and faults; those that replace a process are left out, so that
each router and group lives as long as the piece. Requests and faults come in rounds, each drawn from the seed and its number.
After a round the fleet is quiet for 90 s, and all invariants must hold. Seconds of the record are virtual.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from bench.soak.processes import use_of
from bench.soak.record import Piece, Recorder, Run, Sample, Settings, Strike, Use, Violation
from bench.virtual.execution import EPOCH_S, run_processes
from tests.router.search import faults, invariants, plan
from tests.router.search.fleet import FleetWorld, recorded_errors
from tests.router.search.plan import Kind, Plan
from tests.router.search.search import calm

SAMPLE_S = 20.0
REPLACING: tuple[Kind, ...] = ("kill", "lose", "drain", "restart operator")
"""Faults that start another process, of which the frame keeps the former."""
ROUTERS = 2


class LogVolume(logging.Handler):
    """Counts the bytes of messages of programs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.num_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_bytes += len(self.format(record)) + 1


def run_fleet(folder: Path, settings: Settings, former: Run | None, seconds: float) -> None:
    """Runs whole rounds until so much virtual time has passed, and appends to the record. former: the pieces before."""
    recorder, volume = Recorder(folder), LogVolume()
    if former is None:
        recorder.add(settings)
    program = logging.getLogger()
    level = program.level
    program.addHandler(volume)
    program.setLevel(logging.INFO)
    try:
        run_processes(_Piece(recorder, settings, former or Run(settings), volume).run(seconds))
    finally:
        program.removeHandler(volume)
        program.setLevel(level)
        recorder.close()


def rounds(settings: Settings, first: int = 0) -> Iterator[tuple[int, Plan]]:
    """Yields number and plan of each round, all of one size of fleet and without faults that replace a process."""
    size = _sized(plan.draw_burst(settings.seed), settings)
    for number in count(first):
        drawn = plan.draw_burst(random.Random(f"{settings.seed} round {number}").randrange(1 << 40))
        fitting = [ask for ask in drawn.asks if ask.max_tokens + len(ask.prompt) < size.num_pages * plan.PAGE_SIZE // 2]
        kept = [fault for fault in drawn.faults if fault.kind not in REPLACING]
        yield number, replace(size, life_s=drawn.life_s, asks=tuple(fitting), faults=tuple(kept))


def _sized(drawn: Plan, settings: Settings) -> Plan:
    """Returns a fleet of the wanted size without disks, whose pages the frame would keep for ever."""
    return replace(
        drawn, num_routers=ROUTERS, num_groups=settings.groups, num_pages=400, has_disk=False, asks=(), faults=(), step_s=0.1
    )


class _Piece:
    """One fleet."""

    def __init__(self, recorder: Recorder, settings: Settings, former: Run, volume: LogVolume) -> None:
        self._recorder = recorder
        self._settings = settings
        self._former = former
        self._volume = volume
        self._number = len(former.pieces)
        self._streams = Counter(former.streams)
        self._next_round = former.next_conversation
        self._next_strike = former.next_strike
        self._next_ask = 0

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._recorder.add(Piece(self._number, self._now(), EPOCH_S))
        size = _sized(plan.draw_burst(self._settings.seed), self._settings)
        world = FleetWorld(size, random.Random(f"network {self._settings.seed} {self._number}"))
        loop.set_exception_handler(lambda _, context: world.report(f"loop: {context.get('message')}"))
        with recorded_errors(world.report):
            world.start()
            sampling = asyncio.create_task(self._sample_repeatedly(world))
            for number, drawn in rounds(self._settings, self._next_round):
                await self._play(world, drawn)
                self._next_round = number + 1
                self._sample(world, is_idle=True)
                if loop.time() >= seconds:
                    break
            sampling.cancel()
        loop.set_exception_handler(lambda _, context: None)
        await world.close()

    def _now(self) -> float:
        return round(self._former.seconds + asyncio.get_running_loop().time(), 3)

    async def _play(self, world: FleetWorld, drawn: Plan) -> None:
        """Runs one round, and records its faults and violations."""
        start, at_s = asyncio.get_running_loop().time(), self._now()
        world.is_over, world.plan = False, drawn
        for ask in drawn.asks:
            world.start_client(replace(ask, number=self._next_ask, at=start + ask.at))
            self._next_ask += 1
        await faults.apply_all(world, drawn.faults, start)
        world.is_over = True
        world.plan = replace(drawn, faults=tuple(replace(fault, at=start + fault.at) for fault in drawn.faults))
        await calm(world, max([start + ask.at for ask in drawn.asks], default=start))
        for what in [*world.violations, *invariants.check(world)]:
            self._recorder.add(Violation(self._now(), what))
        for fault in drawn.faults:
            self._recorder.add(Strike(round(at_s + fault.at, 3), self._next_strike, f"{fault.kind}:{fault.where}", ""))
            self._next_strike += 1
        self._count(world)
        world.violations.clear()
        world.clients.clear()

    def _count(self, world: FleetWorld) -> None:
        for client in world.clients:
            reading = client.reading
            end = "whole" if reading.finish is not None else "cancelled" if reading.has_left else "lost"
            self._streams.update({end: 1, "tokens": len(reading.tokens), "resumed": bool(reading.num_resumed)})
            self._streams["repeated"] += len(reading.losses)

    async def _sample_repeatedly(self, world: FleetWorld) -> None:
        while True:
            self._sample(world)
            await asyncio.sleep(SAMPLE_S)

    def _sample(self, world: FleetWorld, *, is_idle: bool = False) -> None:
        values = dict(use_of(os.getpid()) or {}) | held_by(world) | {"log_bytes": float(self._volume.num_bytes)}
        uses = {"fleet": Use(str(self._number), values)}
        self._recorder.add(Sample(self._now(), self._number, uses, dict(self._streams), self._next_round, is_idle))


def held_by(world: FleetWorld) -> dict[str, float]:
    """Returns tasks, connections, pages in use of all groups, and journals of all routers."""
    registries = [router.backend.stream_registry for router in world.living_routers()]
    return {
        "tasks": float(len(asyncio.all_tasks())),
        "connections": float(len(world.net.sockets)),
        "used_pages": float(sum(group.shape.num_pages - group.scheduler.pool.free_pages for group in world.living_groups())),
        "journals": float(sum(len(found.store) + len(found.copies) + len(found.open_sessions()) for found in registries)),
    }
