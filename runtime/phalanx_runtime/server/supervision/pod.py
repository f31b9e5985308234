"""Incarnations in one pod: finds the model, starts the ranks, reports when they are ready and why they ended.

The next incarnation starts after every rank of the previous one has exited, so that its ports and memory are free.
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
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, SilenceBounds
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, Ranks, RanksEnded

# A launcher that makes no progress makes the pod not alive, so that the kubelet restarts it. Waits on others are unbounded: a
# download, a disk, a missing pod.

Activity = Literal["idle", "locating", "starting", "loading", "telling", "running", "ending"]
"""idle: no ranks wanted. telling: ranks are ready and the assets are being read. ending: waiting for killed ranks to exit."""
LONGEST_S: dict[Activity, float] = {"starting": 60.0, "telling": 60.0, "ending": 30.0}
"""Bounds of local work, in seconds. A rank that outlives SIGKILL is blocked in the kernel or a driver."""
LATE_S = 30.0
"""Longest delay of a start that is due, in seconds."""


@dataclass(frozen=True, slots=True)
class LauncherView:
    """Activity of the launcher and its duration, whether the group needs ranks, and the delay of its next start."""

    activity: Activity
    for_s: float
    wants_ranks: bool = False
    overdue_s: float = 0.0


def why_stuck(view: LauncherView) -> str | None:
    """Reason the pod cannot recover by itself; None if it can."""
    longest_s = LONGEST_S.get(view.activity)
    if longest_s is not None and view.for_s > longest_s:
        return f"the launcher has been {view.activity} for {view.for_s:.0f} s, at most {longest_s:.0f} s were expected"
    if view.activity == "idle" and view.wants_ranks and view.for_s > LATE_S:
        return f"the launcher has been idle for {view.for_s:.0f} s while the group waits for its ranks"
    if view.overdue_s > LATE_S:
        return f"the group's next start is {view.overdue_s:.0f} s late"
    return None


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One incarnation in this pod.

    hosts: by pod. key: shared by the ranks. engine_socket: socket of rank 0.
    without_draft: reason for running without speculation, after an earlier draft failure.
    """

    incarnation: int
    hosts: tuple[str, ...]
    key: str
    engine_socket: str = ""
    without_draft: str = ""


class RankListener(Protocol):
    """Receives the outcome of a launch."""

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """All ranks of this pod have loaded; `ready` is in rank order. May raise ModelError."""
        ...

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """This pod's ranks failed and were killed; they exit before any others start."""
        ...


class RankLauncher:
    """Runs this pod's ranks, one incarnation after another. `make_specs` builds the spec of each rank."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[Path]],
        make_specs: Callable[[Launch, Path], list[RankSpec]],
        reporter: RankListener,
        command: Sequence[str] = RANK_COMMAND,
        bounds: SilenceBounds = DEFAULT_BOUNDS,
    ) -> None:
        self._locate = locate
        self._make_specs = make_specs
        self._reporter = reporter
        self._command = command
        self._bounds = bounds
        self._wanted: asyncio.Queue[Launch | None] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None
        self._ranks: Ranks | None = None
        self._activity: Activity = "idle"
        self._since = time.monotonic()

    @property
    def activity(self) -> Activity:
        """Current activity."""
        return self._activity

    def activity_s(self) -> float:
        """Seconds since the current activity started."""
        return time.monotonic() - self._since

    def ranks(self) -> list[RankHealth]:
        """Health of the ranks that were started last."""
        return self._ranks.health() if self._ranks is not None else []

    def start(self, launch: Launch) -> None:
        """Starts the ranks of an incarnation after the previous ones have exited."""
        self._wanted.put_nowait(launch)

    def stop(self) -> None:
        """Kills the ranks."""
        self._wanted.put_nowait(None)

    async def run(self) -> None:
        """Executes `start` and `stop` until cancelled, then lets the ranks exit."""
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

    def _do(self, activity: Activity) -> None:
        self._activity, self._since = activity, time.monotonic()

    async def _end(self) -> None:
        """Ends the current incarnation."""
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
        """Kills the ranks. May be cancelled and called again."""
        if self._ranks is not None:
            await self._ranks.kill()
            self._ranks = None

    async def _live(self, launch: Launch) -> None:
        """Runs one incarnation in this pod to its end."""
        try:
            end = await self._run_ranks(launch)
        except asyncio.CancelledError:
            # Cancelled, perhaps for a failure that another pod saw first: an unreported draft failure would repeat.
            if self._ranks is not None and (lost := self._ranks.lost_draft()) is not None:
                self._reporter.ranks_failed(launch, lost)
            raise
        except (ModelError, OSError) as error:
            end = RanksEnded(str(error))
        except RanksEnded as ended:
            end = ended
        except Exception as bug:
            log.exception("internal error in an incarnation", extra={"incarnation": launch.incarnation})
            end = RanksEnded(f"internal error: {bug!r}")
        self._do("idle")
        if self._ranks is not None:
            self._ranks.end()
        log.error("ranks failed: %s", end.why, extra={"incarnation": launch.incarnation})
        self._reporter.ranks_failed(launch, end)

    async def _run_ranks(self, launch: Launch) -> RanksEnded:
        """Reason the ranks ended. Raises on failure before they were ready."""
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
