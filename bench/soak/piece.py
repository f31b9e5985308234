"""A piece of a run: clients, faults, and a sample every few seconds, until the time is over or a signal comes."""

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp

from bench.soak.gauges import held, leaks
from bench.soak.record import Piece, Recorder, Run, Sample, Settings, Strike, Use, Violation
from bench.soak.traced import conversations_of
from bench.soak.traffic import Traffic

SAMPLE_S = 5.0
IDLE_EVERY = 12
"""Faults between two checks that a service without requests holds nothing."""
IDLE_LIMIT_S = 180.0
"""Until every page has returned: more than the lease of a stream whose router was killed."""


class Target(Protocol):
    """What is soaked."""

    @property
    def routers(self) -> Sequence[str]:
        """URLs that clients ask in turn."""

    @property
    def reference(self) -> str:
        """URL of an engine with the same model that nothing disturbs."""

    async def start(self, violated: Callable[[str], None]) -> None:
        """Starts everything and waits until it serves. violated: called with whatever must not happen, then and later."""

    async def uses(self) -> dict[str, Use]:
        """Returns what each process uses, by name."""

    async def gauges(self, session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
        """Returns what the programs say at `/metrics`, by the name of their process; nothing of one that does not answer."""

    async def strike(self, number: int, traffic: Traffic) -> tuple[str, str]:
        """Causes a fault, waits for the recovery, and returns kind and outcome."""

    def end(self) -> None:
        """Ends everything."""


async def run_piece(folder: Path, target: Target, settings: Settings, former: Run | None, seconds: float) -> None:
    """Runs for so long, or until SIGTERM or SIGINT, and appends to the record. former: the pieces before."""
    recorder = Recorder(folder)
    if former is None:
        recorder.add(settings)
    piece = _Piece(target, recorder, settings, former or Run(settings))
    try:
        await piece.run(seconds)
    finally:
        await asyncio.to_thread(target.end)
        recorder.close()


class _Piece:
    """The tasks of one piece."""

    def __init__(self, target: Target, recorder: Recorder, settings: Settings, former: Run) -> None:
        self._target = target
        self._recorder = recorder
        self._settings = settings
        self._former = former
        self._conversations = conversations_of(settings)
        self._number = len(former.pieces)
        self._started = time.monotonic()

    async def run(self, seconds: float) -> None:
        self._recorder.add(Piece(self._number, self._now(), time.time()))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await self._target.start(self._violated)
        first = self._former.next_conversation
        traffic = Traffic(self._target.routers, self._target.reference, self._conversations, first, self._violated)
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.create_task(traffic.run(self._settings.clients)),
                asyncio.create_task(self._sample_repeatedly(traffic, session)),
                asyncio.create_task(self._strike_repeatedly(traffic, session)),
            ]
            stopping = asyncio.create_task(stop.wait())
            try:
                await _first_end([stopping, *tasks], seconds)
            finally:
                for task in (stopping, *tasks):
                    task.cancel()
                await asyncio.gather(stopping, *tasks, return_exceptions=True)

    def _now(self) -> float:
        return round(self._former.seconds + time.monotonic() - self._started, 3)

    def _violated(self, what: str) -> None:
        print(f"{self._now():.0f} s: VIOLATION: {what}", file=sys.stderr, flush=True)
        self._recorder.add(Violation(self._now(), what))

    async def _sample_repeatedly(self, traffic: Traffic, session: aiohttp.ClientSession) -> None:
        while True:
            await self._sample(traffic, session)
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self, traffic: Traffic, session: aiohttp.ClientSession, *, is_idle: bool = False) -> None:
        uses, gauges = await self._target.uses(), await self._target.gauges(session)
        for name, values in gauges.items():
            if name in uses:
                uses[name].values.update(values)
        streams = dict(Counter(self._former.streams) + traffic.counts)
        self._recorder.add(Sample(self._now(), self._number, uses, streams, traffic.next_conversation, is_idle))

    async def _strike_repeatedly(self, traffic: Traffic, session: aiohttp.ClientSession) -> None:
        number = self._former.next_strike
        while True:
            await asyncio.sleep(self._settings.fault_every_s)
            at_s = self._now()
            kind, outcome = await self._target.strike(number, traffic)
            self._recorder.add(Strike(at_s, number, kind, outcome))
            print(f"{at_s:.0f} s, {kind}: {outcome}; {dict(traffic.counts)}", file=sys.stderr, flush=True)
            number += 1
            if number % IDLE_EVERY == 0:
                await self._check_idle(traffic, session)

    async def _check_idle(self, traffic: Traffic, session: aiohttp.ClientSession) -> None:
        """Lets all clients end their turns, and waits until the service holds nothing. What remains is a violation."""
        traffic.pause()
        end, found = time.monotonic() + IDLE_LIMIT_S, ["clients wait for answers"]
        while found and time.monotonic() < end:
            await asyncio.sleep(1)
            if traffic.is_quiet:
                found = remains(await self._target.gauges(session))
        for what in [*found, *leaks(await self._target.gauges(session))]:
            self._violated(f"idle: {what}")
        await self._sample(traffic, session, is_idle=True)
        traffic.resume()


def remains(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a sentence for each program that holds something or does not answer."""
    return held(values) + [f"{name} does not answer" for name, found in values.items() if not found]


async def _first_end(tasks: Sequence["asyncio.Task[object]"], seconds: float) -> None:
    """Waits until a task ends, or for the time. Raises what the task raises."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
