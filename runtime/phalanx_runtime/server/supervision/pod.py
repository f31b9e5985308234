"""Runs this pod's ranks. All ranks of an incarnation exit before the next one starts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from phalanx_frontend.health import RankHealth
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import BEAT_S, RankReady, RankSpec
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, SilenceBounds
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, Ranks, RanksEnded

log = logging.getLogger(__name__)

Activity = Literal["idle", "locating", "starting", "loading", "reporting", "running", "ending"]
"""reporting: assets are being read. ending: killed ranks have not exited."""
MAX_ACTIVITY_S: dict[Activity, float] = {"starting": 60.0, "reporting": 60.0, "ending": 30.0}
"""Bounds of local work; downloads, disks and other pods have no bound."""
MAX_START_DELAY_S = 30.0
"""Bound of the delay of a start."""


def ignore_activity(activity: Activity) -> None:
    """Drops it."""


def ignore_weights(done_bytes: int, total_bytes: int) -> None:
    """Drops them."""


@dataclass(frozen=True, slots=True)
class LauncherView:
    """State of a launcher."""

    activity: Activity
    for_s: float
    """Duration of the activity."""
    needs_ranks: bool = False
    """The group waits for them."""
    overdue_s: float = 0.0
    """Delay of the group's next start."""


def stuck_reason(view: LauncherView) -> str | None:
    """Reason the launcher cannot progress, if so: the kubelet restarts a pod that is not alive."""
    longest_s = MAX_ACTIVITY_S.get(view.activity)
    if longest_s is not None and view.for_s > longest_s:
        return f"the launcher has been {view.activity} for {view.for_s:.0f} s, at most {longest_s:.0f} s were expected"
    if view.activity == "idle" and view.needs_ranks and view.for_s > MAX_START_DELAY_S:
        return f"the launcher has been idle for {view.for_s:.0f} s while the group waits for its ranks"
    if view.overdue_s > MAX_START_DELAY_S:
        return f"the group's next start is {view.overdue_s:.0f} s late"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One incarnation in this pod."""

    incarnation: int
    hosts: tuple[str, ...]
    """Host of each pod."""
    key: str
    """Shared by the ranks."""
    engine_socket: str = ""
    """Endpoint of rank 0."""
    without_draft: str = ""
    """Reason to omit the draft."""


def ends_program(*, is_in_pod: bool, has_served: bool, is_model: bool) -> bool:
    """Returns whether a failed start ends the program: outside of a pod, if no start succeeded and the model is the reason.

    A pod tries again: its store or its volume may come back, and its conditions show the reason meanwhile.
    """
    return is_model and not has_served and not is_in_pod


class RankListener(Protocol):
    """Receives the outcome of a launch."""

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """All ranks have loaded. May raise ModelError."""
        ...

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """The ranks failed and were killed."""
        ...


class RankLauncher:
    """Runs one incarnation after another."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[Path]],
        make_specs: Callable[[Launch, Path], list[RankSpec]],
        listener: RankListener,
        command: Sequence[str] = RANK_COMMAND,
        bounds: SilenceBounds = DEFAULT_BOUNDS,
        *,
        is_in_pod: bool = True,
        activity_changed: Callable[[Activity], None] = ignore_activity,
        weights_loaded: Callable[[int, int], None] = ignore_weights,
    ) -> None:
        """`weights_loaded` receives bytes that were read and bytes to read, every second."""
        self._locate = locate
        self._make_specs = make_specs
        self._listener = listener
        self._command = command
        self._bounds = bounds
        self._is_in_pod = is_in_pod
        self._activity_changed = activity_changed
        self._weights_loaded = weights_loaded
        self._has_served = False
        self._commands: asyncio.Queue[Launch | ModelError | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._ranks: Ranks | None = None
        self._activity: Activity = "idle"
        self._since = time.monotonic()

    @property
    def activity(self) -> Activity:
        """Current activity."""
        return self._activity

    def activity_s(self) -> float:
        """Seconds since the current activity began."""
        return time.monotonic() - self._since

    def ranks(self) -> list[RankHealth]:
        """Health of the ranks."""
        return self._ranks.health() if self._ranks is not None else []

    def start(self, launch: Launch) -> None:
        """Starts an incarnation after the previous ranks have exited."""
        self._commands.put_nowait(launch)

    def stop(self) -> None:
        """Kills the ranks."""
        self._commands.put_nowait(None)

    def fail(self, why: str) -> None:
        """Ends the running incarnation, if any: a device of this pod failed."""
        if self._ranks is not None:
            self._ranks.fail(why)

    async def run(self) -> None:
        """Executes `start` and `stop` until cancelled, then ends the ranks. Raises ModelError if that `ends_program`."""
        try:
            while True:
                launch = await self._commands.get()
                await self._end()
                if isinstance(launch, ModelError):
                    raise launch
                if launch is not None:
                    self._task = asyncio.create_task(self._run_incarnation(launch))
        finally:
            self._set_activity("ending")
            await self._cancel()
            if self._ranks is not None:
                await self._ranks.shut_down()

    def _set_activity(self, activity: Activity) -> None:
        self._activity, self._since = activity, time.monotonic()
        self._activity_changed(activity)

    async def _end(self) -> None:
        self._set_activity("ending")
        await self._cancel()
        await self._kill_ranks()
        self._set_activity("idle")

    async def _cancel(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])

    async def _kill_ranks(self) -> None:
        """May be cancelled and repeated."""
        if self._ranks is not None:
            await self._ranks.kill()
            self._ranks = None

    async def _run_incarnation(self, launch: Launch) -> None:
        try:
            end = await self._run_ranks(launch)
        except asyncio.CancelledError:
            # Another pod may have failed first; an unreported draft failure would repeat.
            if self._ranks is not None and (failure := self._ranks.draft_failure()) is not None:
                self._listener.ranks_failed(launch, failure)
            raise
        except ModelError as error:
            end = RanksEnded(str(error), is_model=True)
        except OSError as error:
            end = RanksEnded(str(error))
        except RanksEnded as ended:
            end = ended
        except Exception as bug:
            log.exception("internal error in an incarnation", extra={"incarnation": launch.incarnation})
            end = RanksEnded(f"internal error: {bug!r}")
        self._set_activity("idle")
        if self._ranks is not None:
            self._ranks.send_kill()
        if ends_program(is_in_pod=self._is_in_pod, has_served=self._has_served, is_model=end.is_model):
            self._commands.put_nowait(ModelError(end.why))
            return
        log.error("ranks failed", extra={"incarnation": launch.incarnation, "why": end.why})
        self._listener.ranks_failed(launch, end)

    async def _run_ranks(self, launch: Launch) -> RanksEnded:
        """Reason the ranks ended, once they were ready."""
        self._set_activity("locating")
        folder = await self._locate()
        self._set_activity("starting")
        ranks = self._ranks = await Ranks.start(self._make_specs(launch, folder), self._command, self._bounds)
        self._set_activity("loading")
        reports = asyncio.create_task(self._report_weights(ranks))
        try:
            ready = await ranks.ready()
        finally:
            reports.cancel()
        self._set_activity("reporting")
        await self._listener.ranks_ready(launch, folder, ready)
        self._has_served = True
        self._set_activity("running")
        return await ranks.failure()

    async def _report_weights(self, ranks: Ranks) -> None:
        while True:
            self._weights_loaded(*ranks.loaded())
            await asyncio.sleep(BEAT_S)
