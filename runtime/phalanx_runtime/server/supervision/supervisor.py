"""Supervisors: the leader's controls the group, those of workers execute its commands."""

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
from phalanx_frontend.tls import Certificate
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.devices.monitor import DeviceReport
from phalanx_runtime.server.supervision import incarnation as inc
from phalanx_runtime.server.supervision import rendezvous_wire as frames
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, SilenceBounds
from phalanx_runtime.server.supervision.pod import (
    Activity,
    Launch,
    LauncherView,
    RankLauncher,
    RankListener,
    ignore_activity,
    ignore_weights,
    stuck_reason,
)
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND, RanksEnded
from phalanx_runtime.server.supervision.rendezvous import LeaderRendezvous, WorkerRendezvous
from phalanx_runtime.server.supervision.rendezvous_wire import DEFAULT_TIMING, GroupTokens, Timing, find_token, rank_key, token_id

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
Locate = Callable[[], Awaitable[Path]]
MakeSpecs = Callable[[Launch, Path], list[RankSpec]]
ReadAssets = Callable[[Path, RankReady], wire.Assets]
FetchAdapter = Callable[[wire.DeclaredAdapter], str]


def no_adapters(adapter: wire.DeclaredAdapter) -> str:
    """Returns that this pod has no slots."""
    return "the pod has no slots for adapters: start it with --enable-lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """This pod's place in the group."""

    pod: int
    num_pods: int
    leader_host: str
    port: int
    """Port of the rendezvous."""
    tokens: GroupTokens
    """Tokens of the group."""
    timing: Timing = DEFAULT_TIMING
    certificate: Certificate | None = None
    """Of this pod: the rendezvous is by mutual TLS."""
    listen_host: str | None = None
    """Address on which the leader listens; all by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorParts:
    """Functions of a supervisor."""

    locate: Locate
    """Finds the model folder."""
    make_specs: MakeSpecs
    read_assets: ReadAssets
    command: Sequence[str] = RANK_COMMAND
    """Program of a rank."""
    bounds: SilenceBounds = DEFAULT_BOUNDS
    is_in_pod: bool = True
    """False: `run` raises ModelError if the first start fails because of the model."""
    activity_changed: Callable[[Activity], None] = ignore_activity
    weights_loaded: Callable[[int, int], None] = ignore_weights
    fetch_adapter: FetchAdapter = no_adapters
    """Downloads a declared adapter. Blocks. Returns why not; empty on success."""

    def make_launcher(self, listener: RankListener) -> RankLauncher:
        """Returns the launcher of this pod's ranks."""
        return RankLauncher(
            self.locate,
            self.make_specs,
            listener,
            command=self.command,
            bounds=self.bounds,
            is_in_pod=self.is_in_pod,
            activity_changed=self.activity_changed,
            weights_loaded=self.weights_loaded,
        )


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """Whether the pod serves."""

    ready: bool
    incarnation: int
    reason: str
    """Why the pod is not ready; empty if it is."""


def _accounts(ready: list[RankReady]) -> list[MemoryAccount]:
    return [rank.memory for rank in ready if rank.memory is not None]


