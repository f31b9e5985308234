"""Runs fleets, and shortens counterexamples.

run        one plan: its violations
calm       waits until nothing is left of a plan
shorten    drops faults while any violation remains
"""

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.virtual.execution import run_processes
from tests.router.search import faults, invariants
from tests.router.search.fleet import FleetWorld, recorded_errors
from tests.router.search.plan import Plan
from tests.router.search.planned import PlannedWorld

CALM_S, MAX_CALM_S = 90.0, 300.0
"""After the last fault: at least, as journals are kept a minute, and the longest wait for streams without a token."""
CPU_S = 300.0
"""Of one fleet, after which it counts as a livelock."""


@dataclass(slots=True)
class Outcome:
    """What a fleet did."""

    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    streams: int = 0
    tokens: int = 0
    resumed: int = 0
    restarted: int = 0
    moved: int = 0
    fetched: int = 0
    """Pages that groups read from disk."""
    faults: int = 0
    parts: int = 0
    """Parts of the plan until the end, or the first violation."""
    wall_s: float = field(default=0.0, compare=False)
    cpu_s: float = field(default=0.0, compare=False)


class Livelock(SystemExit):
    """A fleet computes without end. asyncio passes SystemExit on; it keeps any other exception in the task."""


def run(plan: Plan) -> Outcome:
    """Runs one fleet."""
    outcome, wall_s, cpu_s = Outcome(faults=len(plan.faults)), time.monotonic(), time.process_time()
    try:
        with _bounded():
            run_processes(_run(plan, outcome))
    except (Exception, Livelock) as error:
        outcome.violations.append(f"failed: {type(error).__name__}: {error}")
    outcome.wall_s, outcome.cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    return outcome


async def _run(plan: Plan, outcome: Outcome) -> None:
    world = (PlannedWorld if plan.has_planner else FleetWorld)(plan, random.Random(f"network {plan.seed}"))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: world.report(f"loop: {context.get('message')} {context.get('exception')!r}"))
    with recorded_errors(world.report):
        world.start()
        for last, chosen in plan.events():
            world.is_over = False
            outcome.parts += 1
            await faults.apply_all(world, chosen)
            world.is_over = True
            if await calm(world, last):
                world.violations += invariants.check(world)
            if world.violations:
                break
    outcome.violations, outcome.virtual_s = world.violations, loop.time()
    loop.set_exception_handler(lambda _, context: None)
    readings = [client.reading for client in world.clients]
    outcome.streams, outcome.tokens = len(readings), sum(len(reading.tokens) for reading in readings)
    outcome.resumed = sum(reading.num_resumed for reading in readings)
    outcome.restarted = sum(len(reading.losses) for reading in readings)
    outcome.moved = world.num_moved + sum(router.num_moved for router in world.routers.values())
    outcome.fetched = world.num_fetched
    await world.close()


async def calm(world: FleetWorld, last: float) -> bool:
    """Waits until all streams should have ended, and what is kept of them too. last: time of the last request.

    Returns whether no request of the next part has come meanwhile: an overloaded fleet may need so long.
    """
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, last - loop.time()))
    start = progressed_at = loop.time()
    asked = [client for client in world.clients if client.ask.at <= start]
    progress = 0
    while loop.time() < progressed_at + MAX_CALM_S and not all(client.has_ended for client in asked):
        await asyncio.sleep(1.0)
        before, progress = progress, sum(client.has_ended + len(client.reading.tokens) for client in asked)
        if progress != before:  # an overloaded fleet needs longer
            progressed_at = loop.time()
    await asyncio.sleep(CALM_S)
    while loop.time() < start + MAX_CALM_S and not world.is_settled:
        await asyncio.sleep(1.0)
    return not any(max(start, last) < client.ask.at <= loop.time() for client in world.clients)


@contextmanager
def _bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Livelock(f"more than {CPU_S:.0f} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def shorten(plan: Plan, tries: int = 40) -> tuple[Plan, Outcome]:
    """Returns a smaller plan that violates something, and what."""
    outcome = run(plan)
    best = plan.first(outcome.parts)
    size = max(1, len(plan.faults) // 2)
    while tries and outcome.violations:
        numbers = [fault.number for fault in best.faults]
        smaller = None
        for start in range(0, len(numbers), size):
            tries -= 1
            candidate = best.only({number for number in numbers if number not in numbers[start : start + size]})
            found = run(candidate)
            if found.violations:
                smaller = candidate, found
                break
            if not tries:
                break
        if smaller is not None:
            best, outcome = smaller
        elif size > 1:
            size //= 2
        else:
            break
    return best, outcome
