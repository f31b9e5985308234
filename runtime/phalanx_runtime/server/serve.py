"""HTTP process of a pod: builds supervisor and application from the settings."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from uvicorn.config import WS_PROTOCOLS

from phalanx_api import labels, wire
from phalanx_api.tls.certificates import CertificateUnusable
from phalanx_frontend.app import create_health_app
from phalanx_frontend.auth.caller import accepted_keys
from phalanx_frontend.auth.origins import with_origins
from phalanx_frontend.auth.peers import ProbesOnly, RoleMiddleware, add_listener, mutual_tls
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.images.source import image_source
from phalanx_frontend.limits import IDLE_CONNECTION_S
from phalanx_frontend.metrics import CertificateMetrics, RequestTotals
from phalanx_frontend.tls import Certificate
from phalanx_frontend.tracing.otlp import start_tracer
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.locate import locate, locate_exit
from phalanx_runtime.checkpoint.overrides import FolderOverlay
from phalanx_runtime.checkpoint.pooling import read_outputs
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import open_line, show_loading
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.devices.monitor import DeviceMonitor
from phalanx_runtime.server.devices.nvml import open_devices
from phalanx_runtime.server.devices.readings import DeviceSource
from phalanx_runtime.server.http.adapter_sources import adapter_source, find_adapters, make_on_demand
from phalanx_runtime.server.http.adapters import AdapterFolders
from phalanx_runtime.server.http.app import PodHealthSource, make_leader_app, supervised
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.supervision.pod import Launch, ignore_weights
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND
from phalanx_runtime.server.supervision.rendezvous_wire import group_token
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor, PodPlace, SupervisorParts, WorkerSupervisor
from phalanx_runtime.settings import GroupSettings, ModelSettings, ServeSettings

log = logging.getLogger(__name__)

GRACE_S = 3
"""Time of open streams to receive their last event; with `EXIT_S` of the ranks below 5 s."""
DRAIN_POLL_S = 0.02
LINK_FRAME_BYTES = 256 << 20
"""More than any request the API server accepts: 64 MiB of tiles, and a body of 32 MiB, whose strings may grow."""
EXIT_SUPERVISOR = 1
STOPPING = "the pod is stopping"


@dataclass(frozen=True, slots=True)
class LocatedDraft:
    """The draft to load."""

    draft_dir: str = ""
    """Folder of the draft model."""
    exit: str = ""
    """File of the self-draft exit."""
    missing: str = ""
    """Reason, if not found."""


NO_DRAFT = LocatedDraft()


def find_drafts(settings: ModelSettings, pod_index: int, stop: threading.Event) -> LocatedDraft:
    """Locates or downloads the configured draft. A missing draft only disables speculation."""
    cache, token, cached_only = settings.download_dir, settings.hf_token, settings.cached_only
    try:
        if settings.draft_model is not None and pod_index == 0:
            model = settings.draft_model
            found = locate(model, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return LocatedDraft(draft_dir=str(found.dir))
        if settings.draft_exit is not None:
            uri = settings.draft_exit
            file = locate_exit(uri, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return LocatedDraft(exit=str(file))
    except ModelError as error:
        log.warning("the group starts without speculation", extra={"why": str(error)})
        return LocatedDraft(missing=str(error))
    return NO_DRAFT


class Drainable(Protocol):
    """Receives the shutdown: engine client or worker supervisor."""

    @property
    def is_busy(self) -> bool:
        """Whether open requests would fail."""
        ...

    def drain(self, reason: str) -> None:
        """Accepts no new requests."""
        ...

    def stop(self, reason: str) -> None:
        """Ends running requests."""
        ...


class PodServer(uvicorn.Server):
    """Drains on a signal; ends open streams after `drain_s` or on a second signal.

    A worker waits while its group serves: its ranks compute the leader's streams.
    """

    def __init__(self, config: uvicorn.Config, drainable: Drainable, drain_s: float) -> None:
        super().__init__(config)
        self.drainable = drainable
        self._drain_s = drain_s
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        self.error: BaseException | None = None
        """Why the server ended by itself."""
        self.probes: uvicorn.Config | None = None
        """Also listens for probes as configured here."""
        self.certificate: Certificate | None = None
        """Loaded again when it changes."""
        self._following: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Stores the event loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup()
        if self.probes is not None and self.started:
            await add_listener(self, self.probes)
        if self.certificate is not None:
            self._following = self._loop.create_task(self.certificate.follow())
        for server in self.servers:
            for listening in server.sockets:
                log.info("listening", extra={"address": listening.getsockname()[:2]})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain; a second signal ends it."""
        if self._loop is not None and not self.should_exit:
            self._loop.call_soon_threadsafe(self._start_drain)
        else:
            super().handle_exit(sig, frame)

    def _start_drain(self) -> None:
        drain_s = self._drain_s
        if self._drain_task is not None:
            self._drain_task.cancel()
            drain_s = 0.0
        self._drain_task = asyncio.get_running_loop().create_task(self._drain(drain_s))

    async def _drain(self, drain_s: float) -> None:
        self.drainable.drain(STOPPING)
        log.info("draining: open streams continue", extra={"seconds": drain_s})
        end = asyncio.get_running_loop().time() + drain_s
        while self.drainable.is_busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        self.drainable.stop(STOPPING)
        self.should_exit = True

    def fail(self, error: BaseException) -> None:
        """Ends the server with an error."""
        self.error = error
        self.exit_code = EXIT_SUPERVISOR
        self.should_exit = True


