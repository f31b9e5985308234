"""What one pod does in each incarnation: finds the model, starts its ranks, says that they are ready, says why they ended.

One incarnation at a time: the next one starts after every rank of the former is gone, so its ports and memory are free.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from phalanx_frontend.health import RankHealth
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, Bounds
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, Ranks, RanksEnded

# Whether a pod's launcher moves on. When it does not, the pod cannot mend itself, and wants to be started anew.
# What others may hold up is never our fault: finding a model takes as long as its download, loading it as long as the disk,
# and pods that are missing may come tomorrow. Pure: times are arguments.

Doing = Literal["idle", "locating", "starting", "loading", "telling", "running", "ending"]
"""idle: no ranks are wanted. telling: ranks are ready, and what doors need of the model is read. ending: killed ranks leave."""
LONGEST_S: dict[Doing, float] = {"starting": 60.0, "telling": 60.0, "ending": 30.0}
"""What is done on this machine alone, in far less time. A rank that outlives its SIGKILL is held by the kernel or a driver."""
LATE_S = 30.0
"""How late the launcher may do what is due."""


@dataclass(frozen=True, slots=True)
class View:
    """What the launcher does and for how long; whether the group's state asks for ranks, and how overdue its next start is."""

    doing: Doing
    for_s: float
    wants_ranks: bool = False
    overdue_s: float = 0.0


def why_stuck(view: View) -> str | None:
    """Why the pod cannot mend itself, or None when it can."""
    longest_s = LONGEST_S.get(view.doing)
    if longest_s is not None and view.for_s > longest_s:
        return f"the launcher has been {view.doing} for {view.for_s:.0f} s, at most {longest_s:.0f} s were expected"
    if view.doing == "idle" and view.wants_ranks and view.for_s > LATE_S:
        return f"the launcher has been idle for {view.for_s:.0f} s while the group waits for its ranks"
    if view.overdue_s > LATE_S:
        return f"the group's next start is {view.overdue_s:.0f} s late"
    return None


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """One incarnation as this pod is told of it: the hosts of all pods, the key between ranks, rank 0's socket.

    without_draft: why nothing drafts in it, where something failed before.
    """

    incarnation: int
    hosts: tuple[str, ...]
    key: str
    engine_socket: str = ""
    without_draft: str = ""


class Reporter(Protocol):
    """Who hears what becomes of the ranks."""

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """All ranks of this pod have loaded; `ready` is what they said, in their order. May raise ModelError."""
        ...

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """The incarnation cannot go on because of this pod. Its ranks were killed, and will be gone before others start."""
        ...


class Pod:
    """The ranks of this pod, incarnation after incarnation. `make_specs` says what each rank is told."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[Path]],
        make_specs: Callable[[Launch, Path], list[RankSpec]],
        reporter: Reporter,
        command: Sequence[str] = RANK_COMMAND,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._locate = locate
        self._make_specs = make_specs
        self._reporter = reporter
        self._command = command
        self._bounds = bounds
        self._wanted: asyncio.Queue[Launch | None] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None
        self._ranks: Ranks | None = None
        self._doing: Doing = "idle"
        self._since = time.monotonic()

    @property
    def doing(self) -> Doing:
        """What the launcher does now."""
        return self._doing

    def doing_s(self) -> float:
        """For how many seconds it has done that."""
        return time.monotonic() - self._since

    def ranks(self) -> list[RankHealth]:
        """The ranks that were started and not yet replaced."""
        return self._ranks.health() if self._ranks is not None else []

    def start(self, launch: Launch) -> None:
        """Starts the ranks of an incarnation, once those of the former are gone."""
        self._wanted.put_nowait(launch)

    def stop(self) -> None:
        """Kills the ranks."""
        self._wanted.put_nowait(None)

    async def run(self) -> None:
        """Does what `start` and `stop` ask, for ever; ends the ranks when it is cancelled, giving them time to leave."""
        try:
            while True:
                launch = await self._wanted.get()
                await self._end()
                if launch is not None:
                    self._life = asyncio.create_task(self._live(launch))
        finally:
            await self._end_life()
            if self._ranks is not None:
                await self._ranks.leave()

    def _do(self, doing: Doing) -> None:
        self._doing, self._since = doing, time.monotonic()

    async def _end(self) -> None:
        """Ends what runs."""
        self._do("ending")
        await self._end_life()
        await self._kill_ranks()
        self._do("idle")

    async def _end_life(self) -> None:
        if self._life is not None:
            life, self._life = self._life, None
            life.cancel()
            await asyncio.wait([life])

    async def _kill_ranks(self) -> None:
        """Kills what runs. May be cancelled and called again."""
        if self._ranks is not None:
            await self._ranks.kill()
            self._ranks = None

    async def _live(self, launch: Launch) -> None:
        """One incarnation in this pod, to its end."""
        try:
            end = await self._run_ranks(launch)
        except asyncio.CancelledError:
            # Ended from outside, perhaps for what another pod saw first: the next start drafts again if it is not told.
            if self._ranks is not None and (lost := self._ranks.lost_draft()) is not None:
                self._reporter.ranks_failed(launch, lost)
            raise
        except (ModelError, OSError) as error:
            end = RanksEnded(str(error))
        except RanksEnded as ended:
            end = ended
        except Exception as bug:
            log.exception("an incarnation ended by a bug", extra={"incarnation": launch.incarnation})
            end = RanksEnded(f"internal error: {bug!r}")
        self._do("idle")
        if self._ranks is not None:
            self._ranks.end()
        log.error("ranks failed: %s", end.why, extra={"incarnation": launch.incarnation})
        self._reporter.ranks_failed(launch, end)

    async def _run_ranks(self, launch: Launch) -> RanksEnded:
        """Why the ranks ended. Raises what went wrong before they were ready."""
        self._do("locating")
        folder = await self._locate()
        self._do("starting")
        ranks = self._ranks = await Ranks.start(self._make_specs(launch, folder), self._command, self._bounds)
        self._do("loading")
        ready = await ranks.ready()
        self._do("telling")
        await self._reporter.ranks_ready(launch, folder, ready)
        self._do("running")
        return await ranks.failure()
