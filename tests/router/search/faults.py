"""Applies the faults of a plan to a fleet."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from bench.virtual.disk import Disk
from bench.virtual.execution import Execution
from bench.virtual.group import Group
from bench.virtual.net import Process
from phalanx_frontend.errors import ApiError
from phalanx_router.migration.manual import GroupMoveOrder
from tests.control.search.steps import NODES
from tests.router.search.fleet import FleetWorld
from tests.router.search.plan import Fault
from tests.router.search.planned import PlannedWorld

T = TypeVar("T")


async def apply_all(world: FleetWorld, faults: Sequence[Fault], start: float = 0.0) -> None:
    """Applies faults at their times since `start`. Returns after the last one has healed."""
    loop = asyncio.get_running_loop()
    last = 0.0
    for fault in faults:
        await asyncio.sleep(max(0.0, start + fault.at - loop.time()))
        last = max(last, fault.at + fault.seconds)
        _apply(world, fault)
    await asyncio.sleep(max(0.0, start + last - loop.time()) + 0.1)


def _pick(found: Sequence[T], number: int) -> T | None:
    return found[number % len(found)] if found else None


def _of_kind(world: FleetWorld, kind: str) -> list[Process]:
    match kind:
        case "router":
            return list(world.living_routers())
        case "leader":
            return list(world.living_groups())
        case "client":
            return list(world.machines)
        case "api":
            return [world.leaders.api]
        case _:
            return [world.operator] if world.operator is not None else []


def _apply(world: FleetWorld, fault: Fault) -> None:
    if fault.kind in ("silence", "late watch"):
        _apply_to_api(world, fault)
        return
    if "-" in fault.where:
        _apply_to_pair(world, fault)
        return
    process = _pick(_of_kind(world, fault.where), fault.one)
    if process is None:
        return
    is_router = fault.where == "router"
    match fault.kind:
        case "freeze" if process.execution is not None:
            process.execution.freeze()
            world.later(fault.seconds, process.execution.thaw)
        case "clock" if process.execution is not None:
            process.execution.wall_offset_s += (fault.other - 6) * 60.0 * fault.seconds
        case "kill" | "lose":
            end = world.end_router if is_router else world.end_group
            end(process.name, fault.kind == "lose")
        case "drain":
            (world.drain_router if is_router else world.drain_group)(process.name)
        case "move":
            _move(world, fault, process)
        case "slow disk" | "lost pages" if isinstance(process, Group):
            _disturb(world, fault, process.disk)
        case "restart operator":
            world.end_process(process, is_lost=False)
            world.later(fault.seconds, world.start_operator)
            world.operator = None


def _apply_to_api(world: FleetWorld, fault: Fault) -> None:
    """A fleet without a planning operator has no API server."""
    if not isinstance(world, PlannedWorld):
        return
    if fault.kind == "late watch":
        world.delay_watch(fault.one, fault.seconds)
    else:
        world.silence_nodes(fault.one, 1 if fault.where == "node" else 2 + fault.other % (NODES - 1), fault.seconds)


def _apply_to_pair(world: FleetWorld, fault: Fault) -> None:
    first, second = fault.where.split("-")
    one = _pick(_of_kind(world, first), fault.one)
    other = _pick([process for process in _of_kind(world, second) if process is not one], fault.other)
    if one is None or other is None:
        return
    pairs = [(one.name, other.name), (other.name, one.name)]
    match fault.kind:
        case "cut" | "one way":
            for pair in pairs if fault.kind == "cut" else [pairs[fault.number % 2]]:
                world.net.cuts.cut(*pair)
                world.later(fault.seconds, partial(world.net.cuts.heal, *pair))
        case "slow":
            for pair in pairs:
                world.slow[pair] = min(fault.seconds / 4, 2.0)
                world.later(fault.seconds, partial(world.slow.pop, pair, None))
        case "drop":
            for socket in [socket for socket in world.net.sockets if {one, other} == set(socket.processes)]:
                socket.close()
        case "corrupt pages":
            world.corrupts_pages = True
            world.later(fault.seconds, lambda: setattr(world, "corrupts_pages", False))


def _disturb(world: FleetWorld, fault: Fault, disk: Disk) -> None:
    """Makes a disk slow, so that some reads exceed the limit of their wait, or lets it lose pages."""
    if fault.kind == "slow disk":
        disk.delay_s = 0.2 * (1 + fault.other) ** 2
        world.later(fault.seconds, lambda: setattr(disk, "delay_s", 0.0))
    else:
        disk.loses_pages = True
        world.later(fault.seconds, lambda: setattr(disk, "loses_pages", False))


def _move(world: FleetWorld, fault: Fault, group: Process) -> None:
    """Orders a router to move streams of a group, as an administrator does."""
    router = _pick([router for router in world.living_routers() if not router.is_stopped], fault.other)
    if router is not None and isinstance(router.execution, Execution):
        with contextlib.suppress(ApiError):
            router.execution.run(router.moves.start, GroupMoveOrder(group.name, count=1 + fault.number % 5))
