"""A group in virtual time: real engine loop, scheduler and leader; the model samples from the contents of the page slots.

A step takes `step_s`: the engine's messages leave after it, and messages are received between steps.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from bench.virtual.copies import VirtualCarrier
from bench.virtual.disk import Disk
from bench.virtual.leader import ORPHAN_S, Leader
from bench.virtual.net import Network, Process
from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration.records import MoveLimits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.engine.engine_moves import EngineMoves
from phalanx_runtime.engine.loop import EngineLoop
from tests.runtime.fake_runner import FakeRunner

ASSETS = wire.make_assets({"tokenizer.json": b"{}"}, ["virtual"], 4096, [0])
SERVED = wire.Served("model", "layout", 1)
log = logging.getLogger(__name__)

MIN_WAIT_S = 1e-4
"""Minimum wait, because virtual time advances only in waits."""
LIMITS = MoveLimits(tail_pages=2)


@dataclass(frozen=True, slots=True)
class Shape:
    num_pages: int = 400
    page_size: int = 4  # tokens
    max_num_seqs: int = 8
    num_ranks: int = 2
    flights: int = 1  # step plans in flight
    step_s: float = 0.02
    pages_per_s: float = 150.0  # transfer
    limits: MoveLimits = LIMITS
    orphan_s: float = ORPHAN_S
    token_s: float = 0.0  # of each token of a step, beside step_s
    num_host_pages: int = 0  # with any, pages are also written to a disk


class SaltedRunner(FakeRunner):
    """Samples other tokens than runners with another salt, like groups that round differently."""

    def __init__(self, shape: Shape, salt: int, on_finish: Callable[[], None]) -> None:
        super().__init__(
            shape.num_pages,
            shape.page_size,
            shape.flights,
            num_host_pages=shape.num_host_pages,
            has_disk=shape.num_host_pages > 0,
        )
        self.salt = salt
        self.has_run = False  # since the last check
        self._on_finish = on_finish

    def start(self, plan: StepPlan) -> None:
        admitted = [replace(new, sampling=replace(new.sampling, seed=new.sampling.seed + self.salt)) for new in plan.admitted]
        super().start(replace(plan, admitted=admitted) if admitted else plan)

    def finish(self) -> StepResult:
        self.has_run = True
        result = super().finish()
        self._on_finish()
        return result


class _Channel:
    """The channel between leader and engine.

    Messages after a Release wait for the next turn, so that the effect of the Release alone can be checked.
    """

    def __init__(self) -> None:
        self.outbox: list[bytes] = []
        self.inbox: list[bytes] = []
        self.has_messages = asyncio.Event()
        self.would_wait = False
        self.timeout_s: float | None = None  # how long the engine would wait

    def put(self, message: bytes) -> None:
        self.inbox.append(message)
        self.has_messages.set()

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        count = next((i + 1 for i, message in enumerate(self.inbox) if _is_release(message)), len(self.inbox))
        messages, self.inbox = self.inbox[:count], self.inbox[count:]
        self.would_wait = block and not messages
        self.timeout_s = timeout_s
        return messages

    def send(self, message: bytes) -> None:
        self.outbox.append(message)

    def wake(self) -> None:
        self.has_messages.set()


def _is_release(message: bytes) -> bool:
    return message[2:9] == b"release"


class Group(Process):
    def __init__(
        self,
        name: str,
        net: Network,
        shape: Shape,
        incarnation: int,
        rng: random.Random,
        salt: int = 0,
        *,
        disk: Disk | None = None,
    ) -> None:
        """disk: of its machine, with the pages of former starts."""
        super().__init__(name)
        self.shape = shape
        self.runner = SaltedRunner(shape, salt, self._end_step)
        self.disk = Disk() if disk is None else disk
        self.runner.disk = self.disk.pages
        self.carrier = VirtualCarrier(self, rng)
        self.observed: list[str] = []
        """Violations observed while it runs."""
        self._ahead_s = 0.0
        self._handles: dict[str, int] = {}
        self._channel = _Channel()
        limits = Limits(max_model_len=4096, max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=64)
        self.loop = EngineLoop(self.runner, limits, self._channel, self._clock, SchedulerConfig(), transport=self.carrier)
        self.scheduler = self.loop.scheduler
        self.leader = Leader(name, self._channel.put, self._clock, shape.page_size, shape.orphan_s)
        self.leader.client.end_incarnation(incarnation, "starting")
        self.leader.client.serve(ASSETS, SERVED)
        self._task = asyncio.create_task(self._drive())
        net.listen(name, self, self.leader.serve)

    @property
    def moves(self) -> EngineMoves:
        return self.loop.moves

    def _clock(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    def _end_step(self) -> None:
        """Sets the clock to the step's end, which the engine measures; the group sleeps until then after the turn."""
        self._ahead_s = self.shape.step_s + self.shape.token_s * sum(self.runner.plans[-1].counts)

    def end(self) -> None:
        self._task.cancel()
        self.carrier.end()
        self.leader.client.close()

    def violations(self) -> list[str]:
        """Returns violations: state that remains when the group should be idle, and those observed."""
        free, pages = self.scheduler.pool.free_pages, self.shape.num_pages
        remaining = {
            "requests": not self.scheduler.is_idle(),
            f"{pages - free} pages held": free != pages,
            f"{len(self.moves.source)} moves out": bool(len(self.moves.source)),
            f"{len(self.moves.target)} moves in": bool(len(self.moves.target)),
            "moves in the ranks": self.carrier.has_moves(),
        }
        violations = self.scheduler.check() + self.observed
        return violations + [f"{self.name}: {state}" for state, remains in remaining.items() if remains]

    async def _drive(self) -> None:
        channel = self._channel
        while True:
            await self.awake()
            released = self._released()
            channel.has_messages.clear()
            try:
                self.loop.turn()
            except Exception as error:
                log.exception("an engine ended")
                self.observed.append(f"{self.name}: {error!r}")
                raise
            self.observed += [f"{self.name}: {move} continues after Release" for move in released if self._continues(move)]
            if self.runner.has_run:
                self.runner.has_run = False
                await asyncio.sleep(self._ahead_s)
                self._ahead_s = 0.0
                await self.awake()
                self.carrier.stored()
            outbox, channel.outbox = channel.outbox, []
            for message in outbox:
                self.leader.client.handle_message(message)
            if channel.would_wait and not channel.inbox:
                await self._wait(channel.timeout_s)

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, MIN_WAIT_S)):
                await self._channel.has_messages.wait()
        except TimeoutError:
            pass

    def _released(self) -> list[str]:
        """Returns the moves that are frozen here and released in the next turn."""
        released = []
        for message in self._channel.inbox:
            match wire.decode_to_engine(message):
                case moves.MoveOut(move=move, handle=handle):
                    self._handles[move] = handle
                case moves.Release(move) if self.moves.source.move_of(self._handles.get(move, 0)) == move:
                    released.append(move)
                case _:
                    pass
            if _is_release(message):
                break
        return released

    def _continues(self, move: str) -> bool:
        return self.scheduler.running_request(self._handles[move]) is not None
