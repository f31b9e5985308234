"""HTTP process of a pod: builds server, supervisor and application from the settings."""

import gc
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from phalanx_api.tls.certificates import CertificateUnusable
from phalanx_frontend.app import create_health_app
from phalanx_frontend.auth.caller import accepted_keys
from phalanx_frontend.auth.origins import with_origins
from phalanx_frontend.auth.peers import ProbesOnly
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.images.source import image_source
from phalanx_frontend.metrics import CertificateMetrics, RequestTotals
from phalanx_frontend.tls import Certificate
from phalanx_frontend.tracing.otlp import start_tracer
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.devices.monitor import DeviceMonitor
from phalanx_runtime.server.devices.nvml import open_devices
from phalanx_runtime.server.devices.readings import DeviceSource
from phalanx_runtime.server.http.adapter_sources import find_adapters, make_on_demand
from phalanx_runtime.server.http.adapters import AdapterFolders
from phalanx_runtime.server.http.app import PodHealthSource, make_leader_app, supervised
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.launch import make_parts
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.pod_server import Drainable, PodServer, guarded_config, make_config
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND
from phalanx_runtime.server.supervision.rendezvous_wire import group_token
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor, PodPlace, SupervisorParts, WorkerSupervisor
from phalanx_runtime.settings import GroupSettings, ServeSettings

log = logging.getLogger(__name__)


def serve(settings: ServeSettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0, or 1 when the supervisor failed or the model cannot be had."""
    server = make_server(settings)
    gc.freeze()  # excludes the imports from collections: see phalanx_router.program
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
        is_for_routers=group.is_in_pod,
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
