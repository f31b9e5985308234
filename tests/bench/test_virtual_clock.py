"""The event loop of fleets in virtual time runs what asyncio runs, in its order, and holds what a stopped process would run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bench.virtual.clock import Stuck, VirtualLoop, run_virtual
from bench.virtual.execution import Execution, ProcessLoop, run_processes

DAY_S = 86400.0


async def _order() -> list[str]:
    """Returns the order of timers, callbacks and tasks that are due together, and of some that are cancelled."""
    loop, seen = asyncio.get_running_loop(), list[str]()
    start = loop.time()
    for name in ("a", "b"):
        loop.call_at(start + 0.02, seen.append, f"later {name}")
        loop.call_at(start + 0.01, seen.append, f"timer {name}")
        loop.call_soon(seen.append, f"soon {name}")
    loop.call_later(0.01, loop.call_soon, seen.append, "soon of a timer")
    for handle in (loop.call_later(0.01, seen.append, "no"), loop.call_soon(seen.append, "no")):
        handle.cancel()
        assert handle.cancelled()

    async def work(name: str) -> None:
        for count in range(3):
            seen.append(f"task {name}{count}")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for name in ("x", "y"):
            tasks.create_task(work(name))
    loop.call_soon_threadsafe(seen.append, "of a thread")
    await asyncio.sleep(0.05)
    return seen


def test_order_is_that_of_asyncio() -> None:
    usual = asyncio.run(_order())
    assert run_virtual(_order()) == run_processes(_order()) == usual
    assert len(usual) == 14


def test_clock_jumps_to_the_next_timer() -> None:
    async def run() -> float:
        await asyncio.sleep(DAY_S)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == DAY_S


def test_a_deadlock_is_found() -> None:
    async def run() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        run_virtual(run())


@pytest.mark.parametrize("make", [VirtualLoop, ProcessLoop])
def test_failed_callback_is_reported_and_ends_nothing(make: Callable[[], VirtualLoop]) -> None:
    reported: list[dict[str, Any]] = []

    async def run() -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        loop.call_soon(lambda: 1 // 0)
        loop.call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(2.0)
        return len(reported)

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(run()) == 2
    assert all(isinstance(context["exception"], ZeroDivisionError) for context in reported)


def test_stopped_process_runs_what_waited_in_order() -> None:
    async def run() -> list[tuple[str, float]]:
        loop, seen, execution = asyncio.get_running_loop(), list[tuple[str, float]](), Execution("one")

        def see(name: str) -> None:
            seen.append((name, loop.time()))

        for at in (1.0, 2.0, 3.0, 9.0):
            execution.run(loop.call_at, at, see, f"timer {at:.0f}")
        dropped = execution.run(loop.call_at, 2.5, see, "cancelled while it waits")
        loop.call_at(2.0, see, "of none")
        await asyncio.sleep(1.5)
        execution.freeze()
        execution.run(loop.call_soon, see, "soon")
        await asyncio.sleep(3.5)
        dropped.cancel()
        execution.thaw()
        await asyncio.sleep(5.0)
        execution.kill()
        execution.run(loop.call_soon, see, "of the dead")
        await asyncio.sleep(1.0)
        return seen

    of_none, held = ("of none", 2.0), [("soon", 5.0), ("timer 2", 5.0), ("timer 3", 5.0)]
    assert run_processes(run()) == [("timer 1", 1.0), of_none, *held, ("timer 9", 9.0)]
