"""A piece of a run on this machine: routers and groups as processes, clients, faults, and a sample every few seconds."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp

from bench.frame.programs import descendants
from bench.soak.faults import Faults, kind_of
from bench.soak.fleet import Fleet, make_fleet
from bench.soak.gauges import GROUP_GAUGES, ROUTER_GAUGES, gauges, held, leaks
from bench.soak.processes import start_of
from bench.soak.record import Piece, Recorder, Run, Sample, Settings, Strike, Use, Violation
from bench.soak.traffic import Traffic

SAMPLE_S = 5.0
IDLE_EVERY = 12
"""Faults between two checks that a fleet without requests holds nothing."""
IDLE_LIMIT_S = 180.0
"""Until every page has returned: more than the lease of a stream whose router was killed."""
RUNNING = "running.json"
"""Processes of the fleet, so that a resumed run ends those that a killed one left."""


async def run_piece(folder: Path, settings: Settings, former: Run | None, seconds: float) -> None:
    """Runs for so long, or until SIGTERM or SIGINT, and appends to the record."""
    _end_remaining(folder)
    recorder = Recorder(folder)
    if former is None:
        recorder.add(settings)
    fleet = make_fleet(folder, settings.groups)
    piece = _Piece(fleet, recorder, settings, former or Run(settings), folder)
    try:
        await piece.run(seconds)
    finally:
        await asyncio.to_thread(fleet.end)
        (folder / RUNNING).unlink(missing_ok=True)
        recorder.close()


class _Piece:
    """The tasks of one piece."""

    def __init__(self, fleet: Fleet, recorder: Recorder, settings: Settings, former: Run, folder: Path) -> None:
        self._fleet = fleet
        self._recorder = recorder
        self._settings = settings
        self._former = former
        self._folder = folder
        self._number = len(former.pieces)
        self._started = time.monotonic()
        self._is_idle = False
        urls = [router.url for router in fleet.routers]
        self._traffic = Traffic(urls, fleet.reference.url, settings.seed, former.next_conversation, self._violated)

    async def run(self, seconds: float) -> None:
        self._recorder.add(Piece(self._number, self._now(), time.time()))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            faults = Faults(self._fleet, self._traffic, session, self._violated)
            for member in self._fleet.members:
                member.start()
            self._note_running()
            await faults.wait_ready()
            tasks = [
                asyncio.create_task(self._traffic.run(self._settings.clients)),
                asyncio.create_task(self._sample_repeatedly(session)),
                asyncio.create_task(self._strike_repeatedly(faults, session)),
            ]
            try:
                await self._wait(stop, tasks, seconds)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]], seconds: float) -> None:
        """Waits for the time or the signal. Raises what a task raises."""
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            task.result()

    def _now(self) -> float:
        return round(self._former.seconds + time.monotonic() - self._started, 3)

    def _violated(self, what: str) -> None:
        print(f"{self._now():.0f} s: VIOLATION: {what}", file=sys.stderr, flush=True)
        self._recorder.add(Violation(self._now(), what))

    async def _sample_repeatedly(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._recorder.add(await self._sample(session))
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self, session: aiohttp.ClientSession) -> Sample:
        uses = dict[str, Use]()
        for member in self._fleet.members:
            uses |= member.uses()
        for name, values in (await self._gauges(session)).items():
            if name in uses:
                uses[name].values.update(values)
        streams = dict(Counter(self._former.streams) + self._traffic.counts)
        return Sample(self._now(), self._number, uses, streams, self._traffic.next_conversation, self._is_idle)

    async def _gauges(self, session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
        """Returns the gauges of the programs that answer."""
        found = dict[str, dict[str, float]]()
        for member in self._fleet.members:
            names = ROUTER_GAUGES if member in self._fleet.routers else GROUP_GAUGES
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(f"{member.url}/metrics", timeout=aiohttp.ClientTimeout(total=2)) as response:
                    found[member.name] = gauges(await response.text(), names)
        return found

    async def _strike_repeatedly(self, faults: Faults, session: aiohttp.ClientSession) -> None:
        number = self._former.next_strike
        while True:
            await asyncio.sleep(self._settings.fault_every_s)
            kind, rng = kind_of(self._settings.seed, number)
            at_s = self._now()
            outcome = await faults.strike(kind, rng)
            self._note_running()
            self._recorder.add(Strike(at_s, number, kind, outcome))
            print(f"{at_s:.0f} s, {kind}: {outcome}; {dict(self._traffic.counts)}", file=sys.stderr, flush=True)
            number += 1
            if number % IDLE_EVERY == 0:
                await self._check_idle(session)

    async def _check_idle(self, session: aiohttp.ClientSession) -> None:
        """Lets all clients end their turns, and waits until the fleet holds nothing. What remains is a violation."""
        self._traffic.pause()
        end, found = time.monotonic() + IDLE_LIMIT_S, ["clients wait for answers"]
        while found and time.monotonic() < end:
            await asyncio.sleep(1)
            if self._traffic.is_quiet:
                values = await self._gauges(session)
                found = held(values) + [f"{member.name} is silent" for member in self._fleet.members if member.name not in values]
        for what in {*found, *leaks(await self._gauges(session))}:
            self._violated(f"idle: {what}")
        self._is_idle = True
        self._recorder.add(await self._sample(session))
        self._is_idle = False
        self._traffic.resume()

    def _note_running(self) -> None:
        pids = {member.pid: start_of(member.pid) for member in self._fleet.members}
        (self._folder / RUNNING).write_text(json.dumps(pids))


def _end_remaining(folder: Path) -> None:
    """Kills the processes of a run that was killed."""
    path = folder / RUNNING
    if not path.exists():
        return
    for pid, started in json.loads(path.read_text()).items():
        if started and start_of(int(pid)) == started:
            for each in [int(pid), *descendants(int(pid))]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
    path.unlink()
