"""A router, groups and clients in virtual time, and a fault at one step of a move.

The router is a real `phalanx_router.backend`. A client of a router that dies goes on at the next one: in some runs by the
name of its stream, which a leader may have kept, in the others from its tokens.
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
from bench.virtual.net import GOES, Fate, Network, Process
from phalanx_api import wire
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import Endpoint, Leaders
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.board import MoveBoard
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import MoveEnded, MoveRequest, MoveSettings, TransferMode
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_runtime.core.migration.records import MoveLimits
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import TargetMoves
from tests.runtime.fake_runner import VOCAB, make_request

Who = Literal["source", "target", "router"]
Fault = Literal["killed", "hung", "dropped", "delayed", "corrupted"]
STEPS = ("propose", "prepare", "pre-copy", "freeze", "ready", "commit", "decode", "release")
WHO: tuple[Who, ...] = get_args(Who)
FAULTS: tuple[Fault, ...] = get_args(Fault)
COUNT, ENDLESS = 30, 3000
"""Tokens that clients want; what one of them asked for who then leaves."""
RESUME_SHARE = 0.3
"""Runs whose requests may be resumed."""
SOON_S = 1.0
REST_S, RESTS = 2.0, 12
"""After the last stream all must come to rest, within the longest hang and the longest lease; a request that nobody wants would
go on for longer."""
FRAME_STEPS = {b"prepare": 1, b"move_out": 2, b"frozen": 3, b"arrived": 4, b"release": 7}
NOISE = 0.03
"""Share of the frames of moves that come twice or not at all, whatever the fault."""
NOISY = frozenset({b"prepared", b"frozen", b"arrived", b"move_failed", b"thaw", b"release", b"cancel", b"move_out", b"prepare"})
LOSABLE = NOISY | {b"submit"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault of one process when a move gets to a step."""

    step: int
    who: Who
    fault: Fault

    def __str__(self) -> str:
        return f"{STEPS[self.step]} / {self.who} / {self.fault}"


