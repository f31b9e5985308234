"""Assembles the operator. The end of any part ends the process."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from dataclasses import replace

import kopf
from aiohttp import ClientSession

from phalanx_operator.apply.certificates import OperatorIdentity
from phalanx_operator.apply.executor import ActionExecutor
from phalanx_operator.console.endpoint import ServicesConsole, add_console
from phalanx_operator.decide.pacing import DEFER_S
from phalanx_operator.kube.client import DEPLOYMENTS, NODES, PODS, SERVICES, STATEFUL_SETS, KubeClient
from phalanx_operator.kube.clock import ServerClock
from phalanx_operator.kube.http import SILENCE_S, HttpKube, connect, without_credentials
from phalanx_operator.kube.informer import Informer, read_event, watch_age_s
from phalanx_operator.lease import Lease
from phalanx_operator.loop import handlers
from phalanx_operator.loop.placement_queue import PlacementGate
from phalanx_operator.loop.reconcile import Clocks, Reconciler, Sources
from phalanx_operator.loop.reporting import EventRecorder, StatusReporter
from phalanx_operator.loop.worker import Loop
from phalanx_operator.metrics import CountingKube, Health, Metrics, make_app, serve
from phalanx_operator.observe.api_discovery import SchedulerDiscovery, denied_namespaces, returned_namespace
from phalanx_operator.observe.certificate import RouterCertificates
from phalanx_operator.observe.observe import Children
from phalanx_operator.observe.pod_failure import PodRejections
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.render.network import PeerNamespaces
from phalanx_operator.render.objects import Images
from phalanx_operator.routers import RouterPoller, poll_session
from phalanx_operator.scaling_history import ScalingHistory
from phalanx_operator.settings import Settings

log = logging.getLogger(__name__)
RETURN_CHECK_S = 10.0
"""Interval between two checks of denied namespaces."""


class StopRequested(Exception):
    """A signal was received."""


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT."""
    metrics, health = Metrics(), Health()
    client = await connect()
    app, history, bare = make_app(health, metrics), None, None
    if settings.console:
        history, bare = ScalingHistory(), without_credentials(client)
        add_console(app, ServicesConsole(lambda token: HttpKube(bare, token=token), history, lambda: health.leads))
    endpoint = await serve(app, settings.port)
    clock = ServerClock()
    kube = CountingKube(HttpKube(client, read_event=read_event, clock=clock), metrics)
    http = poll_session()
    identity = settings.pod_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    lease = Lease(kube, settings.lease_namespace, identity, lease_s=settings.lease_seconds)
    services = ServiceCache()
    reporter = StatusReporter(
        client=kube, services=services, events=EventRecorder(kube, identity), metrics=metrics, history=history
    )
    denied = await denied_namespaces(kube, settings.namespaces)
    settings = replace(settings, namespaces=tuple(name for name in settings.namespaces if name not in denied))
    loop, informers, poller = _assemble(settings, kube, http=http, reporter=reporter, clock=clock)
    _set_on_signals(stop := asyncio.Event())
    try:
        async with asyncio.TaskGroup() as tasks:
            leading: list[asyncio.Task[None]] = []
            tasks.create_task(_stop_when(stop, leading, lease))
            tasks.create_task(_stop_for_returned(kube, denied, stop))
            health.stalls = lambda: _stalls(informers)
            for informer in informers:
                tasks.create_task(informer.run())
            for informer in informers:
                await informer.synced.wait()
            health.ready = True  # a standby can lead at once
            await lease.acquire()
            metrics.is_leader.set(1)
            health.leads = True
            leading += [tasks.create_task(lease.keep()), tasks.create_task(loop.work(settings.workers))]
            tasks.create_task(_watch_services(settings, loop, services, stop))
    except* StopRequested:
        log.info("stopped")
    finally:
        await lease.release()
        await poller.close()
        await http.close()
        await endpoint.cleanup()
        if bare is not None:
            await bare.close()
        await client.close()