def serve(settings: ServeSettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0, or 1 when the supervisor failed or the model cannot be had."""
    server = make_server(settings)
    # uvicorn replaces these while it runs, and re-raises captured signals at its end.
    signal.signal(signal.SIGTERM, server.handle_exit)
    signal.signal(signal.SIGINT, server.handle_exit)
    server.run()
    if isinstance(server.error, ModelError):
        log.error("the model cannot be served", extra={"why": str(server.error)})
    return server.exit_code


def open_visible_devices(num_ranks: int) -> DeviceSource | None:
    """The devices of this pod's ranks, if it has any."""
    return open_devices(num_ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))


def make_server(
    settings: ServeSettings,
    rank_command: Sequence[str] = RANK_COMMAND,
    open_source: Callable[[int], DeviceSource | None] = open_visible_devices,
) -> PodServer:
    """The server of this pod. `open_source`: of its devices, for a number of ranks."""
    stop = threading.Event()
    parts = make_parts(settings, stop, rank_command)
    group, certificate = settings.group, read_certificate(settings.group)
    token = group.token or ServiceToken([secrets.token_hex(32)])
    place = PodPlace(
        pod=group.pod_index,
        num_pods=group.num_pods,
        leader_host=group.leader_host,
        port=group.master_port,
        tokens=lambda: [group_token(accepted, group.key) for accepted in token.accepted],
        certificate=certificate,
    )
    make_app = _make_leader if group.pod_index == 0 else _make_worker
    registry = CollectorRegistry()
    source = open_source(group.local_world_size)
    monitor = None if source is None else DeviceMonitor(source, DeviceMetrics(registry), group.pod_index)
    process = PodProcess(registry=registry, stop=stop, failed=lambda error: server.fail(error), monitor=monitor)
    app, drainable = make_app(settings, place, parts, process)
    server = _server(with_origins(app, settings.http.allowed_origins), drainable, settings, certificate)
    if certificate is not None:
        CertificateMetrics(registry, {"internal": certificate})
    return server