@dataclass(slots=True)
class Outcome:
    """One run. `wrong`: what must not be; empty is good. `has_struck`: whether the move got to the step. `resumed`: streams that
    the next router found."""

    wrong: list[str] = field(default_factory=list)
    has_struck: bool = False
    ends: list[str] = field(default_factory=list)
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of source, target and router. Tests give worse ones, to see that this is found."""

    out: Callable[[int, MoveLimits], SourceMoves] = SourceMoves
    into: Callable[[int, MoveLimits], TargetMoves] = TargetMoves
    move: Callable[[MoveRequest, MoveSettings], Move] = Move
    checks_pages: bool = True


def _tag(message: bytes) -> bytes:
    """The name of a frame."""
    return message[2 : 2 + (message[1] & 0x1F)] if len(message) > 2 else b""


class World:
    """Two groups, one router, some clients."""

    def __init__(
        self,
        seed: int,
        cell: Cell | None,
        shape: Shape | None = None,
        machines: Machines | None = None,
        leave_share: float = 0.15,
    ) -> None:
        self.chance = random.Random(seed)
        self.outcome = Outcome()
        self.net = Network(self.chance, self)
        num_pages = 40 if self.chance.random() < 0.15 else 400
        self.shape = shape or Shape(num_pages, flights=self.chance.choice((1, 1, 2)), num_ranks=self.chance.choice((1, 2)))
        self.groups: dict[str, Group] = {}
        self._leave_share = leave_share
        # Of a chance of its own: all else in the run of a seed is as it was.
        self._may_resume = random.Random(f"{seed} resumes").random() < RESUME_SHARE
        self._is_salted = self.chance.random() < 0.5
        self._machines = machines or Machines()
        self.router = Process("router")
        self.fleet: RouterBackend | None = None
        self.source = self.target = ""
        self._cell = cell
        self._due: str | None = None
        self._is_of_pages = False
        self._incarnations = 0
        self._fleet_task: asyncio.Task[None] | None = None
        self.clients: dict[str, Client] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # What becomes of messages

    def sent(self, sender: Process, receiver: Process, message: bytes) -> Fate:
        """The fault, when its step has come; else now and then a frame of a move comes twice."""
        tag = _tag(message)
        cell = self._cell
        if cell is not None and self.source and not self.outcome.has_struck and self._is_step(cell.step, tag, sender, message):
            self._strike(cell)
        if self._due is not None and not self._is_of_pages and sender is self._process():
            return self._spoil(tag)
        if tag in NOISY and (chance := self.chance.random()) < NOISE:
            return Fate("twice" if chance < NOISE / 2 else "lost")
        return GOES

    def copied(self, source: Group, target: Group) -> tuple[str, float]:
        """The same of pages."""
        if self._due is not None and self._is_of_pages and source is self._process():
            fate = self._spoil(b"")
            return fate.kind, fate.delay_s
        return "goes", 0.0

    def _is_step(self, step: int, tag: bytes, sender: Process, message: bytes) -> bool:
        if step == 5:
            return tag == b"submit" and bool(wire.decode_to_leader(message).move)
        if step == 6:
            return tag == b"tokens" and sender.name == self.target and 1 in wire.decode_from_leader(message).epochs
        return FRAME_STEPS.get(tag) == step

    def _process(self) -> Process:
        assert self._cell is not None, "there is a fault"
        if self._cell.who == "router":
            return self.router
        return self.groups[self.source if self._cell.who == "source" else self.target]

    def _strike(self, cell: Cell) -> None:
        self.outcome.has_struck = True
        if cell.fault in ("killed", "hung"):
            self._after(self.chance.choice((0.0, self.chance.uniform(0, 0.01))), self._fell)
        else:
            self._due = cell.fault
            self._is_of_pages = cell.who == "source" and cell.step in (2, 3) and self.chance.random() < 0.7

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, what)
        else:
            what()

    def _fell(self) -> None:
        """Kills or stops the process."""
        process = self._process()
        assert self._cell is not None, "there is a fault"
        if self._cell.fault == "hung":
            process.hang(10 ** self.chance.uniform(-1.5, 1.0))
        elif process is self.router:
            self.kill_router()
        else:
            self.kill_group(process.name)

    def _spoil(self, tag: bytes) -> Fate:
        """What the fault makes of this message. What TCP would never lose alone breaks its connection."""
        due, self._due = self._due, None
        match due:
            case "delayed":
                return Fate("goes", 10 ** self.chance.uniform(-1.5, 1.0))
            case "corrupted":
                return Fate("damaged")
            case _:
                alone = tag in LOSABLE or not tag
                return Fate("lost" if alone and self.chance.random() < 0.5 else "breaks")

    # Processes

    def start_group(self, name: str) -> None:
        """Starts the next incarnation."""
        self._incarnations += 1
        salt = self._is_salted * (1 + len(self.groups) if name not in self.groups else self.groups[name].runner.salt)
        group = self.groups[name] = Group(name, self.net, self.shape, self._incarnations, self.chance, salt)
        group.moving._out = self._machines.out(self.shape.page_size, self.shape.limits)
        group.moving._in = self._machines.into(self.shape.num_ranks, self.shape.limits)
        group.carrier.tap, group.carrier.groups, group.carrier.checks = self, self.groups, self._machines.checks_pages

    def kill_group(self, name: str) -> None:
        """Ends a group; another incarnation comes in its place."""
        self.net.kill(self.groups[name])
        self.groups[name].end()
        asyncio.get_running_loop().call_later(self.chance.uniform(0.5, 4.0), self.start_group, name)

    def start_router(self) -> None:
        """Starts a router."""
        self.router = Process("router")
        link = LinkSettings(token=TOKEN, router="router-0", dial=self.net.dial_from(self.router))
        registry = CollectorRegistry()
        clock = asyncio.get_running_loop().time
        self.fleet = RouterBackend(FleetSettings(link=link), RouterMetrics(registry), self.chance.random, clock)
        self.fleet.mover.board = MoveBoard(make=self._machines.move)
        self.fleet.mover.ended.append(self._move_ended)
        self._fleet_task = asyncio.create_task(
            self.fleet.run(_Source({n: Endpoint(key=n, address=n, group=n) for n in self.groups}))
        )

    def kill_router(self) -> None:
        """Ends the router; another one comes in its place."""
        self.net.kill(self.router)
        self.fleet = None
        for client in self.clients.values():
            client.cut()
        if self._fleet_task is not None:
            self._fleet_task.cancel()
        asyncio.get_running_loop().call_later(self.chance.uniform(0.5, 3.0), self.start_router)

    def _move_ended(self, run: StreamSession, proposal: MoveRequest, over: MoveEnded) -> None:
        self.outcome.ends.append(over.outcome)

    # A run

    async def run(self, how: TransferMode) -> Outcome:
        """Moves one of three streams, with the fault, and looks at what is left in the end."""
        errors = _Errors(self.outcome.wrong)
        logging.getLogger().addHandler(errors)
        try:
            return await self._run(how)
        finally:
            logging.getLogger().removeHandler(errors)
            for group in self.groups.values():
                group.end()

    async def _run(self, how: TransferMode) -> Outcome:
        for name in ("a", "b"):
            self.start_group(name)
        self.start_router()
        await self._until(lambda: self.fleet is not None and self.fleet.links.num_ready == 2)
        for number in range(3):
            prompt = [self.chance.randrange(VOCAB) for _ in range(self.chance.randint(1, 30))]
            asked = make_request(prompt, ENDLESS if number == 2 else COUNT, seed=number)
            request = replace(asked, can_resume=self._may_resume)
            client = self.clients[request.id] = Client(request, COUNT, lambda: self.fleet, self.outcome.wrong)
            self._tasks.append(asyncio.create_task(client.run()))
        await self._move(how)
        await asyncio.wait(self._tasks)
        await asyncio.sleep(SOON_S)
        for _ in range(RESTS):
            if self._is_at_rest():
                break
            await asyncio.sleep(REST_S)
        if self.chance.random() < 0.1:
            await asyncio.sleep(RESTS * REST_S)
        self._look()
        return self.outcome

    def _is_at_rest(self) -> bool:
        fleet = self.fleet
        is_quiet = fleet is not None and not fleet.runs and not fleet.mover.board.open()
        return is_quiet and not any(group.wrong() for group in self.groups.values())

    async def _move(self, how: TransferMode) -> None:
        """Begins the move of some stream after some of its tokens."""
        wanted = self.chance.randint(1, 15)
        fleet = self.fleet
        assert fleet is not None, "just started"
        runs: list[StreamSession] = []

        leaves = self.chance.random() < self._leave_share

        def ripe() -> bool:
            found = [run for run in fleet.runs if len(run.stream.journal.delivered) >= wanted and run.link is not None]
            runs[:] = [run for run in found if not leaves or run.stream.journal.replay().sampling.max_tokens == ENDLESS]
            return bool(runs)

        await self._until(ripe)
        run = runs[0]
        assert run.link is not None, "just looked"
        self.source = run.link.endpoint.group
        self.target = "b" if self.source == "a" else "a"
        key = next(key for key, link in fleet.links.eligible(run.tokenizer).items() if link.endpoint.group == self.target)
        if self._cell is not None and self._cell.step == 0:
            self._strike(self._cell)
        if leaves:
            client = self.clients[run.stream.journal.replay().id]
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.15), client.leave)
        if self.fleet is fleet and fleet.mover.move(run, key, how, "asked") is not None:
            self.outcome.ends.append("declined")

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.003)

    def _look(self) -> None:
        wrong = self.outcome.wrong
        for group in self.groups.values():
            wrong += group.wrong()
        fleet = self.fleet
        if fleet is None:
            wrong.append("the router did not come back")
        elif fleet.runs or fleet.mover.board.open():
            wrong.append("the router holds streams or moves")
        self.outcome.resumed = sum(client.num_resumed for client in self.clients.values())
        salts = {group.runner.salt for group in self.groups.values()}
        wrong += [odd for client in self.clients.values() if (odd := client.odd(salts)) is not None]
        wrong += [f"a client failed: {error!r}" for task in self._tasks if (error := task.exception()) is not None]


class _Errors(logging.Handler):
    """Takes what is logged as an error for wrong."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        """Notes the message, and the exception with it."""
        error = record.exc_info[1] if record.exc_info else None
        self._wrong.append(f"{record.name}: {record.getMessage()} {error!r}")


class _Source:
    """A fixed list of leaders."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Tells it once."""
        found(self._leaders)
        await asyncio.Event().wait()
