"""A group in virtual time: the real engine loop, scheduler and leader; a model that draws from what the page slots hold.

A step takes `step_s`: what the engine says of it leaves after that, and nothing new is taken in before.
"""

import asyncio
import logging
import random
from dataclasses import dataclass

from msgspec.structs import replace

from bench.virtual.copies import VirtualCarrier
from bench.virtual.leader import Leader
from bench.virtual.net import Network, Process
from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration.records import MoveLimits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.moving import EngineMoves
from tests.runtime.fake_runner import FakeRunner

ASSETS = wire.make_assets({"tokenizer.json": b"{}"}, ["virtual"], 4096, [0])
SERVED = wire.Served("model", "layout", 1)
log = logging.getLogger(__name__)

LEAST_S = 1e-4
"""A clock goes on whatever happens; this one only while somebody waits."""
LIMITS = MoveLimits(tail_pages=2)


@dataclass(frozen=True, slots=True)
class Shape:
    """Pages, slots of a page, requests in a step, ranks, plans in flight; seconds of a step and pages copied in a second."""

    num_pages: int = 400
    page_size: int = 4
    max_num_seqs: int = 8
    num_ranks: int = 2
    flights: int = 1
    step_s: float = 0.02
    pages_per_s: float = 150.0
    limits: MoveLimits = LIMITS


class SaltedRunner(FakeRunner):
    """Draws other tokens than one with another salt, as groups do that round differently. `has_run`: since the last look."""

    def __init__(self, shape: Shape, salt: int) -> None:
        super().__init__(shape.num_pages, shape.page_size, shape.flights)
        self.salt = salt
        self.has_run = False

    def start(self, plan: StepPlan) -> None:
        """Begins with a plan."""
        admitted = [replace(new, sampling=replace(new.sampling, seed=new.sampling.seed + self.salt)) for new in plan.admitted]
        super().start(replace(plan, admitted=admitted) if admitted else plan)

    def finish(self) -> StepResult:
        """The result of the oldest plan."""
        self.has_run = True
        return super().finish()


class _Channel:
    """Between leader and engine. `waits_s`: how long the engine wants to wait for the next message, after it found none.

    What follows a Release comes in the next turn, so that it is seen what the engine makes of the Release alone.
    """

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.inbox: list[bytes] = []
        self.has_news = asyncio.Event()
        self.would_wait = False
        self.waits_s: float | None = None

    def put(self, message: bytes) -> None:
        self.inbox.append(message)
        self.has_news.set()

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        taken = next((i + 1 for i, message in enumerate(self.inbox) if _is_release(message)), len(self.inbox))
        messages, self.inbox = self.inbox[:taken], self.inbox[taken:]
        self.would_wait = block and not messages
        self.waits_s = timeout_s
        return messages

    def send(self, message: bytes) -> None:
        self.said.append(message)

    def wake(self) -> None:
        self.has_news.set()


def _is_release(message: bytes) -> bool:
    return message[2:9] == b"release"


class Group(Process):
    """One incarnation of a group."""

    def __init__(self, name: str, net: Network, shape: Shape, incarnation: int, chance: random.Random, salt: int = 0) -> None:
        super().__init__(name)
        self.shape = shape
        self.runner = SaltedRunner(shape, salt)
        self.carrier = VirtualCarrier(self, chance)
        self.broken: list[str] = []
        """What must never be, as it happened."""
        self._ahead_s = 0.0
        self._asked: dict[str, int] = {}
        self._channel = _Channel()
        limits = Limits(max_model_len=4096, max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=64)
        self.loop = EngineLoop(self.runner, limits, self._channel, self._clock, SchedulerConfig(), carrier=self.carrier)
        self.scheduler = self.loop._scheduler
        self._leader = Leader(name, self._channel.put, self._clock, shape.page_size)
        self._leader.client.start(ASSETS, incarnation, SERVED)
        self._task = asyncio.create_task(self._drive())
        net.listen(name, self, self._leader.serve)

    @property
    def moving(self) -> EngineMoves:
        """What acts out its moves."""
        assert self.loop._moving is not None, "it has a carrier"
        return self.loop._moving

    def _clock(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    def end(self) -> None:
        """Ends its tasks."""
        self._task.cancel()
        self.carrier.end()
        self._leader.client.close()

    def wrong(self) -> list[str]:
        """What is left or wrong when all should be at rest."""
        free, pages = self.scheduler.pool.free_pages, self.shape.num_pages
        left = {
            "requests": not self.scheduler.is_idle(),
            f"{pages - free} pages held": free != pages,
            f"{len(self.moving._out)} moves out": bool(len(self.moving._out)),
            f"{len(self.moving._in)} moves in": bool(len(self.moving._in)),
            "moves that ranks remember": self.carrier.remembers(),
        }
        found = self.scheduler.check() + self.broken
        return found + [f"{self.name}: {what}" for what, is_left in left.items() if is_left]

    async def _drive(self) -> None:
        """Turns the engine's loop."""
        channel = self._channel
        while True:
            await self.awake()
            released = self._released()
            channel.has_news.clear()
            try:
                self.loop.turn()
            except Exception as error:
                log.exception("an engine ended")
                self.broken.append(f"{self.name}: {error!r}")
                raise
            self.broken += [f"{self.name}: {move} goes on after Release" for move in released if self._goes_on(move)]
            if self.runner.has_run:
                self.runner.has_run = False
                self._ahead_s = self.shape.step_s
                await asyncio.sleep(self.shape.step_s)
                self._ahead_s = 0.0
                await self.awake()
            said, channel.said = channel.said, []
            for message in said:
                self._leader.client.handle_message(message)
            if channel.would_wait and not channel.inbox:
                await self._wait(channel.waits_s)

    async def _wait(self, at_most_s: float | None) -> None:
        try:
            async with asyncio.timeout(None if at_most_s is None else max(at_most_s, LEAST_S)):
                await self._channel.has_news.wait()
        except TimeoutError:
            pass

    def _released(self) -> list[str]:
        """Moves that are frozen here, and of which the next turn takes the Release."""
        released = []
        for message in self._channel.inbox:
            match wire.decode_to_engine(message):
                case moves.MoveOut(move=move, handle=handle):
                    self._asked[move] = handle
                case moves.Release(move) if self.moving._out.move_of(self._asked.get(move, 0)) == move:
                    released.append(move)
                case _:
                    pass
            if _is_release(message):
                break
        return released

    def _goes_on(self, move: str) -> bool:
        return self.scheduler.held_by(self._asked[move]) is not None
