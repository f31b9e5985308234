"""The supervisor of a pod: the leader's runs the group, the other pods' obey it.

The leader feeds `incarnation.advance` with what happens and does what it answers; this module decides nothing. Both kinds
end their ranks when they are cancelled, and are ready only while the whole group serves.
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
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, Bounds
from phalanx_runtime.server.supervision.pod import Launch, Pod, View, why_stuck
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, RanksEnded
from phalanx_runtime.server.supervision.rendezvous import LeaderRendezvous, Membership
from phalanx_runtime.server.supervision.rendezvous_wire import DEFAULT_TIMING, Timing, rank_key

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
Locate = Callable[[], Awaitable[Path]]
MakeSpecs = Callable[[Launch, Path], list[RankSpec]]
ReadAssets = Callable[[Path, RankReady], wire.Assets]


@dataclass(frozen=True, slots=True)
class Place:
    """This pod's place: its index, how many pods there are, where the leader is found, the service's token.

    `listen_host` is the leader's own address for that; None is every address.
    """

    pod: int
    num_pods: int
    leader_host: str
    port: int
    token: str
    timing: Timing = DEFAULT_TIMING
    listen_host: str | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a supervisor is given: how the model is found, what ranks and doors are told, the rank program, when one is hung."""

    locate: Locate
    make_specs: MakeSpecs
    read_assets: ReadAssets
    command: Sequence[str] = RANK_COMMAND
    bounds: Bounds = DEFAULT_BOUNDS


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the pod serves, in which incarnation, and why not."""

    ready: bool
    incarnation: int
    reason: str


def _accounts(ready: list[RankReady]) -> list[MemoryAccount]:
    return [rank.memory for rank in ready if rank.memory is not None]


class LeaderSupervisor:
    """Runs the group from pod 0: its state machine, its own ranks, the other pods, and the engine client."""

    def __init__(self, place: Place, parts: Parts, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._parts = parts
        self._client = client
        self._clock = clock
        self._group = inc.Group(place.num_pods)
        self._pod = Pod(parts.locate, parts.make_specs, self, parts.command, parts.bounds)
        self._rendezvous = LeaderRendezvous(place.token, place.num_pods, self._happened, place.timing)
        self._assets: wire.Assets | None = None
        self._served = wire.Served()
        self._wake_due: float | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._sockets = ""
        self.port: int | None = None
        """Where pods are met; None in a group of one pod, and before `run`."""

    def status(self) -> Status:
        """Whether the group serves."""
        return Status(self._group.phase == "serving", self._group.incarnation, self._group.reason())

    async def run(self) -> None:
        """Keeps the group running until it is cancelled, which ends its ranks. Raises OSError when the port is taken."""
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
        """Why this pod cannot mend itself, or None when it can."""
        due = self._wake_due if self._group.phase == "backoff" else None
        overdue_s = self._clock() - due if due is not None else 0.0
        wants_ranks = self._group.phase in ("loading", "serving")
        return why_stuck(View(self._pod.doing, self._pod.doing_s(), wants_ranks, overdue_s))

    def ranks(self) -> list[RankHealth]:
        """The ranks of this pod."""
        return self._pod.ranks()

    def memory(self) -> list[MemoryAccount]:
        """The account of every rank of the group that is ready."""
        return list(self._group.memory)

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Our ranks have loaded; reads what doors need of the model."""
        self._assets, self._served = await asyncio.to_thread(self._parts.read_assets, folder, ready[0]), ready[0].served
        self._happened(inc.RanksReady(0, launch.incarnation, tuple(_accounts(ready))))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Our ranks are gone."""
        self._happened(inc.RanksFailed(0, launch.incarnation, end.why, end.is_echo, is_draft=end.is_draft))

    def _happened(self, event: inc.Event) -> None:
        if isinstance(event, inc.RanksFailed) and self._client.has_alone:
            event = replace(event, is_charged=False)
        before = self._group
        self._group, actions = inc.advance(before, event, self._clock())
        self._client.died(self._group.deaths, self._group.death)
        for action in actions:
            self._do(action)
        if self._group.phase != "serving" and self._group.reason() != before.reason():
            log.info("group is not ready: %s", self._group.reason(), extra={"incarnation": self._group.incarnation})
            self._client.tell(self._group.incarnation, self._group.reason())

    def _do(self, action: inc.Action) -> None:
        match action:
            case inc.Start(incarnation, hosts, without_draft):
                self._start(incarnation, list(hosts), without_draft)
            case inc.Serve(incarnation):
                assert self._assets is not None, "our own ranks were ready"
                log.info("group serves", extra={"incarnation": incarnation})
                self._client.serve(self._assets, self._served)
                self._rendezvous.send(say.Serve(incarnation))
            case inc.Drain(incarnation, why):
                log.info("group drains: %s", why, extra={"incarnation": incarnation})
                self._client.pause(why)
                self._look_whether_drained(incarnation)
            case inc.Stop(incarnation, why, is_outside):
                log.warning("group stopped: %s", why, extra={"incarnation": incarnation})
                self._client.lose(incarnation + 1, why, is_outside)
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
        """Starts our ranks and tells the others. The name by which pods found us is better known than our own address."""
        hosts[0] = self._rendezvous.own_host or hosts[0]
        nonce = secrets.token_bytes(16)
        endpoint = f"ipc://{self._sockets}/engine-{incarnation}"
        self._client.bind(endpoint)
        key = rank_key(self._place.token, incarnation, nonce)
        self._pod.start(Launch(incarnation, tuple(hosts), key, endpoint, without_draft))
        self._rendezvous.send(say.Start(incarnation, hosts, nonce, without_draft))


class MemberSupervisor:
    """Obeys the leader from any other pod."""

    def __init__(self, place: Place, parts: Parts) -> None:
        self._place = place
        self._pod = Pod(parts.locate, parts.make_specs, self, parts.command, parts.bounds)
        self._membership = Membership(place.token, place.pod, place.num_pods, self._obey, place.timing)
        self._status = Status(False, 0, "looking for the leader")
        self._accounts: list[MemoryAccount] = []
        self._stops: str | None = None

    def status(self) -> Status:
        """Whether the group serves, as the leader said; a pod that is told to leave is not ready, whatever its group does."""
        if self._stops is not None and self._status.ready:
            return Status(False, self._status.incarnation, self._stops)
        return self._status

    @property
    def is_busy(self) -> bool:
        """Whether the group serves: until the leader says Stop, or is gone, its open streams need the ranks of this pod."""
        return self._status.ready

    def drain(self, reason: str) -> None:
        """Is not ready from now on, and tells the leader; the ranks go on until it says Stop."""
        self._stops = reason
        self._membership.leave(reason)

    def refuse(self, reason: str) -> None:
        """Tells the reason for good; the ranks end with `run`."""
        self._show(Status(False, self._status.incarnation, reason))

    async def run(self) -> None:
        """Obeys the leader until cancelled, which ends the ranks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pod.run())
            tasks.create_task(self._membership.run(self._place.leader_host, self._place.port, self._lost))

    def stuck(self) -> str | None:
        """Why this pod cannot mend itself, or None when it can."""
        return why_stuck(View(self._pod.doing, self._pod.doing_s()))

    def ranks(self) -> list[RankHealth]:
        """The ranks of this pod."""
        return self._pod.ranks()

    def memory(self) -> list[MemoryAccount]:
        """The account of each rank of this pod, as it was when they were last ready."""
        return self._accounts

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Our ranks have loaded."""
        self._accounts = _accounts(ready)
        self._membership.say(say.Ready(launch.incarnation, self._accounts))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Our ranks are gone."""
        self._show(Status(False, launch.incarnation, end.why))
        self._membership.say(say.Failed(launch.incarnation, end.why, end.is_echo, end.is_draft))

    def _obey(self, command: say.Command) -> None:
        match command:
            case say.Start(incarnation, hosts, nonce, without_draft):
                self._show(Status(False, incarnation, "loading the model"))
                key = rank_key(self._place.token, incarnation, nonce)
                self._pod.start(Launch(incarnation, tuple(hosts), key, without_draft=without_draft))
            case say.Serve(incarnation):
                self._show(Status(True, incarnation, ""))
            case say.Stop(incarnation, why):
                self._show(Status(False, incarnation, why))
                self._pod.stop()
            case _:
                assert_never(command)

    def _lost(self, why: str) -> None:
        self._show(Status(False, self._status.incarnation, why))
        self._pod.stop()

    def _show(self, status: Status) -> None:
        if status != self._status:
            log.info(
                "pod is %s", "ready" if status.ready else f"not ready: {status.reason}", extra={"incarnation": status.incarnation}
            )
        self._status = status
