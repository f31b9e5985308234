"""A router, groups and clients in virtual time, and a fault at one step of a move.

The router is a real `phalanx_router.backend`. When it dies, its clients reconnect to the next one: in some runs by the id of the
stream, which a leader may have kept as an orphan, in the others by replaying their tokens.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from bench.virtual.clients import Client
from bench.virtual.group import Group, Shape
from bench.virtual.leader import TOKEN
from bench.virtual.net import DELIVERED, Fate, Network, Process
from phalanx_api import wire
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint, Leaders
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.board import MoveBoard
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import MoveEnded, MoveRequest, MoveSettings, TransferMode
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_runtime.core.migration.records import MoveLimits
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import TargetMoves
from tests.runtime.fake_runner import VOCAB, make_request

Role = Literal["source", "target", "router"]
Fault = Literal["killed", "hung", "dropped", "delayed", "corrupted"]
STEPS = ("propose", "prepare", "pre-copy", "freeze", "ready", "commit", "decode", "release")
ROLES: tuple[Role, ...] = get_args(Role)
FAULTS: tuple[Fault, ...] = get_args(Fault)
NUM_TOKENS, ENDLESS_TOKENS = 30, 3000
"""Tokens that clients read; `max_tokens` of a request with a client that disconnects."""
RESUME_SHARE = 0.3
"""Share of runs with resumable requests."""
SETTLE_S = 1.0
CHECK_S, NUM_CHECKS = 2.0, 12
"""Seconds between checks after the last stream, and their number: more than the longest hang and lease, less than an aborted
request would run.
"""
FRAME_STEPS = {b"prepare": 1, b"move_out": 2, b"frozen": 3, b"arrived": 4, b"release": 7}
NOISE = 0.03
"""Share of move frames that are duplicated or lost, independent of the fault."""
NOISY = frozenset({b"prepared", b"frozen", b"arrived", b"move_failed", b"thaw", b"release", b"cancel", b"move_out", b"prepare"})
LOSABLE = NOISY | {b"submit"}


@dataclass(frozen=True, slots=True)
class Cell:
    step: int
    role: Role
    fault: Fault

    def __str__(self) -> str:
        return f"{STEPS[self.step]} / {self.role} / {self.fault}"


@dataclass(slots=True)
class Outcome:
    violations: list[str] = field(default_factory=list)
    has_struck: bool = False  # whether the move reached the step
    ends: list[str] = field(default_factory=list)  # outcomes of moves
    resumed: int = 0  # streams that the next router found


@dataclass(frozen=True, slots=True)
class Machines:
    """Factories of source, target and router state machines. Tests pass incorrect ones, which must be detected."""

    source: Callable[[int, MoveLimits], SourceMoves] = SourceMoves
    target: Callable[[int, MoveLimits], TargetMoves] = TargetMoves
    move: Callable[[MoveRequest, MoveSettings], Move] = Move
    checks_pages: bool = True


def frame_tag(message: bytes) -> bytes:
    """Returns the tag of an encoded frame."""
    return message[2 : 2 + (message[1] & 0x1F)] if len(message) > 2 else b""


class World:
    def __init__(
        self,
        seed: int,
        cell: Cell | None,
        shape: Shape | None = None,
        machines: Machines | None = None,
        disconnect_share: float = 0.15,
    ) -> None:
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self.net = Network(self.rng, self)
        num_pages = 40 if self.rng.random() < 0.15 else 400
        self.shape = shape or Shape(num_pages=num_pages, flights=self.rng.choice((1, 1, 2)), num_ranks=self.rng.choice((1, 2)))
        self.groups: dict[str, Group] = {}
        self._disconnect_share = disconnect_share
        # A generator of its own leaves the other draws of a seed unchanged.
        self._may_resume = random.Random(f"{seed} resumes").random() < RESUME_SHARE
        self._is_salted = self.rng.random() < 0.5
        self._machines = machines or Machines()
        self.router = Process("router")
        self.fleet: RouterBackend | None = None
        self.source = self.target = ""
        self._cell = cell
        self._pending_fault: str | None = None
        self._is_page_fault = False
        self._incarnations = 0
        self._fleet_task: asyncio.Task[None] | None = None
        self.clients: dict[str, Client] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # Fates of messages

    def fate_of_message(self, sender: Process, receiver: Process, message: bytes) -> Fate:
        """Applies the fault at its step; otherwise now and then duplicates or loses a frame of a move."""
        tag = frame_tag(message)
        cell = self._cell
        if cell is not None and self.source and not self.outcome.has_struck and self._is_step(cell.step, tag, sender, message):
            self._strike(cell)
        if self._pending_fault is not None and not self._is_page_fault and sender is self._faulty_process():
            return self._apply_fault(tag)
        if tag in NOISY and (draw := self.rng.random()) < NOISE:
            return Fate("duplicated" if draw < NOISE / 2 else "lost")
        return DELIVERED

    def fate_of_pages(self, source: Group, target: Group) -> tuple[str, float]:
        """Applies the fault to pages in transfer; returns the kind of fate and the delay."""
        if self._pending_fault is not None and self._is_page_fault and source is self._faulty_process():
            fate = self._apply_fault(b"")
            return fate.kind, fate.delay_s
        return "delivered", 0.0

    def _is_step(self, step: int, tag: bytes, sender: Process, message: bytes) -> bool:
        if step == 5:
            return tag == b"submit" and bool(wire.decode_to_leader(message).move)
        if step == 6:
            return tag == b"tokens" and sender.name == self.target and 1 in wire.decode_from_leader(message).epochs
        return FRAME_STEPS.get(tag) == step

    def _faulty_process(self) -> Process:
        assert self._cell is not None, "only with a fault"
        if self._cell.role == "router":
            return self.router
        return self.groups[self.source if self._cell.role == "source" else self.target]

    def _strike(self, cell: Cell) -> None:
        self.outcome.has_struck = True
        if cell.fault in ("killed", "hung"):
            self._after(self.rng.choice((0.0, self.rng.uniform(0, 0.01))), self._stop_process)
        else:
            self._pending_fault = cell.fault
            self._is_page_fault = cell.role == "source" and cell.step in (2, 3) and self.rng.random() < 0.7

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, action)
        else:
            action()

    def _stop_process(self) -> None:
        process = self._faulty_process()
        assert self._cell is not None, "only with a fault"
        if self._cell.fault == "hung":
            process.hang(10 ** self.rng.uniform(-1.5, 1.0))
        elif process is self.router:
            self.kill_router()
        else:
            self.kill_group(process.name)

    def _apply_fault(self, tag: bytes) -> Fate:
        """Applies the fault to this message. A message that TCP would not lose alone closes its connection."""
        fault, self._pending_fault = self._pending_fault, None
        match fault:
            case "delayed":
                return Fate("delivered", 10 ** self.rng.uniform(-1.5, 1.0))
            case "corrupted":
                return Fate("corrupted")
            case _:
                alone = tag in LOSABLE or not tag
                return Fate("lost" if alone and self.rng.random() < 0.5 else "closed")

    # Processes

    def start_group(self, name: str) -> None:
        self._incarnations += 1
        salt = self._is_salted * (1 + len(self.groups) if name not in self.groups else self.groups[name].runner.salt)
        group = self.groups[name] = Group(name, self.net, self.shape, self._incarnations, self.rng, salt)
        group.moves.source = self._machines.source(self.shape.page_size, self.shape.limits)
        group.moves.target = self._machines.target(self.shape.num_ranks, self.shape.limits)
        group.carrier.tap, group.carrier.groups, group.carrier.verifies_checksums = self, self.groups, self._machines.checks_pages

    def kill_group(self, name: str) -> None:
        """Kills a group; its next incarnation starts after 0.5 to 4 s."""
        self.net.kill(self.groups[name])
        self.groups[name].end()
        asyncio.get_running_loop().call_later(self.rng.uniform(0.5, 4.0), self.start_group, name)

    def start_router(self) -> None:
        self.router = Process("router")
        link = LinkSettings(token=ServiceToken([TOKEN]), router="router-0", dial=self.net.dial_from(self.router))
        registry = CollectorRegistry()
        clock = asyncio.get_running_loop().time
        self.fleet = RouterBackend(FleetSettings(link=link), RouterMetrics(registry), self.rng.random, clock)
        self.fleet.mover.board = MoveBoard(make=self._machines.move)
        self.fleet.mover.end_listeners.append(self._move_ended)
        self._fleet_task = asyncio.create_task(
            self.fleet.run(_FixedLeaders({n: Endpoint(key=n, address=n, group=n) for n in self.groups}))
        )

    def kill_router(self) -> None:
        """Kills the router; the next one starts after 0.5 to 3 s."""
        self.net.kill(self.router)
        self.fleet = None
        for client in self.clients.values():
            client.cut()
        if self._fleet_task is not None:
            self._fleet_task.cancel()
        asyncio.get_running_loop().call_later(self.rng.uniform(0.5, 3.0), self.start_router)

    def _move_ended(self, run: StreamSession, planned: MoveRequest, ended: MoveEnded) -> None:
        self.outcome.ends.append(ended.outcome)

    # A run

    async def run(self, mode: TransferMode) -> Outcome:
        """Moves one of three streams with the fault and checks the final state."""
        errors = _ErrorRecorder(self.outcome.violations)
        logging.getLogger().addHandler(errors)
        try:
            return await self._run(mode)
        finally:
            logging.getLogger().removeHandler(errors)
            for group in self.groups.values():
                group.end()

    async def _run(self, mode: TransferMode) -> Outcome:
        for name in ("a", "b"):
            self.start_group(name)
        self.start_router()
        await self._until(lambda: self.fleet is not None and self.fleet.links.num_ready == 2)
        for number in range(3):
            prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 30))]
            request = make_request(prompt, ENDLESS_TOKENS if number == 2 else NUM_TOKENS, seed=number)
            request = replace(request, can_resume=self._may_resume)
            client = self.clients[request.id] = Client(request, NUM_TOKENS, lambda: self.fleet, self.outcome.violations)
            self._tasks.append(asyncio.create_task(client.run()))
        await self._move(mode)
        await asyncio.wait(self._tasks)
        await asyncio.sleep(SETTLE_S)
        for _ in range(NUM_CHECKS):
            if self._is_idle():
                break
            await asyncio.sleep(CHECK_S)
        if self.rng.random() < 0.1:
            await asyncio.sleep(NUM_CHECKS * CHECK_S)
        self._check()
        return self.outcome

    def _is_idle(self) -> bool:
        fleet = self.fleet
        is_quiet = fleet is not None and not fleet.sessions and not fleet.mover.board.open()
        return is_quiet and not any(group.violations() for group in self.groups.values())

    async def _move(self, mode: TransferMode) -> None:
        num_tokens = self.rng.randint(1, 15)
        fleet = self.fleet
        assert fleet is not None, "just started"
        runs: list[StreamSession] = []

        disconnects = self.rng.random() < self._disconnect_share

        def is_ready() -> bool:
            found = [
                run for run in fleet.sessions if len(run.stream.journal.delivered) >= num_tokens and run.assignment is not None
            ]
            runs[:] = [
                run for run in found if not disconnects or run.stream.journal.replay().sampling.max_tokens == ENDLESS_TOKENS
            ]
            return bool(runs)

        await self._until(is_ready)
        run = runs[0]
        assert run.assignment is not None, "just checked"
        self.source = run.assignment.link.endpoint.group
        self.target = "b" if self.source == "a" else "a"
        key = next(key for key, link in fleet.links.eligible(run.tokenizer).items() if link.endpoint.group == self.target)
        if self._cell is not None and self._cell.step == 0:
            self._strike(self._cell)
        if disconnects:
            client = self.clients[run.stream.journal.replay().id]
            asyncio.get_running_loop().call_later(self.rng.uniform(0, 0.15), client.disconnect)
        if self.fleet is fleet and fleet.mover.move(run, key, mode, "manual") is not None:
            self.outcome.ends.append("declined")

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.003)

    def _check(self) -> None:
        violations = self.outcome.violations
        for group in self.groups.values():
            violations += group.violations()
        fleet = self.fleet
        if fleet is None:
            violations.append("the router did not restart")
        elif fleet.sessions or fleet.mover.board.open():
            violations.append("the router holds streams or moves")
        self.outcome.resumed = sum(client.num_resumed for client in self.clients.values())
        salts = {group.runner.salt for group in self.groups.values()}
        violations += [found for client in self.clients.values() if (found := client.wrong_token(salts)) is not None]
        violations += [f"a client failed: {error!r}" for task in self._tasks if (error := task.exception()) is not None]


class _ErrorRecorder(logging.Handler):
    """Records errors in the log as violations."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._violations.append(f"{record.name}: {record.getMessage()} {error!r}")


class _FixedLeaders:
    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        on_change(self._leaders)
        await asyncio.Event().wait()
