"""Supervisors: the leader's controls the group, those of the other pods execute its commands.

`incarnation.advance` decides; the leader's supervisor passes events to it and executes the returned actions. Both kinds end
their ranks when cancelled, and are ready only while the whole group serves.
"""

import asyncio
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from phalanx_api import wire
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.health import RankHealth
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.supervision import incarnation as inc
from phalanx_runtime.server.supervision import rendezvous_wire as say
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, SilenceBounds
from phalanx_runtime.server.supervision.pod import Launch, LauncherView, RankLauncher, why_stuck
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, RanksEnded
from phalanx_runtime.server.supervision.rendezvous import LeaderRendezvous, Membership
from phalanx_runtime.server.supervision.rendezvous_wire import DEFAULT_TIMING, Timing, rank_key

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
Locate = Callable[[], Awaitable[Path]]
MakeSpecs = Callable[[Launch, Path], list[RankSpec]]
ReadAssets = Callable[[Path, RankReady], wire.Assets]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """Index of this pod, number of pods, rendezvous address of the leader, and the group's token."""

    pod: int
    num_pods: int
    leader_host: str
    port: int
    token: str
    timing: Timing = DEFAULT_TIMING
    listen_host: str | None = None
    """Address on which the leader listens; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorParts:
    """Functions of a supervisor: find the model, build rank specs, read the assets. `command`: program of a rank."""

    locate: Locate
    make_specs: MakeSpecs
    read_assets: ReadAssets
    command: Sequence[str] = RANK_COMMAND
    bounds: SilenceBounds = DEFAULT_BOUNDS


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """Whether the pod serves, its incarnation, and the reason if it does not serve."""

    ready: bool
    incarnation: int
    reason: str


def _accounts(ready: list[RankReady]) -> list[MemoryAccount]:
    return [rank.memory for rank in ready if rank.memory is not None]


class LeaderSupervisor:
    """Controls the group from pod 0: state machine, own ranks, other pods, engine client."""

    def __init__(
        self, place: PodPlace, parts: SupervisorParts, client: EngineClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._parts = parts
        self._client = client
        self._clock = clock
        self._group = inc.Group(num_pods=place.num_pods)
        self._pod = RankLauncher(parts.locate, parts.make_specs, self, parts.command, parts.bounds)
        self._rendezvous = LeaderRendezvous(place.token, place.num_pods, self._happened, place.timing)
        self._assets: wire.Assets | None = None
        self._served = wire.Served()
        self._wake_due: float | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._sockets = ""
        self.port: int | None = None
        """Port of the rendezvous; None in a group of one pod and before `run`."""

    def status(self) -> SupervisorStatus:
        """State of the group."""
        return SupervisorStatus(self._group.phase == "serving", self._group.incarnation, self._group.reason())

    async def run(self) -> None:
        """Keeps the group running until cancelled, then ends its ranks. Raises OSError when the port is taken."""
        self._sockets = tempfile.mkdtemp(prefix="phalanx-")
        try:
            if self._place.num_pods > 1:
                self.port = await self._rendezvous.listen(self._place.listen_host, self._place.port)
            self._happened(inc.Joined(0, self._place.leader_host))
            await self._pod.run()
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._rendezvous.close()
            shutil.rmtree(self._sockets, ignore_errors=True)

    def stuck(self) -> str | None:
        """Reason this pod cannot recover by itself; None if it can."""
        due = self._wake_due if self._group.phase == "backoff" else None
        overdue_s = self._clock() - due if due is not None else 0.0
        wants_ranks = self._group.phase in ("loading", "serving")
        return why_stuck(LauncherView(self._pod.activity, self._pod.activity_s(), wants_ranks, overdue_s))

    def ranks(self) -> list[RankHealth]:
        """Health of this pod's ranks."""
        return self._pod.ranks()

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of all ranks of the group that are ready."""
        return list(self._group.memory)

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Reads the assets that the API server needs, then reports that this pod's ranks have loaded."""
        self._assets, self._served = await asyncio.to_thread(self._parts.read_assets, folder, ready[0]), ready[0].served
        self._happened(inc.RanksReady(0, launch.incarnation, tuple(_accounts(ready))))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Reports that this pod's ranks ended."""
        self._happened(
            inc.RanksFailed(pod=0, incarnation=launch.incarnation, why=end.why, is_echo=end.is_echo, is_draft=end.is_draft)
        )

    def _happened(self, event: inc.Event) -> None:
        if isinstance(event, inc.RanksFailed) and self._client.has_lone_request:
            event = replace(event, is_charged=False)
        before = self._group
        self._group, actions = inc.advance(before, event, self._clock())
        self._client.set_deaths(self._group.deaths, self._group.death)
        for action in actions:
            self._do(action)
        if self._group.phase != "serving" and self._group.reason() != before.reason():
            log.info("group is not ready: %s", self._group.reason(), extra={"incarnation": self._group.incarnation})
            self._client.set_reason(self._group.incarnation, self._group.reason())

    def _do(self, action: inc.Action) -> None:
        match action:
            case inc.StartRanks(incarnation, hosts, without_draft):
                self._start(incarnation, list(hosts), without_draft)
            case inc.StartServing(incarnation):
                assert self._assets is not None, "our own ranks were ready"
                log.info("group serves", extra={"incarnation": incarnation})
                self._client.serve(self._assets, self._served)
                self._rendezvous.send(say.Serve(incarnation))
            case inc.DrainGroup(incarnation, why):
                log.info("group drains: %s", why, extra={"incarnation": incarnation})
                self._client.pause(why)
                self._look_whether_drained(incarnation)
            case inc.StopRanks(incarnation, why, is_outside):
                log.warning("group stopped: %s", why, extra={"incarnation": incarnation})
                self._client.end_incarnation(incarnation + 1, why, is_outside)
                self._pod.stop()
                self._rendezvous.send(say.Stop(incarnation, why))
            case inc.WakeAfter(incarnation, delay_s):
                self._wake_due = self._clock() + delay_s
                self._later(delay_s, lambda number: self._happened(inc.BackoffOver(number)), incarnation)
            case _:
                assert_never(action)

    def _look_whether_drained(self, incarnation: int) -> None:
        if self._client.is_busy and self._group.incarnation == incarnation:
            self._later(DRAIN_LOOK_S, self._look_whether_drained, incarnation)
        else:
            self._happened(inc.Drained(incarnation))

    def _later(self, delay_s: float, do: Callable[[int], None], incarnation: int) -> None:
        loop = asyncio.get_running_loop()
        self._timers = {timer for timer in self._timers if not timer.cancelled() and timer.when() > loop.time()}
        self._timers.add(loop.call_later(delay_s, do, incarnation))

    def _start(self, incarnation: int, hosts: list[str], without_draft: str) -> None:
        """Starts the ranks of all pods. Pods reached the leader at `own_host`, so that address replaces its configured name."""
        hosts[0] = self._rendezvous.own_host or hosts[0]
        nonce = secrets.token_bytes(16)
        endpoint = f"ipc://{self._sockets}/engine-{incarnation}"
        self._client.bind(endpoint)
        key = rank_key(self._place.token, incarnation, nonce)
        self._pod.start(
            Launch(incarnation=incarnation, hosts=tuple(hosts), key=key, engine_socket=endpoint, without_draft=without_draft)
        )
        self._rendezvous.send(say.Start(incarnation, hosts, nonce, without_draft))


