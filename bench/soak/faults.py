"""Faults in an order that follows from the seed. After each, the fleet must serve again before the next one."""

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from bench.soak.fleet import TOKEN, Fleet, Member, send_signal, wait_until_ended
from bench.soak.processes import children
from bench.soak.traffic import Traffic
from phalanx_api.wire import PROTOCOL_VERSION

READY_S = 300.0
PAUSE_S = 0.5, 8.0
EVACUATION_S = 3.0, 8.0
END_S = 60.0
"""Time of a program to end by itself."""
KINDS = (
    "kill rank",
    "kill leader",
    "kill group",
    "restart group",
    "kill router",
    "restart router",
    "pause",
    "evacuate",
    "move",
    "disconnect",
)
_GENTLE = frozenset({"pause", "evacuate", "move", "disconnect"})
_SHARES = [4 if kind in _GENTLE else 1 for kind in KINDS]
"""Most faults end no process, so that processes live long enough to show what grows."""


def kind_of(seed: int, number: int) -> tuple[str, random.Random]:
    """Returns the kind of a fault and the generator for its details. The first ones are all kinds, shuffled."""
    rng = random.Random(f"{seed} fault {number}")
    if number < len(KINDS):
        return random.Random(f"{seed} first faults").sample(KINDS, len(KINDS))[number], rng
    return rng.choices(KINDS, _SHARES)[0], rng


class Faults:
    """Strikes one fleet."""

    def __init__(self, fleet: Fleet, violated: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._violated = violated
        self._policy = 0
        self._kinds: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "kill rank": self._kill_rank,
            "kill leader": lambda rng: self._kill(rng, self._fleet.groups, is_whole=False),
            "kill group": lambda rng: self._kill(rng, self._fleet.groups, is_whole=True),
            "restart group": lambda rng: self._restart(rng, self._fleet.groups),
            "kill router": lambda rng: self._kill(rng, self._fleet.routers, is_whole=False),
            "restart router": lambda rng: self._restart(rng, self._fleet.routers),
            "pause": self._pause,
            "evacuate": self._evacuate,
            "move": self._move,
        }

    async def strike(self, kind: str, rng: random.Random, traffic: Traffic) -> str:
        """Causes the fault, waits until all programs are ready, and returns what was done."""
        if kind == "disconnect":
            return f"{traffic.disconnect(0.6, rng)} clients disconnected"
        outcome = await self._kinds[kind](rng)
        started = time.monotonic()
        await self.wait_ready()
        return f"{outcome}; ready after {time.monotonic() - started:.1f} s"

    async def wait_ready(self) -> None:
        """Waits until all programs are ready; after the limit it records violations."""
        end = time.monotonic() + READY_S
        while late := [member for member in self._fleet.members if not await _is_ready(member)]:
            for member in late:
                if (status := member.status()) is not None:
                    self._violated(f"{member.name} has ended with {status}")
                    member.start()
            if time.monotonic() > end:
                return self._violated(f"not ready after {READY_S:.0f} s: {', '.join(member.name for member in late)}")
            await asyncio.sleep(0.5)

    async def _kill_rank(self, rng: random.Random) -> str:
        group = rng.choice(_struck(self._fleet.groups))
        ranks = group.ranks()
        if not ranks:
            return f"{group.name} has no rank"
        number = rng.randrange(len(ranks))
        send_signal(ranks[number].pid, signal.SIGKILL)
        await asyncio.sleep(2)  # until its leader has noticed
        return f"rank {number} of {group.name} killed"

    async def _kill(self, rng: random.Random, members: Sequence[Member], *, is_whole: bool) -> str:
        member = rng.choice(_struck(members))
        parts = children(member.pid)
        member.kill(is_whole=is_whole)
        for part in await asyncio.to_thread(wait_until_ended, parts, END_S):
            self._violated(f"a {part.module} of {member.name} runs {END_S:.0f} s after its parent was killed")
        await asyncio.sleep(rng.uniform(0, 3))
        member.start()
        return f"{member.name} killed{' with its ranks' if is_whole else ''}"

    async def _restart(self, rng: random.Random, members: Sequence[Member]) -> str:
        member = rng.choice(_struck(members))
        try:
            status = await asyncio.to_thread(member.terminate, END_S)
        except subprocess.TimeoutExpired:
            self._violated(f"{member.name} did not end within {END_S:.0f} s after SIGTERM")
            member.end()
            status = None
        member.start()
        return f"{member.name} ended with {status} and started again"

    async def _pause(self, rng: random.Random) -> str:
        """Stops one process, which may be a rank, a leader or a router, of spared programs too."""
        pids = [item for member in [*self._fleet.groups, *self._fleet.routers] for item in member.pids().items()]
        name, pid = rng.choice(pids)
        seconds = rng.uniform(*PAUSE_S)
        send_signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(pid, signal.SIGCONT)  # its supervisor may have ended it
        return f"{name} stopped for {seconds:.1f} s"

    async def _evacuate(self, rng: random.Random) -> str:
        group, seconds = rng.choice(self._fleet.groups), rng.uniform(*EVACUATION_S)
        await self._set_policy([_address(group)])
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._set_policy([])
        return f"{group.name} evacuated for {seconds:.1f} s"

    async def _set_policy(self, evacuated: list[str]) -> None:
        self._policy += 1
        policy = {"number": self._policy, "mode": "Migrate", "routers": len(self._fleet.routers), "empty": evacuated}
        for router in self._fleet.routers:
            await self._order(router, "/phalanx/summary", {"policy": policy, "wait_s": 0.0, "version": PROTOCOL_VERSION})

    async def _move(self, rng: random.Random) -> str:
        group = rng.choice(self._fleet.groups)
        order = {"group": _address(group), "count": 8}
        started = [await self._order(router, "/phalanx/moves", order) for router in self._fleet.routers]
        return f"streams moved off {group.name}: {'; '.join(started)}"

    async def _order(self, router: Member, path: str, body: dict[str, object]) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
                session.post(f"{router.url}{path}", json=body, headers=headers) as response,
            ):
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, text = 0, repr(error)
        if status != 200:
            self._violated(f"{router.name} answers {status} to {path}: {text[:200]}")
        return text[:120]


async def _is_ready(member: Member) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(f"{member.url}/readyz") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _struck(members: Sequence[Member]) -> list[Member]:
    return [member for member in members if not member.is_spared] or list(members)


def _address(group: Member) -> str:
    return f"127.0.0.1:{group.port}"