class LeaderSupervisor:
    """Passes events to `incarnation.advance` and executes the actions."""

    def __init__(
        self, place: PodPlace, parts: SupervisorParts, client: EngineClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._parts = parts
        self._client = client
        self._clock = clock
        self._group = inc.Group(num_pods=place.num_pods)
        self._launcher = parts.make_launcher(self)
        self._rendezvous = LeaderRendezvous(place.tokens, place.num_pods, self._handle, place.timing, place.certificate)
        self._assets: wire.Assets | None = None
        self._served = wire.Served()
        self._start_due: float | None = None
        """End of the backoff."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._socket_dir = ""
        self.port: int | None = None
        """Port of the rendezvous, once it listens."""

    def status(self) -> SupervisorStatus:
        """State of the group; not ready during a drain."""
        if self._group.phase == "serving":
            state = self._client.state()
            return SupervisorStatus(state.serving, self._group.incarnation, state.reason)
        return SupervisorStatus(False, self._group.incarnation, self._group.reason())

    async def run(self) -> None:
        """Runs until cancelled, then ends the ranks.

        Raises OSError when the port is taken, ModelError when the model of the first start cannot be had, outside of a pod.
        """
        self._socket_dir = tempfile.mkdtemp(prefix="phalanx-")
        try:
            if self._place.num_pods > 1:
                self.port = await self._rendezvous.listen(self._place.listen_host, self._place.port)
            self._handle(inc.Joined(0, self._place.leader_host))
            await self._launcher.run()
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._rendezvous.close()
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    async def fetch_adapter(self, adapter: wire.DeclaredAdapter) -> str:
        """Has the other pods download an adapter. Returns why one of them has not; empty: all have it."""
        return await self._rendezvous.fetch_adapter(adapter)

    def stuck_reason(self) -> str | None:
        """Reason this pod cannot recover by itself, if so."""
        due = self._start_due if self._group.phase == "backoff" else None
        overdue_s = self._clock() - due if due is not None else 0.0
        needs_ranks = self._group.phase in ("loading", "serving")
        return stuck_reason(LauncherView(self._launcher.activity, self._launcher.activity_s(), needs_ranks, overdue_s))

    def ranks(self) -> list[RankHealth]:
        """Health of this pod's ranks."""
        return self._launcher.ranks()

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of the group's ready ranks."""
        return list(self._group.memory)

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Reads the assets, then reports the ranks as ready."""
        self._assets, self._served = await asyncio.to_thread(self._parts.read_assets, folder, ready[0]), ready[0].served
        self._handle(inc.RanksReady(0, launch.incarnation, tuple(_accounts(ready))))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Reports the failure."""
        self._handle(
            inc.RanksFailed(pod=0, incarnation=launch.incarnation, why=end.why, is_echo=end.is_echo, is_draft=end.is_draft)
        )

    def devices_changed(self, report: DeviceReport) -> None:
        """Reports problems, power and energy of this pod's devices, and ends the ranks whose device has failed."""
        self._handle(inc.DevicesReported(0, report.problems, report.power, report.energy_j))
        if report.end_reason:
            self._launcher.fail(report.end_reason)

    def _handle(self, event: inc.Event) -> None:
        if isinstance(event, inc.RanksFailed) and self._client.has_lone_request:
            event = replace(event, is_charged=False)
        before = self._group
        self._group, actions = inc.advance(before, event, self._clock())
        self._client.set_deaths(self._group.deaths, self._group.death)
        self._client.set_devices(self._group.devices, self._group.power)
        if isinstance(event, inc.DevicesReported) and event.pod == 0:  # one interval for all pods
            self._client.set_energy(self._group.energy_j)
        for action in actions:
            self._execute(action)
        if self._group.phase != "serving" and self._group.reason() != before.reason():
            fields = {"incarnation": self._group.incarnation, "why": self._group.reason()}
            log.info("group is not ready", extra=fields)
            self._client.set_reason(self._group.incarnation, self._group.reason())

    def _execute(self, action: inc.Action) -> None:
        match action:
            case inc.StartRanks(incarnation, hosts, without_draft):
                self._start(incarnation, list(hosts), without_draft)
            case inc.StartServing(incarnation):
                assert self._assets is not None, "the leader's ranks are ready"
                log.info("group serves", extra={"incarnation": incarnation})
                self._client.serve(self._assets, self._served)
                self._rendezvous.send(frames.Serve(incarnation))
            case inc.DrainGroup(incarnation, why):
                log.info("group drains", extra={"incarnation": incarnation, "why": why})
                self._client.pause(why)
                self._check_drained(incarnation)
            case inc.StopRanks(incarnation, why, is_outside):
                log.warning("group stopped", extra={"incarnation": incarnation, "why": why})
                self._client.end_incarnation(incarnation + 1, why, is_outside)
                self._launcher.stop()
                self._rendezvous.send(frames.Stop(incarnation, why))
            case inc.WakeAfter(incarnation, delay_s):
                self._start_due = self._clock() + delay_s
                self._call_later(delay_s, lambda number: self._handle(inc.BackoffOver(number)), incarnation)
            case _:
                assert_never(action)

    def _check_drained(self, incarnation: int) -> None:
        if self._client.is_busy and self._group.incarnation == incarnation:
            self._call_later(DRAIN_POLL_S, self._check_drained, incarnation)
        else:
            self._handle(inc.Drained(incarnation))

    def _call_later(self, delay_s: float, callback: Callable[[int], None], incarnation: int) -> None:
        loop = asyncio.get_running_loop()
        self._timers = {timer for timer in self._timers if not timer.cancelled() and timer.when() > loop.time()}
        self._timers.add(loop.call_later(delay_s, callback, incarnation))

    def _start(self, incarnation: int, hosts: list[str], without_draft: str) -> None:
        """Starts all ranks. The address at which pods reached the leader replaces its configured name."""
        hosts[0] = self._rendezvous.own_host or hosts[0]
        nonce = secrets.token_bytes(16)
        endpoint = f"ipc://{self._socket_dir}/engine-{incarnation}"
        self._client.bind(endpoint)
        token = self._place.tokens()[0]
        key = rank_key(token, incarnation, nonce)
        self._launcher.start(
            Launch(incarnation=incarnation, hosts=tuple(hosts), key=key, engine_socket=endpoint, without_draft=without_draft)
        )
        self._rendezvous.send(frames.Start(incarnation, hosts, nonce, without_draft, token_id(token)))


class WorkerSupervisor:
    """Executes the leader's commands."""

    def __init__(self, place: PodPlace, parts: SupervisorParts) -> None:
        self._place = place
        self._launcher = parts.make_launcher(self)
        self._fetch_adapter = parts.fetch_adapter
        self._fetches: set[asyncio.Task[None]] = set()
        self._rendezvous = WorkerRendezvous(
            place.tokens, place.pod, place.num_pods, self._execute, timing=place.timing, certificate=place.certificate
        )
        self._status = SupervisorStatus(False, 0, "connecting to the leader")
        self._accounts: list[MemoryAccount] = []
        self._drain_reason: str | None = None

    def status(self) -> SupervisorStatus:
        """State of the group; not ready during a drain."""
        if self._drain_reason is not None and self._status.ready:
            return SupervisorStatus(False, self._status.incarnation, self._drain_reason)
        return self._status

    @property
    def is_busy(self) -> bool:
        """Whether the group serves: its open streams need these ranks."""
        return self._status.ready

    def drain(self, reason: str) -> None:
        """Makes the pod unready; the ranks continue until Stop."""
        self._drain_reason = reason
        self._rendezvous.announce_leaving(reason)

    def stop(self, reason: str) -> None:
        """Sets the final reason; `run` ends the ranks."""
        self._set_status(SupervisorStatus(False, self._status.incarnation, reason))

    async def run(self) -> None:
        """Runs until cancelled, then ends the ranks. Raises ModelError as that of the leader does."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._launcher.run())
                tasks.create_task(self._rendezvous.run(self._place.leader_host, self._place.port, self._disconnected))
        except ExceptionGroup as failures:
            reasons = failures.subgroup(ModelError)
            if reasons is None:
                raise
            raise reasons.exceptions[0] from failures

    def stuck_reason(self) -> str | None:
        """Reason this pod cannot recover by itself, if so."""
        return stuck_reason(LauncherView(self._launcher.activity, self._launcher.activity_s()))

    def ranks(self) -> list[RankHealth]:
        """Health of this pod's ranks."""
        return self._launcher.ranks()

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of this pod."""
        return self._accounts

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        """Reports to the leader."""
        self._accounts = _accounts(ready)
        self._rendezvous.send(frames.Ready(launch.incarnation, self._accounts))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        """Reports the failure."""
        self._set_status(SupervisorStatus(False, launch.incarnation, end.why))
        self._rendezvous.send(frames.Failed(launch.incarnation, end.why, end.is_echo, end.is_draft))

    def devices_changed(self, report: DeviceReport) -> None:
        """Reports problems, power and energy of this pod's devices to the leader, and ends the ranks whose device has failed."""
        self._rendezvous.report_devices(report.problems, report.power, report.energy_j)
        if report.end_reason:
            self._launcher.fail(report.end_reason)

    def _execute(self, command: frames.Command) -> None:
        match command:
            case frames.Start() as order:
                self._start(order)
            case frames.Serve(incarnation):
                self._set_status(SupervisorStatus(True, incarnation, ""))
            case frames.Stop(incarnation, why):
                self._set_status(SupervisorStatus(False, incarnation, why))
                self._launcher.stop()
            case frames.FetchAdapter() as fetch:
                task = asyncio.create_task(self._fetch(fetch))
                self._fetches.add(task)
                task.add_done_callback(self._fetches.discard)
            case _:
                assert_never(command)

    async def _fetch(self, order: frames.FetchAdapter) -> None:
        try:
            why = await asyncio.to_thread(self._fetch_adapter, order.adapter)
        except Exception as error:  # the leader waits for an answer
            log.exception("an adapter cannot be downloaded", extra={"adapter": order.adapter.name})
            why = repr(error)
        self._rendezvous.send(frames.AdapterFetched(order.number, why[:500]))

    def _start(self, order: frames.Start) -> None:
        token = find_token(self._place.tokens(), order.token_id)
        if token is None:
            why = "this pod has not read the leader's token yet"
            self._set_status(SupervisorStatus(False, order.incarnation, why))
            self._rendezvous.send(frames.Failed(order.incarnation, why, is_echo=False))
            return
        self._set_status(SupervisorStatus(False, order.incarnation, "loading the model"))
        key = rank_key(token, order.incarnation, order.nonce)
        launch = Launch(incarnation=order.incarnation, hosts=tuple(order.hosts), key=key, without_draft=order.without_draft)
        self._launcher.start(launch)

    def _disconnected(self, why: str) -> None:
        self._set_status(SupervisorStatus(False, self._status.incarnation, why))
        self._launcher.stop()

    def _set_status(self, status: SupervisorStatus) -> None:
        if status != self._status:
            extra = {"incarnation": status.incarnation}
            if status.ready:
                log.info("pod is ready", extra=extra)
            else:
                log.info("pod is not ready", extra=extra | {"why": status.reason})
        self._status = status