def read_certificate(group: GroupSettings) -> Certificate | None:
    """The certificate of this pod; null without TLS. Raises SystemExit 2 if it is unusable."""
    try:
        return None if group.tls is None else Certificate(group.tls)
    except CertificateUnusable as error:
        print(f"phalanx-runtime: argument --internal-tls-dir: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _server(app: ASGIApp, drainable: Drainable, settings: ServeSettings, certificate: Certificate | None) -> PodServer:
    """With a certificate, probes of the kubelet have a port of their own."""
    http = settings.http
    if certificate is None:
        server = PodServer(make_config(app, http.host, http.port), drainable, http.shutdown_timeout)
    else:
        server = PodServer(guarded_config(app, http.host, http.port, certificate), drainable, http.shutdown_timeout)
        server.certificate = certificate
    if http.health_port is not None:
        server.probes = make_config(ProbesOnly(app), http.host, http.health_port)
    return server


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProcess:
    """Parts of the HTTP process that leader and workers share."""

    registry: CollectorRegistry
    stop: threading.Event
    """Aborts downloads."""
    failed: Callable[[BaseException], None]
    """Called when the supervisor ends by itself."""
    monitor: DeviceMonitor | None


def _make_leader(
    settings: ServeSettings, place: PodPlace, parts: SupervisorParts, process: PodProcess
) -> tuple[FastAPI, Drainable]:
    registry, totals, group = process.registry, RequestTotals(), settings.group
    adapters = find_adapters(settings)
    client = EngineClient(EngineMetrics(registry, settings.model.served_names[0], totals, group.world_size), EngineSocket())
    client.adapters.configure(adapters)
    supervisor = LeaderSupervisor(place, parts, client)

    def ended() -> None:
        process.stop.set()
        client.close()

    link = None
    if group.token is not None:
        link = LinkSettings(token=group.token, group=group.name, revision=group.revision, page_size=settings.engine.page_size)
    app = make_leader_app(
        PodHealthSource(supervisor, totals),
        client,
        link,
        registry=registry,
        lifespan=supervised(supervisor, process.failed, ended, process.monitor),
        keys=accepted_keys(settings.http.api_keys, settings.http.oidc),
        images=image_source(settings.http.image_hosts),
        tracer=start_tracer(settings.http.tracing),
        adapters=AdapterFolders(settings.model.lora_dir, settings.engine.max_lora_rank) if settings.model.lora_dir else None,
        declared=make_on_demand(settings, client, supervisor.fetch_adapter, process.stop)
        if settings.engine.enable_lora
        else None,
    )
    return app, client


def _make_worker(
    settings: ServeSettings, place: PodPlace, parts: SupervisorParts, process: PodProcess
) -> tuple[FastAPI, Drainable]:
    supervisor = WorkerSupervisor(place, parts)
    health = PodHealthSource(supervisor, RequestTotals())
    lifespan = supervised(supervisor, process.failed, process.stop.set, process.monitor)
    return create_health_app(health.health, registry=process.registry, lifespan=lifespan), supervisor


def guarded_config(app: ASGIApp, host: str, port: int, certificate: Certificate) -> uvicorn.Config:
    """uvicorn configuration with mutual TLS: routers may call every path, Prometheus its metrics."""
    allowed = RoleMiddleware(app, (labels.ROUTER_ROLE,), {"/metrics": (labels.METRICS_ROLE, labels.ROUTER_ROLE)})
    return mutual_tls(make_config(allowed, host, port), certificate)


def make_config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """uvicorn configuration."""
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


def make_parts(settings: ServeSettings, stop: threading.Event, rank_command: Sequence[str]) -> SupervisorParts:
    """Functions of the supervisor. `stop` aborts a download."""
    drafts: dict[Path, LocatedDraft] = {}
    versions: dict[Path, str] = {}
    source, overlay = settings.model, FolderOverlay(settings.model.config_overrides)
    line = open_line(sys.stderr) if settings.log_format != "json" else None

    def locate_model() -> Path:
        local = locate(
            source.model,
            revision=source.revision,
            cache_dir=source.download_dir,
            hf_token=source.hf_token,
            progress=log.info,
            stop=stop,
            cached_only=source.cached_only,
            bar=None if line is None else line.show,
        )
        folder = overlay.apply(local.dir)
        versions[folder], drafts[folder] = local.version, find_drafts(source, settings.group.pod_index, stop)
        return folder

    async def locate_in_thread() -> Path:
        return await asyncio.to_thread(locate_model)

    def make_specs(launch: Launch, folder: Path) -> list[RankSpec]:
        return make_rank_specs(settings, launch, folder, drafts[folder], versions[folder])

    def assets(folder: Path, ready: RankReady) -> wire.Assets:
        max_model_len = min(ready.max_model_len, ready.num_pages * ready.page_size)
        embedding, classification = read_outputs(folder, ready.served, settings.engine)
        parsers = wire.ParserNames(tool_call=settings.engine.tool_call_parser, reasoning=settings.engine.reasoning_parser)
        read = partial(read_assets, embedding=embedding, classification=classification, image_obstacle=ready.image_obstacle)
        return read(folder, source.served_names, max_model_len, parsers=parsers, overrides=source.asset_overrides)

    return SupervisorParts(
        locate=locate_in_thread,
        make_specs=make_specs,
        read_assets=assets,
        command=rank_command,
        is_in_pod=settings.group.is_in_pod,
        activity_changed=show_loading(line),
        weights_loaded=ignore_weights if line is None else line.set_loaded,
        fetch_adapter=adapter_source(settings, stop).refusal,
    )


def make_rank_specs(
    settings: ServeSettings, launch: Launch, folder: Path, drafts: LocatedDraft = NO_DRAFT, model_version: str = ""
) -> list[RankSpec]:
    """Specs of this pod's consecutive ranks."""
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
            flight_dir=str(group.flight_dir or ""),
            tls_dir=str(group.tls.certificate.parent) if group.tls is not None else "",
        )
        for i in range(local)
    ]