async def _stop_when(stop: asyncio.Event, leading: list["asyncio.Task[None]"], lease: Lease) -> None:
    """Waits for `stop`, then releases the lease before kopf ends, which takes seconds.

    Raises StopRequested.
    """
    await stop.wait()
    if leading:
        for task in leading:
            task.cancel()
        await asyncio.gather(*leading, return_exceptions=True)
        await lease.release()
    raise StopRequested


async def _stop_for_returned(kube: KubeClient, denied: frozenset[str], stop: asyncio.Event) -> None:
    """Ends the program once it may watch a denied namespace. The kubelet starts it again, and it watches this namespace too."""
    while denied and not stop.is_set():
        await asyncio.sleep(RETURN_CHECK_S)
        if namespace := await returned_namespace(kube, denied):
            log.info("namespace may be watched again", extra={"namespace": namespace})
            stop.set()


def _assemble(
    settings: Settings, kube: KubeClient, *, http: ClientSession, reporter: StatusReporter, clock: ServerClock
) -> tuple[Loop, list[Informer], RouterPoller]:
    """Returns the loop for a leader, the informers for every replica, and the poller."""
    children = Children()
    images = Images(settings.runtime_image, settings.router_image, settings.image_pull_secrets)
    peers = PeerNamespaces(settings.lease_namespace, settings.prometheus_namespace)
    poller = RouterPoller(kube, http, lambda key: loop.wake(key), OperatorIdentity(kube, clock.moment))
    reconciler = Reconciler(
        client=kube,
        sources=Sources(
            children=children,
            rejections=PodRejections(kube),
            routers=poller,
            certificates=RouterCertificates(kube),
            services=reporter.services,
        ),
        placement=PlacementGate(schedulers=SchedulerDiscovery(kube), wake=lambda key: loop.wake(key, after_s=0.0)),
        executor=ActionExecutor(
            kube,
            children,
            images,
            lambda: secrets.token_hex(32),
            peers=peers,
            watches_nodes=not settings.namespaces,
            private_sources=settings.private_sources,
        ),
        reporter=reporter,
        clocks=Clocks(now=clock.now, step_reason=clock.step_reason),
    )
    loop = Loop(reconciler.reconcile, reporter.metrics)
    informers = [
        Informer(kube, resource, namespace, store, wake=loop.wake, defer=lambda key: loop.wake(key, DEFER_S))
        for namespace in settings.namespaces or (None,)
        for resource, store in (
            (PODS, children.pods),
            (STATEFUL_SETS, children.sets),
            (DEPLOYMENTS, children.deployments),
            (SERVICES, children.services),
        )
    ]
    if not settings.namespaces:  # watching nodes needs a cluster role
        informers.append(Informer(kube, NODES, None, children.nodes, wake=loop.wake, defer=loop.wake, selector=""))
    for resource in {informer.resource for informer in informers}:
        age = reporter.metrics.watch_age.labels(resource.plural)
        age.set_function(lambda resource=resource: watch_age_s(informers, resource, time.monotonic()))  # type: ignore[misc]
    return loop, informers, poller


async def _watch_services(settings: Settings, loop: Loop, services: ServiceCache, stop: asyncio.Event) -> None:
    """Runs kopf until `stop`. It replaces the signal handlers, so they are set again."""
    handlers.silence_events()
    ready = asyncio.Event()
    watch = kopf.operator(
        registry=handlers.registry(lambda key: loop.wake(key, after_s=0.0), services, scans=not settings.namespaces),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        ready_flag=ready,
        stop_flag=stop,
    )
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(watch)
        ended.add_done_callback(lambda _: ready.set())
        await ready.wait()
        _set_on_signals(stop)
        await ended
    stop.set()


def _set_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def _stalls(informers: list[Informer]) -> list[str]:
    """Returns the watches without data for `4 * SILENCE_S`."""
    now = time.monotonic()
    return [
        f"no data of {informer.resource.plural} for {now - informer.last_data_at:.0f} s"
        for informer in informers
        if now - informer.last_data_at > 4 * SILENCE_S
    ]