class MemberSupervisor:
    """Executes the leader's commands in any other pod."""

    def __init__(self, place: PodPlace, parts: SupervisorParts) -> None:
        self._place = place
        self._pod = RankLauncher(parts.locate, parts.make_specs, self, parts.command, parts.bounds)
        self._membership = Membership(place.token, place.pod, place.num_pods, self._obey, place.timing)
        self._status = SupervisorStatus(False, 0, "looking for the leader")
        self._accounts: list[MemoryAccount] = []
        self._stops: str | None = None

    def status(self) -> SupervisorStatus:
        """Whether the group serves according to the leader; not ready once this pod drains."""
        if self._stops is not None and self._status.ready:
            return SupervisorStatus(False, self._status.incarnation, self._stops)
        return self._status

    @property
    def is_busy(self) -> bool:
        """Whether the group serves: until Stop or loss of the leader, its open streams need this pod's ranks."""
        return self._status.ready

    def drain(self, reason: str) -> None:
        """Makes the pod unready and notifies the leader; the ranks continue until Stop."""
        self._stops = reason
        self._membership.leave(reason)

    def refuse(self, reason: str) -> None:
        """Sets the final reason; the ranks end with `run`."""
        self._show(SupervisorStatus(False, self._status.incarnation, reason))

    async def run(self) -> None:
        """Executes the leader's commands until cancelled, then ends the ranks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pod.run())
            tasks.create_task(self._membership.run(self._place.leader_host, self._place.port, self._lost))

    def stuck(self) -> str | None:
        """Reason this pod cannot recover by itself; None if it can."""
        return why_stuck(LauncherView(self._pod.activity, self._pod.activity_s()))

    def ranks(self) -> list[RankHealth]:
        """Health of this pod's ranks."""
        return self._pod.ranks()

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of this pod's ranks when they were last ready."""
        return self._accounts

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Reports to the leader that this pod's ranks have loaded."""
        self._accounts = _accounts(ready)
        self._membership.say(say.Ready(launch.incarnation, self._accounts))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Reports to the leader that this pod's ranks ended."""
        self._show(SupervisorStatus(False, launch.incarnation, end.why))
        self._membership.say(say.Failed(launch.incarnation, end.why, end.is_echo, end.is_draft))

    def _obey(self, command: say.Command) -> None:
        match command:
            case say.Start(incarnation, hosts, nonce, without_draft):
                self._show(SupervisorStatus(False, incarnation, "loading the model"))
                key = rank_key(self._place.token, incarnation, nonce)
                self._pod.start(Launch(incarnation=incarnation, hosts=tuple(hosts), key=key, without_draft=without_draft))
            case say.Serve(incarnation):
                self._show(SupervisorStatus(True, incarnation, ""))
            case say.Stop(incarnation, why):
                self._show(SupervisorStatus(False, incarnation, why))
                self._pod.stop()
            case _:
                assert_never(command)

    def _lost(self, why: str) -> None:
        self._show(SupervisorStatus(False, self._status.incarnation, why))
        self._pod.stop()

    def _show(self, status: SupervisorStatus) -> None:
        if status != self._status:
            log.info(
                "pod is %s", "ready" if status.ready else f"not ready: {status.reason}", extra={"incarnation": status.incarnation}
            )
        self._status = status
