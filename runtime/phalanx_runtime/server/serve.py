"""One pod's HTTP process: settings become a supervisor and an application, and uvicorn runs them until a signal comes."""

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from uvicorn.config import WS_PROTOCOLS

from phalanx_api import wire
from phalanx_frontend.app import create_health_app
from phalanx_frontend.limits import IDLE_CONNECTION_S
from phalanx_frontend.metrics import Tally
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.locate import locate, locate_exit
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.http.app import make_leader_app, supervised
from phalanx_runtime.server.http.health import PodVitals
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.supervision.pod import Launch
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND
from phalanx_runtime.server.supervision.rendezvous_wire import group_token
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor, MemberSupervisor, Parts, Place
from phalanx_runtime.settings import ModelSettings, ServeSettings

# What a group drafts with, found on this machine before its ranks start.

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft model's folder and the file of an exit, where they are wanted; `missing` says why one was not found."""

    draft_dir: str = ""
    exit: str = ""
    missing: str = ""


NO_DRAFTS = Drafts()


def find_drafts(settings: ModelSettings, pod_index: int, stop: threading.Event) -> Drafts:
    """What the settings ask for, fetched if need be. Blocks. A draft that cannot be had stops no group: it serves without."""
    cache, token, cached_only = settings.download_dir, settings.hf_token, settings.cached_only
    try:
        if settings.draft_model is not None and pod_index == 0:
            model = settings.draft_model
            found = locate(model, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return Drafts(draft_dir=str(found.dir))
        if settings.draft_exit is not None:
            uri = settings.draft_exit
            file = locate_exit(uri, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return Drafts(exit=str(file))
    except ModelError as error:
        log.warning("the group starts without speculation", extra={"why": str(error)})
        return Drafts(missing=str(error))
    return NO_DRAFTS


log = logging.getLogger(__name__)

GRACE_S = 3
"""How long open streams have to take their last event at the end. With the ranks' own second it stays below 5 s."""
DRAIN_LOOK_S = 0.02
LINK_FRAME_BYTES = 64 << 20
"""More than any request that the door lets through: a link is never cut because of one."""
EXIT_SUPERVISOR = 1
STOPPING = "the pod is stopping"


class Leaver(Protocol):
    """What the pod leaves when a signal comes: its engine's requests at the leader, its group elsewhere."""

    @property
    def is_busy(self) -> bool:
        """Whether anything open would break if the pod ended now."""
        ...

    def drain(self, reason: str) -> None:
        """Takes nothing new; what runs goes on."""
        ...

    def refuse(self, reason: str) -> None:
        """Ends what still runs."""
        ...


class PodServer(uvicorn.Server):
    """A server that takes no more requests when a signal comes, and ends open streams after `drain_s` or a second signal.

    Routers hear at once that the group drains, and send it nothing new. A pod that is not the leader's stays as long as its
    group serves: its ranks compute the leader's open streams.
    """

    def __init__(self, config: uvicorn.Config, leaver: Leaver, drain_s: float) -> None:
        super().__init__(config)
        self._leaver = leaver
        self._drain_s = drain_s
        self._leaving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remembers the loop, which signals must be brought to."""
        self._loop = asyncio.get_running_loop()
        await super().startup()
        for server in self.servers:
            for listening in server.sockets:
                log.info("listening", extra={"address": listening.getsockname()[:2]})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server once open streams are done; at the second signal they are ended."""
        if self._loop is not None and not self.should_exit:
            self._loop.call_soon_threadsafe(self._leave, self._drain_s)
        else:
            super().handle_exit(sig, frame)

    def _leave(self, drain_s: float) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            drain_s = 0.0
        self._leaving = asyncio.get_running_loop().create_task(self._drain(drain_s))

    async def _drain(self, drain_s: float) -> None:
        self._leaver.drain(STOPPING)
        log.info("leaving: open streams go on", extra={"seconds": drain_s})
        end = asyncio.get_running_loop().time() + drain_s
        while self._leaver.is_busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_LOOK_S)
        self._leaver.refuse(STOPPING)
        self.should_exit = True

    def fail(self, error: BaseException) -> None:
        """Ends the server with a code that says so."""
        self.exit_code = EXIT_SUPERVISOR
        self.should_exit = True


def serve(settings: ServeSettings) -> int:
    """Serves until SIGTERM or SIGINT; the exit code: 0 then, 1 when the supervisor failed.

    The server hears signals before uvicorn takes them over, and again when uvicorn raises them once it is done.
    """
    server = make_server(settings)
    signal.signal(signal.SIGTERM, server.handle_exit)
    signal.signal(signal.SIGINT, server.handle_exit)
    server.run()
    return server.exit_code


def make_server(settings: ServeSettings, rank_command: Sequence[str] = RANK_COMMAND) -> PodServer:
    """The server of this pod, ready to run. `rank_command` is the program of a rank."""
    registry = CollectorRegistry()
    stop = threading.Event()
    parts = make_parts(settings, stop, rank_command)
    group = settings.group
    place = Place(
        group.pod_index,
        group.num_pods,
        group.leader_host,
        group.master_port,
        group_token(group.token or secrets.token_hex(32), group.key),
    )
    client: EngineClient | None = None
    supervisor: LeaderSupervisor | MemberSupervisor
    leaver: Leaver
    tally = Tally()
    if group.pod_index == 0:
        client = EngineClient(EngineMetrics(registry, settings.model.served_names[0], tally))
        leaver, supervisor = client, LeaderSupervisor(place, parts, client)
    else:
        leaver = supervisor = MemberSupervisor(place, parts)
    vitals = PodVitals(supervisor, tally, client)

    def ended() -> None:
        stop.set()
        if client is not None:
            client.close()

    lifespan = supervised(supervisor, lambda error: server.fail(error), ended)
    app: FastAPI
    if client is not None:
        link = None
        if group.token is not None:
            link = LinkSettings(group.token, group.name, group.revision, settings.engine.page_size)
        app = make_leader_app(vitals, client, link, registry, lifespan, settings.http.api_keys)
    else:
        app = create_health_app(vitals.health, registry=registry, lifespan=lifespan)
    server = PodServer(make_config(app, settings.http.host, settings.http.port), leaver, settings.http.shutdown_timeout)
    return server


def make_config(app: FastAPI, host: str, port: int) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="websockets-sansio" if "websockets-sansio" in WS_PROTOCOLS else "auto",
        ws_ping_interval=None,
        ws_max_size=LINK_FRAME_BYTES,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def make_parts(settings: ServeSettings, stop: threading.Event, rank_command: Sequence[str]) -> Parts:
    """How the model is found, what each rank is told, and what doors need to know. `stop` ends a download."""

    drafts: dict[Path, Drafts] = {}
    versions: dict[Path, str] = {}

    source = settings.model

    def find() -> Path:
        local = locate(
            source.model,
            revision=source.revision,
            cache_dir=source.download_dir,
            hf_token=source.hf_token,
            progress=log.info,
            stop=stop,
            cached_only=source.cached_only,
        )
        versions[local.dir] = local.version
        drafts[local.dir] = find_drafts(source, settings.group.pod_index, stop)
        return local.dir

    async def find_beside() -> Path:
        return await asyncio.to_thread(find)

    def make_specs(launch: Launch, folder: Path) -> list[RankSpec]:
        return make_rank_specs(settings, launch, folder, drafts[folder], versions[folder])

    def assets(folder: Path, ready: RankReady) -> wire.Assets:
        longest = min(ready.max_model_len, ready.num_pages * ready.page_size)
        return read_assets(folder, source.served_names, longest)

    return Parts(find_beside, make_specs, assets, rank_command)


def make_rank_specs(
    settings: ServeSettings, launch: Launch, folder: Path, drafts: Drafts = NO_DRAFTS, model_version: str = ""
) -> list[RankSpec]:
    """What each rank of this pod is told: pods hold the ranks in order, the same number each."""
    group = settings.group
    local = group.local_world_size
    first = group.pod_index * local
    return [
        RankSpec(
            rank=first + i,
            world_size=group.world_size,
            pipeline_parallel_size=group.pipeline_parallel_size,
            local_world_size=local,
            local_rank=i,
            incarnation=launch.incarnation,
            hosts=[host for host in launch.hosts for _ in range(local)],
            base_port=group.master_port,
            token=launch.key,
            model_dir=str(folder),
            model_version=model_version,
            engine_socket=launch.engine_socket if first + i == 0 else "",
            engine=settings.engine,
            draft_dir=drafts.draft_dir,
            draft_exit=drafts.exit,
            draft_missing=drafts.missing or launch.without_draft,
        )
        for i in range(local)
    ]
